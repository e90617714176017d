"""Progress of long work: one bar for terminals and notebooks, a line every few seconds in a log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS_BETWEEN_LINES = 5.0
BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"
_log = logging.getLogger("qkscope")


class OnProgress(Protocol):
    """A function that is called with the progress of some work."""

    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Take the amount done, the total, and a note to show with them, such as ``3 of 10 documents``."""


def in_view() -> bool:
    """Return True if a bar is drawn: in a terminal or a notebook, unless only errors are logged."""
    return (sys.stderr.isatty() or _in_notebook()) and _log.isEnabledFor(logging.WARNING)


def _in_notebook() -> bool:
    """Return True in the kernel of a notebook; that one was imported, as by what runs notebooks, is not enough."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def duration(seconds: float) -> str:
    """A time in words.

    >>> duration(0.2), duration(300), duration(20_000)
    ('1 second', '5 minutes', '5.6 hours')
    """
    if seconds < 7200:
        return plural(max(round(seconds), 1), "second") if seconds < 120 else plural(round(seconds / 60), "minute")
    return f"{seconds / 3600:.1f} hours"


def plural(count: int, word: str) -> str:
    """A count with its unit in words.

    >>> plural(1, "document"), plural(1200, "head")
    ('1 document', '1,200 heads')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


@contextmanager
def progress(what: str, unit: str = "", *, delay: float = 0.0, enabled: bool = True) -> Iterator[OnProgress]:
    """Show the progress of some work, its rate and the time left, while the block runs.

    ``unit`` is what is counted, by default ``what``; bytes ("B") are scaled. Rates count from the first report on, so
    that neither loading nor an earlier attempt enters them. A bar is drawn after ``delay`` seconds.
    """
    if not enabled:
        yield lambda done, total, note="": None  # noqa: ARG005  the names are those of the protocol
    elif in_view():
        with _bar(what, unit or what, delay) as on_progress:
            yield on_progress
    else:
        yield _lines(what, unit or what)


@contextmanager
def _bar(what: str, unit: str, delay: float) -> Iterator[OnProgress]:
    from tqdm.auto import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    style = {"unit": "B", "unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
    with tqdm(desc=what, bar_format=BAR, delay=delay, leave=not delay, file=sys.stderr, **style) as bar:
        started = False

        def on_progress(done: float, total: float, note: str = "") -> None:
            nonlocal started
            if not started:
                started = True
                bar.reset(total)
                bar.initial = bar.n = done
            bar.total = total
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)
            if done >= total:
                bar.refresh()

        with logging_redirect_tqdm([_log], tqdm):
            yield on_progress


def _lines(what: str, unit: str) -> OnProgress:
    last = time.monotonic()
    first: tuple[float, float] | None = None

    def on_progress(done: float, total: float, note: str = "") -> None:
        nonlocal first, last
        now = time.monotonic()
        first = first or (now, done)
        _log.debug("%s", note or f"{done:.0f} of {total:.0f} {what}")
        rate = (done - first[1]) / max(now - first[0], 1e-3)
        if rate > 0 and now - last > SECONDS_BETWEEN_LINES:
            last = now
            amount = note or f"{done:,.0f} of {total:,.0f} {what}"
            if unit == "B":
                amount = f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB"
            speed = f"{rate / 1e6:.1f} MB/s" if unit == "B" else f"{rate:,.{1 if rate < 100 else 0}f} {unit}/s"
            _log.info("%s, %s, %.0f s left", amount, speed, (total - done) / rate)

    return on_progress
