"""Shared by all commands: options, logging, progress and exit codes."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkscope._version import __version__
from qkscope.cli.signals import interruptible, report_stop, was_stopped
from qkscope.errors import ConfigError, QkscopeError
from qkscope.options import parse_indices
from qkscope.progress import plural, progress

if TYPE_CHECKING:
    import pandas as pd

    from qkscope.analyses.options import PointOptions
    from qkscope.results.analyze import OnDone
    from qkscope.results.job import Job
    from qkscope.results.summary import Failure, ModelResults
    from qkscope.runs.run import Run

log = logging.getLogger("qkscope")

SOME_HEADS_FAILED, NOTHING_DONE, UNEXPECTED = 1, 2, 3
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and those that change the direction of text."""

WorkersOption = Annotated[int | None, typer.Option(min=1, help="Worker processes; by default one per core.")]
EngineOption = Annotated[str, typer.Option("--engine", help="local: processes of this machine; ray: actors of Ray.")]
RayAddress = Annotated[
    str | None, typer.Option(help="Ray cluster, such as auto or ray://head:10001; by default one on this machine.")
]
LayersOption = Annotated[str | None, typer.Option(help="Only these layers, such as 0,4-7.")]
HeadsOption = Annotated[str | None, typer.Option(help="Only these query heads of each layer, such as 0,4-7.")]
SampleHeads = Annotated[int | None, typer.Option(min=1, help="Only this many query heads, drawn with --seed.")]
Seed = Annotated[int | None, typer.Option(help="Seed of random choices; 0 unless a config says otherwise.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first head that fails and write nothing.")]
NoIntervals = Annotated[bool, typer.Option("--no-intervals", help="Leave out the jackknife: faster, no intervals.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print what is done at each step.")]


def show_version(requested: bool) -> None:
    """Print the version and stop."""
    if requested:
        typer.echo(f"qkscope {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and stop.")
]


def set_up_logging(*, quiet: bool, verbose: bool) -> None:
    """Log plain lines to standard error: errors only, the usual messages, or everything."""
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level)
    log.propagate = False
    requests = logging.getLogger("huggingface_hub.utils._http")
    requests.filters[:] = [] if verbose else [_OneLine()]


