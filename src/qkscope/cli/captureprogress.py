"""Progress of a capture: documents, tokens per second and time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qkscope.cli.common import SECONDS_BETWEEN_LINES, bars, log

if TYPE_CHECKING:
    from qkscope.capture.options import Progress


@contextmanager
def documents_done() -> Iterator[Callable[[Progress], None]]:
    """Documents, tokens per second and time left: a bar on a terminal, a line every few seconds in a log."""
    last, rate_of = time.monotonic(), _Rate()

    def line(now: Progress) -> None:
        nonlocal last
        rate = rate_of(now)
        if rate and time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            left = (now.tokens_in_all - now.tokens) / rate
            log.info("%d of %d documents, %.0f tokens/s, %.0f s left", now.documents, now.documents_in_all, rate, left)

    if not bars():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("documents {task.fields[documents]}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=None, documents="", rate=0.0)

        def draw(now: Progress) -> None:
            documents = f"{now.documents}/{now.documents_in_all}"
            bar.update(task, completed=now.tokens, total=now.tokens_in_all, documents=documents, rate=rate_of(now))

        yield draw


class _Rate:
    """Tokens per second since the first report: neither loading nor what was done in an earlier attempt counts."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def __call__(self, now: Progress) -> float:
        """0 until there is something to tell from."""
        if self._first is None:
            self._first = time.monotonic(), now.tokens
            return 0.0
        since, tokens = self._first
        return (now.tokens - tokens) / max(time.monotonic() - since, 1e-3)
