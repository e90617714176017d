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
    start = last = time.monotonic()

    def line(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            rate = _rate(now, start)
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
            bar.update(task, completed=now.tokens, total=now.tokens_in_all, documents=documents, rate=_rate(now, start))

        yield draw


def _rate(now: Progress, start: float) -> float:
    """Tokens per second of this attempt, without the tokens of an earlier one."""
    return max(now.tokens - now.tokens_before, 1) / max(time.monotonic() - start, 1e-3)