def printable(text: str) -> str:
    """Return the text with control characters escaped: names of files, columns and models may contain any."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class _Printable(logging.Formatter):
    """A formatter whose lines cannot move the cursor or rename the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The message, and the traceback if there is one."""
        return printable(super().format(record))


class _OneLine(logging.Filter):
    """A filter that logs retries of the Hub's client once, instead of each of them."""

    reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop the record; at the first one on a retry, log a message of our own."""
        if "Retrying" in record.getMessage() and not self.reported:
            self.reported = True
            log.info("the Hub does not answer; retrying for half a minute")
        return False


@contextmanager
def errors_as_lines(stopped: str = "no table was changed") -> Iterator[None]:
    """Turn every error into one line and an exit code; write the traceback of an unexpected error to a file.

    ``stopped`` is printed when the user, or the system, stops the command.
    """
    try:
        with interruptible(stopped):
            yield
    except BaseException as error:
        raise _end_of_command(error, stopped) from None


def _end_of_command(error: BaseException, stopped: str) -> BaseException:
    """Log the line of an error or of a stop; return the exception that ends the command."""
    if was_stopped() or isinstance(error, KeyboardInterrupt):
        return typer.Exit(report_stop(lambda: log.error("stopped; %s", stopped)))
    if isinstance(error, QkscopeError):
        log.error("error: %s", error)
        return typer.Exit(NOTHING_DONE)
    if isinstance(error, OSError) and error.errno is not None:
        file_text = f" [{error.filename}]" if error.filename else ""
        advice = "free some space; " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        log.error("error: %s%s; %s%s", os.strerror(error.errno).lower(), file_text, advice, stopped)
        log.debug("", exc_info=error)
        return typer.Exit(NOTHING_DONE)
    if isinstance(error, (typer.Exit, typer.Abort, typer.BadParameter)) or not isinstance(error, Exception):
        return error
    return _unexpected(error)


def _unexpected(error: Exception) -> typer.Exit:
    """Report an unexpected error as a bug; return the exit that ends the command."""
    log.debug("", exc_info=error)
    log.error("error: %s", _save_traceback(error))
    return typer.Exit(UNEXPECTED)


def _save_traceback(error: Exception) -> str:
    """Save the traceback of an error; return the message about it."""
    reason = " ".join(str(error).split())[:200] or "no reason given"
    message = f"unexpected {type(error).__name__} ({reason})"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="qkscope-", suffix=".txt", delete=False, encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return f"{message}; rerun with --verbose for the traceback"
    return f"{message}; please report it with the traceback in {file.name}"


def chosen_indices(text: str | None) -> frozenset[int] | None:
    """Return the layers or heads that ``--layers`` or ``--heads`` chooses; None: all."""
    return None if text is None else frozenset(parse_indices(text))


def parse_points(text: str | None, run: Run) -> PointOptions | None:
    """Return the heads whose vectors are written: all, a number of them, or names such as l05h13,l00h02."""
    from qkscope.analyses.options import PointOptions
    from qkscope.headids import HeadId, choose_heads

    if text is None or text == "all":
        return None if text is None else PointOptions()
    heads = [(head.layer, head.head) for head in run.heads]
    if re.fullmatch(r"[0-9]{1,9}", text):
        return PointOptions(frozenset(choose_heads(heads, count=int(text))))
    names = [HeadId.match(f"{name.strip()}q") for name in text.split(",")]
    chosen = frozenset((head.layer, head.head) for head in names if head is not None)
    if None in names or not chosen <= set(heads):
        raise ConfigError(f"expected all, a number or heads of {run.model} such as l05h13,l00h02, got {text!r}")
    return PointOptions(chosen)


@contextmanager
def heads_done() -> Iterator[OnDone]:
    """Show how many heads are analysed; heads that fail are logged at once."""
    with progress("heads") as on_progress:

        def on_done(done: int, total: int, failures: list[Failure]) -> None:
            for failure in failures:
                log.error("failed: %s", failure)
            on_progress(done, total)

        yield on_done


def prepare(jobs: Sequence[Job], folder: Path, analyses: Sequence[str]) -> None:
    """Check the results folder before the work starts, and log what will be analysed."""
    from qkscope.results.folder import check_results_folder

    check_results_folder(folder, {job.run.model: job.run.source.identity() for job in jobs}, analyses)
    for job in jobs:
        run, chosen = job.run, len(job.selection.of(job.run))
        log.info(
            "%s: %d of %s, %d per key head",
            run.model,
            chosen,
            plural(len(run.heads), "query head"),
            run.source.q_per_kv,
        )
        log.debug("%s: from %s", run.model, run.source)


def write_and_exit_code(folder: Path, results: list[ModelResults], started: float, *, published: bool = False) -> int:
    """Write the results, log where they are and return the exit code."""
    from qkscope.results.analyze import write_results

    written = write_results(folder, results, wall_seconds=time.monotonic() - started, published=published)
    n_heads, failed = (
        sum(counts) for counts in zip(*((result.n_heads, result.n_failed) for result in results), strict=True)
    )
    log.info("%d of %s in %.1f s", n_heads - failed, plural(n_heads, "head"), time.monotonic() - started)
    name_heads(results[-1].tables.frames)
    for path in written:
        log.info("wrote %s", path)
    if failed:
        log.error("%d of %s failed; the others are in %s", failed, plural(n_heads, "head"), folder)
        return SOME_HEADS_FAILED
    return 0


def name_heads(tables: Mapping[str, pd.DataFrame]) -> None:
    """Log the line that names heads, if there is one."""
    named = heads_in_a_line(tables)
    if named:
        log.info("%s", named)


def heads_in_a_line(tables: Mapping[str, pd.DataFrame], n: int = 3) -> str:
    """The heads whose scores are most position and most content, and those that copy, of the last model.

    Empty if that is not known. Heads that are flat are not named: they attend almost evenly, whatever their parts are.
    """
    from qkscope.analyses.scores import FLAT
    from qkscope.headids import head_name
    from qkscope.results.derived import top_heads
    from qkscope.results.study import window_of

    heads = tables.get("heads")
    if heads is None or "part_position" not in heads or heads["part_position"].isna().all():
        return ""
    model = heads["model"].iloc[-1]
    window = window_of({name: frame[frame["model"] == model] for name, frame in tables.items() if name == "rotated"})
    begin = f"{model}{'' if window is None else f', window {window:,}'}"
    known = heads[(heads["model"] == model) & heads["head_class"].notna()]
    told = known[known["head_class"] != "flat"]
    if told.empty:
        return f"{begin}: all {plural(len(known), 'head')} are flat: their scores vary by less than {FLAT} logits"
    named = [
        ", ".join(f"{head_name(row.layer, row.head)} ({getattr(row, column):.0%})" for row in rows.itertuples())
        for column in ("part_position", "part_content")
        for rows in [top_heads(told, column, n)]
    ]
    n_flat = len(known) - len(told)
    flat = f"; {n_flat} of {plural(len(known), 'head')} flat" if n_flat else ""
    induction = ""
    if "role" in known and (known["role"] == "induction").any():
        copying = known[known["role"] == "induction"].assign(copied=known["echo"] + known["induction"])
        rows = copying.nlargest(n, "copied").itertuples()
        induction = "; induction " + ", ".join(f"{head_name(row.layer, row.head)} ({row.copied:.0%})" for row in rows)
    return f"{begin}: most position in its scores {named[0]}; most content {named[1]}{induction}{flat}"
