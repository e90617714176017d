"""``qkscope reach``: how far heads attend, the key heads to cut to a window, and the cost of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkscope.capture.options import ModelOptions, TextOptions
from qkscope.cli.common import (
    Quiet,
    Verbose,
    WorkersOption,
    errors_as_lines,
    heads_done,
    log,
    prepare,
    set_up_logging,
    write_and_exit_code,
)
from qkscope.cli.effects import AllowOverlap, load_model_and_documents
from qkscope.cli.options import with_options
from qkscope.errors import ConfigError
from qkscope.progress import progress

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from qkscope.cause.choice import Cut, CutLimits
    from qkscope.cause.lockedmodel import LockedModel

_MODEL_OPTIONS = (
    "revision",
    "tokenizer",
    "dtype",
    "device",
    "attn",
    "config_overrides",
    "trust_remote_code",
    "threads",
)


@with_options(ModelOptions, TextOptions, only=(*_MODEL_OPTIONS, "texts", "field", "max_docs", "bos"))
def reach_command(
    run: Annotated[Path, typer.Argument(help="Captured run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for tables and the cut.")] = Path("reach"),
    cut: Annotated[int | None, typer.Option(min=1, help="Choose key heads to cut to this window.")] = None,
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of key heads that keep their reach.")] = 0.5,
    also_keep: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="Further shares of --measure; by default 0.75 and 0.25.")
    ] = None,
    by: Annotated[str, typer.Option(help="Order of key heads: far, area, lock or measured.")] = "far",
    measure: Annotated[
        str | None, typer.Option(help="Model of the run, on which the cut is measured with --texts.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=128, help="Tokens per text of --measure; by default the run's.")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=0, help="Random choices of --measure at --keep; a quarter as many at further shares.")
    ] = 16,
    against: Annotated[
        Path | None, typer.Option(help="List of heads to compare with: retrieval scores or gates of key heads.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    allow_overlap: AllowOverlap = False,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Tabulate how far each head attends; choose key heads to cut to a window, and measure the cost."""
    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command"):
        from qkscope.cause import choice as choosing
        from qkscope.cause.choice import CutLimits
        from qkscope.files.runfolder import RunFolder

        choosing.check_order(by)
        if measure is not None and cut is None:
            raise ConfigError("--measure needs --cut, the window to measure")
        listed = None if against is None else choosing.read_list(against)
        limits = None if cut is None else CutLimits.of(RunFolder.open(run))
        tables, code = _tables(run, output, workers, started)
        heads = choosing.query_head_table(tables, cut or choosing.middle_window(tables))
        if listed is not None:
            _report_agreement(choosing.agreement_with(heads, *listed), output)
        if cut is not None and limits is not None:
            heads = _cut(run, output, heads, limits, by, keep, cut)
            if measure is not None:
                shares = dict.fromkeys([keep, *((0.75, 0.25) if also_keep is None else also_keep)])
                cuts = choosing.every_cut(heads, by, list(shares), cut, limits.sinks, draws, seed)
                locked, documents = load_model_and_documents(
                    values | {"model": measure}, run, window, allow_overlap=allow_overlap
                )
                _measure(locked, documents, run, output, cuts)
        raise typer.Exit(code)


def _tables(run: Path, output: Path, workers: int | None, started: float) -> tuple[dict[str, pd.DataFrame], int]:
    """Compute and write the tables of reach that need the run alone."""
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze
    from qkscope.results.job import Job
    from qkscope.runs.run import open_run

    job = Job.from_options(open_run(run), "reach")
    prepare([job], output)
    with heads_done() as on_done:
        results = analyze([job], ["position", "reach"], target=ExecutionTarget(workers), on_done=on_done)
    frames = results[0].tables.frames
    if frames["reach"].empty:
        raise ConfigError(f"nothing is known about the reach of {run}: give a captured run, or the rotary encoding")
    code = write_and_exit_code(output, results, started)
    return {name: frames[name] for name in ("position", "reach")}, code


def _report_agreement(table: pd.DataFrame, output: Path) -> None:
    """Log, write and draw the agreement of columns with a list."""
    import io

    from qkscope.figures.attentionreach import draw_agreement
    from qkscope.figures.style import house_style
    from qkscope.files.atomic import write_together
    from qkscope.results.frames import csv_bytes

    picture = io.BytesIO()
    with house_style():
        draw_agreement(table).savefig(picture, format="png")
    files = {"against.csv": csv_bytes(table), "against.png": picture.getvalue()}
    write_together(output, files)
    log.info("agreement of each column with the list: Spearman's ρ, its 95% interval over layers, AUC of the top tenth")
    has_interval = table["rho_low"].notna()
    for row, known in zip(table.itertuples(), has_interval, strict=True):
        ends = f"[{row.rho_low:+.2f}, {row.rho_high:+.2f}]" if known else "(no interval)"
        log.info("  %-18s ρ %+.2f %s  AUC %.2f  (%d heads)", row.column, row.rho, ends, row.auc, row.n_heads)
    for name in files:
        log.info("wrote %s", output / name)


def _cut(
    run: Path, output: Path, heads: pd.DataFrame, limits: CutLimits, by: str, keep: float, window: int
) -> pd.DataFrame:
    """Write the requested cut; return the heads that a cut can change."""
    from qkscope.cause import choice as choosing

    heads = choosing.longer_than(heads, limits.sliding, window)
    chosen = choosing.choose(heads, by, keep, window, limits.sinks)
    for path in choosing.write_cut(output, chosen, run.absolute().name, keep, limits.shape):
        log.info("wrote %s", path)
    n_heads = heads.groupby(choosing.KEY).ngroups
    log.info("%d of %d key heads are cut to %d tokens", len(chosen.heads), n_heads, window)
    return heads


def _measure(locked: LockedModel, documents: list[torch.Tensor], run: Path, output: Path, cuts: list[Cut]) -> None:
    """Measure the cuts and write their costs; log those of the requested share, which comes first."""
    from qkscope.cause.cuts import cut_table
    from qkscope.results.effects import write_measured

    with progress("passes") as on_done:
        table = cut_table(locked, documents, cuts, run.absolute().name, on_done)
    for path in write_measured(output, {"cuts": table}):
        log.info("wrote %s", path)
    first = table["share_cut"][table["order"] == "reversed"].iloc[0]
    for text in ("plain", "copy"):
        rows = table[(table["text"] == text) & (table["share_cut"].isin([0.0, first, 1.0]))]
        random = rows[rows["order"] == "random"]["nll"]
        named = [f"{row.order} {row.nll:.3f}" for row in rows[rows["order"] != "random"].itertuples()]
        spread = ""
        if len(random):
            spread = f"; random {random.mean():.3f} ({random.min():.3f} to {random.max():.3f}, 5% below "
            spread += f"{random.quantile(0.05):.3f})"
        log.info("loss, %s text: %s%s", text, ", ".join(named), spread)
