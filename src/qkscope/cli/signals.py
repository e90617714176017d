"""Ctrl-C and SIGTERM: from the first line of a command to its last, they end it with one line and exit code 130 or 143.

While a command works, a signal raises ``KeyboardInterrupt``, so that files are closed and workers stop. Before and
after, while a module is imported, or if something swallowed that exception, it ends the process at once: nothing is
lost by that, since results are written atomically and workers end with their parent.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_IMPORTING = "<frozen importlib._bootstrap>"


class _Stop:
    """The signals that came in this process, and what a signal does now."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.owns_process = False
        """True from the first line of a command; False in a library or a test, whose process must not end."""
        self.working = self.reporting = self.reported = False
        self.line = "nothing was done"
        """What the line says after ``stopped; ``."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """End the process, or raise ``KeyboardInterrupt`` in work that can be left."""
        self.came.append(number)
        if self.reporting and not self.reported:
            return
        if self.owns_process and (not self.working or len(self.came) > 1 or _is_importing(frame)):
            self.end()
        raise KeyboardInterrupt

    def end(self) -> NoReturn:
        """Write the line unless it was written, and end at once."""
        if not self.reported:
            os.write(2, f"stopped; {self.line}\n".encode())
        os._exit(self.code)

    @property
    def code(self) -> int:
        """The exit code of the first signal that came; of Ctrl-C where Python itself handled it."""
        return 128 + (self.came or [signal.SIGINT])[0]


_stop = _Stop()


@contextmanager
def one_line_when_stopped() -> Iterator[None]:
    """End a command, from its imports to its last line, with one line and an exit code if a signal comes."""
    atexit.register(_ignore)  # registered first, so it runs last: Python then resets handlers, and only tidies up
    _stop.owns_process = True
    sys.unraisablehook = _end_if_swallowed(sys.unraisablehook)
    _listen()
    try:
        yield
    finally:
        _stop.working = False
        if _stop.came:
            if not _stop.reported:
                _stop.end()
            raise SystemExit(_stop.code)


@contextmanager
def interruptible(line: str) -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` when a signal comes; ``line`` is what is printed if the process ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outside, before = _stop.working, [(number, signal.getsignal(number)) for number in NUMBERS]
    if not _stop.owns_process:
        _stop.came, _stop.reporting, _stop.reported = [], False, False
    _stop.line = line
    _listen()
    try:
        _stop.working = True
        yield
    finally:
        _stop.working = outside
        if not outside:
            _stop.line = "the command had already ended"
        if not _stop.owns_process:
            for number, handler in before:
                signal.signal(number, handler)


def was_stopped() -> bool:
    """Return whether a signal came, whatever exception its ``KeyboardInterrupt`` has become."""
    return bool(_stop.came)


def report_stop(write: Callable[[], None]) -> int:
    """Write the line of a stopped command, once, and return its exit code."""
    _stop.reporting = True
    write()
    _stop.reported = True
    return _stop.code


def _listen() -> None:
    """Handle both signals, except those that the caller of this process has it ignore."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop.handle)


def _ignore() -> None:
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORTING:
        frame = frame.f_back
    return frame is not None


def _end_if_swallowed(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A hook that ends the process where Python would print, and then forget, the exception of a signal."""

    def end_or_print(unraisable: Any) -> None:
        if _stop.came:
            _stop.end()
        hook(unraisable)

    return end_or_print
