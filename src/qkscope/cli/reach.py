"""``qkscope reach``: how far heads attend, the key heads to cut to a window, and the cost of that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
from qkscope.cli.effects import AllowOverlap, PlanOnly, load_model_and_documents, report_plan
from qkscope.cli.options import with_options
from qkscope.errors import ConfigError
from qkscope.options import from_values
from qkscope.progress import plural, progress

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from qkscope.cause.choice import Cut, CutLimits
    from qkscope.cause.lockedmodel import LockedModel
    from qkscope.results.summary import ModelResults


class _Asking(NamedTuple):
    """The questions to ask in long texts."""

    tokenizer: Any
    texts: int
    seed: int


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
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Choose whole layers, not single key heads.")] = False,
    sinks: Annotated[
        int | None, typer.Option(min=0, help="First tokens that cut heads keep; by default as --skip-first of the run.")
    ] = None,
    measure: Annotated[
        str | None, typer.Option(help="Model of the run, on which the cut is measured with --texts.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=128, help="Tokens per text of --measure; by default the run's.")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=0, help="Random choices of --measure at --keep; a quarter as many at further shares.")
    ] = 16,
    needles: Annotated[
        int | None,
        typer.Option(min=0, help="Texts of --measure in which ten passkeys and pairs each are asked; by default 4."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="List of heads to compare with: retrieval scores or gates of key heads.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choices.")] = 0,
    allow_overlap: AllowOverlap = False,
    plan: PlanOnly = False,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Tabulate how far heads attend, and choose which to cut.

    The cost of cutting key heads to a window can be measured on text and on copies.
    """
    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command"):
        from qkscope.cause import choice as choosing
        from qkscope.cause.choice import CutLimits
        from qkscope.files.runfolder import RunFolder

        choosing.check_order(by)
        _check_measure(
            measure,
            cut,
            {"--window": window, "--also-keep": also_keep, "--needles": needles, "--texts": values["texts"]},
            plan=plan,
        )
        listed = None if against is None else choosing.read_list(against)
        limits = None if cut is None else CutLimits.of(RunFolder.open(run), cut, sinks)
        values |= {"model": measure}
        measured = None if measure is None else _loaded(values, run, window, cut, allow_overlap)
        asking = None if measured is None else _asking(values, measured[1], needles, seed)
        results = _computed(run, output, workers)
        tables = results.tables.frames
        width = cut or choosing.middle_window(tables)
        heads = choosing.query_head_table(tables, width)
        agreement = None if listed is None else choosing.agreement_with(heads, *listed)
        chosen, cuts = None, []
        if cut is not None and limits is not None:
            wider = choosing.longer_than(heads, limits.sliding, cut)
            chosen = choosing.choose(wider, by, keep, cut, limits.sinks, by_layer=by_layer)
            if measured is not None:
                shares = dict.fromkeys([keep, *((0.75, 0.25) if also_keep is None else also_keep)])
                cuts = choosing.every_cut(wider, by, list(shares), cut, limits.sinks, draws, seed, by_layer=by_layer)
                _say_plan(*measured, cuts, asking, stop=plan)
        code = write_and_exit_code(output, [results], started)  # nothing is written before this line
        log.info("%s", choosing.farthest_in_a_line(heads, width))
        if agreement is not None:
            _report_agreement(agreement, output)
        if chosen is not None and limits is not None:
            _write_cut(run, output, chosen, keep, limits, measured=measured is not None)
        if measured is not None:
            _measure(*measured, run, output, cuts, by, asking)
        raise typer.Exit(code)


def _check_measure(measure: str | None, cut: int | None, of_measure: dict[str, Any], *, plan: bool) -> None:
    """Raise an error if options of ``--measure`` cannot work, or are given without it."""
    if measure is None:
        if plan:
            raise ConfigError("--plan says how long --measure would take; give the model and --texts")
        given = [flag for flag, value in of_measure.items() if value]
        if given:
            verb = "belongs" if len(given) == 1 else "belong"
            raise ConfigError(f"{' and '.join(given)} {verb} to --measure; give the model with --measure and --cut")
        return
    if cut is None:
        raise ConfigError("--measure needs --cut, the window to measure")
    window = of_measure["--window"]
    if window is not None and window // 2 <= cut:
        raise ConfigError(
            f"--window {window} is too short for --cut {cut}: half of each text must be longer than the cut"
        )


def _loaded(
    values: dict[str, Any],
    run: Path,
    window: int | None,
    cut: int | None,
    allow_overlap: bool,
) -> tuple[LockedModel, list[torch.Tensor]]:
    """Load the model and its texts, and check that these are long enough, before anything is written."""
    from qkscope.cause.cuts import check_lengths

    locked, documents = load_model_and_documents(values, run, window, allow_overlap=allow_overlap)
    check_lengths(documents, cut or 0)
    return locked, documents


