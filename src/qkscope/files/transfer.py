"""Progress of bytes that go to the Hub or come from it, shown once it takes longer than two seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("qkscope")
_SECONDS_BETWEEN_LINES = 5.0
OnBytes = Callable[[int], None]


@contextmanager
def transfer(what: str, total: int) -> Iterator[OnBytes]:
    """A function to call with the number of bytes that arrived: a bar in a terminal or notebook, lines in a log."""
    from tqdm.auto import tqdm

    quiet = _log.level >= logging.ERROR
    in_view = sys.stderr.isatty() or "ipykernel" in sys.modules
    done, last = 0, time.monotonic()
    options = {"unit": "B", "unit_scale": True, "delay": 2, "leave": False}
    with tqdm(desc=what, total=total, disable=quiet or not in_view, **options) as bar:

        def on_bytes(count: int) -> None:
            nonlocal done, last
            done += count
            bar.update(count)
            if not in_view and time.monotonic() - last > _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                _log.info("%s: %.1f of %.1f MB", what, done / 1e6, total / 1e6)

        yield on_bytes