def _asking(values: dict[str, Any], documents: list[torch.Tensor], texts: int | None, seed: int) -> _Asking | None:
    """Return what is to be asked in the texts; None if nothing can be, which is logged, or an error if asked for."""
    if texts == 0:
        return None
    from qkscope.capture.model import load_tokenizer
    from qkscope.cause.needles import why_not

    tokenizer = load_tokenizer(from_values(ModelOptions, values))
    reason = why_not(tokenizer, documents)
    if reason is None:
        return _Asking(tokenizer, 4 if texts is None else texts, seed)
    if texts is not None:
        raise ConfigError(f"{reason}, or leave out --needles")
    log.info("%s", reason)
    return None


def _computed(run: Path, output: Path, workers: int | None) -> ModelResults:
    """Compute the tables of reach that need the run alone."""
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze
    from qkscope.results.job import Job
    from qkscope.runs.run import open_run

    job = Job.from_options(open_run(run), "reach")
    analyses = ["position", "reach"]
    prepare([job], output, analyses)
    with heads_done() as on_done:
        (results,) = analyze([job], analyses, target=ExecutionTarget(workers), on_done=on_done)
    if results.tables.frames["reach"].empty:
        raise ConfigError(f"nothing is known about the reach of {run}: give a captured run, or the rotary encoding")
    return results


def _report_agreement(table: pd.DataFrame, output: Path) -> None:
    """Log, write and draw the agreement of columns with a list."""
    import io

    from qkscope.figures.attentionreach import draw_agreement
    from qkscope.figures.style import house_style
    from qkscope.files.atomic import write_together
    from qkscope.results.effects import interval_text
    from qkscope.results.frames import csv_bytes

    picture = io.BytesIO()
    with house_style():
        draw_agreement(table).savefig(picture, format="png")
    files = {"against.csv": csv_bytes(table), "against.png": picture.getvalue()}
    write_together(output, files)
    log.info("agreement of each column with the list: Spearman's ρ, its 95% interval over layers, AUC of the top tenth")
    for row in table.itertuples():
        ends = interval_text(row.rho_low, row.rho_high, "+.2f") or " (no interval)"
        log.info("  %-18s ρ %+.2f%s  AUC %.2f  (%d heads)", row.column, row.rho, ends, row.auc, row.n_heads)
    for name in files:
        log.info("wrote %s", output / name)


def _write_cut(run: Path, output: Path, chosen: Cut, keep: float, limits: CutLimits, *, measured: bool) -> None:
    """Write the requested cut."""
    from qkscope.cause.choice import write_cut

    for path in write_cut(output, chosen, run.absolute().name, keep, limits):
        log.info("wrote %s", path)
    n_heads = 0 if chosen.scores is None else len(chosen.scores)
    layers = f", in {plural(chosen.n_units, 'layer')}" if chosen.by_layer else ""
    window = plural(chosen.window, "token")
    log.info("%d of %s cut to %s%s", len(chosen.heads), plural(n_heads, "key head"), window, layers)
    if not chosen.sinks:
        log.warning(
            "--sinks 0 is expensive: half of the key heads of Qwen2.5-Coder-1.5B cut to 256 of 4,096 tokens cost "
            "0.22 nats per token of text and half of its layers 1.1; with the first 4 tokens at most 0.005%s",
            "" if measured else "; --measure says what it costs here",
        )


def _say_plan(
    locked: LockedModel, documents: list[torch.Tensor], cuts: list[Cut], asking: _Asking | None, *, stop: bool
) -> None:
    from qkscope.cause.cuts import plan_of
    from qkscope.cause.needles import needle_plan

    plan = plan_of(locked.model, documents, cuts)
    if asking is not None:
        plan = needle_plan(locked.model, documents, cuts, asking.texts, plan)
    report_plan(plan, "fewer with --max-docs, --window, --also-keep, --draws or --needles", stop=stop)


def _measure(
    locked: LockedModel,
    documents: list[torch.Tensor],
    run: Path,
    output: Path,
    cuts: list[Cut],
    by: str,
    asking: _Asking | None,
) -> None:
    """Measure the cuts and write their costs; log those of the requested share, which comes first."""
    from qkscope.cause.cuts import cost_without_sinks, cut_table
    from qkscope.cause.needles import needle_table, needles_in_lines
    from qkscope.results.effects import write_measured
    from qkscope.runs.captured import CapturedSource

    name, source = run.absolute().name, CapturedSource(locked.run).identity()
    with progress("passes") as on_done:
        table = cut_table(locked, documents, cuts, name, on_done)
    for path in write_measured(output, {"cuts": table}, source):
        log.info("wrote %s", path)
    if asking is not None:
        with progress("texts") as on_done:
            needles = needle_table(locked, documents, asking.tokenizer, cuts, name, asking.texts, asking.seed, on_done)
        for path in write_measured(output, {"needles": needles}, source):
            log.info("wrote %s", path)
        for line in needles_in_lines(needles):
            log.info("%s", line)
    if not cuts[0].sinks and locked.skip_first:
        with progress("passes") as on_done:
            chosen = next(cut for cut in cuts if cut.order == by)
            rise = cost_without_sinks(locked, documents, chosen, locked.skip_first, on_done)
        log.warning(
            "--sinks 0 costs %+.3f nats per token on text and %+.3f on the second copy, compared with --sinks %d",
            rise["plain"], rise["copy"], locked.skip_first,
        )  # fmt: skip
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
