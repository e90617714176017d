"""``qkscope effects``: the effect of each term of each head on the prediction."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkscope.capture.options import ModelOptions, TextOptions, need_torch
from qkscope.cli.common import Quiet, Verbose, errors_as_lines, log, set_up_logging
from qkscope.cli.options import with_options
from qkscope.errors import ConfigError
from qkscope.options import from_values, head_pairs
from qkscope.progress import duration, in_view, plural, progress

if TYPE_CHECKING:
    import torch

    from qkscope.cause.ablation import PassPlan
    from qkscope.cause.lockedmodel import LockedModel

AllowOverlap = Annotated[bool, typer.Option("--allow-overlap", help="Allow texts that the run was captured on.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Say how long the measurement would take, and stop.")]


@with_options(ModelOptions, TextOptions)
def effects_command(
    run: Annotated[Path, typer.Argument(help="Captured run of this model; its means define the terms.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tables.")] = Path("effects"),
    passes: Annotated[int, typer.Option(min=0, help="Backward passes for the estimate of all heads; 0: none.")] = 64,
    measure: Annotated[
        int,
        typer.Option(min=0, help="Heads measured one by one: half the strongest, half random; of --heads all, or 0."),
    ] = 8,
    terms: Annotated[str, typer.Option(help="Terms to take away, comma-separated.")] = "position,key,query,content",
    heads: Annotated[str | None, typer.Option(help="Only these query heads, such as l00h03,l02h01.")] = None,
    gamma: Annotated[float, typer.Option(help="How much of a term is taken away: it is scaled by 1 − gamma.")] = 1.0,
    window: Annotated[int | None, typer.Option(min=16, help="Tokens per document; by default as the run.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents of equal length per backward pass.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of labels, random heads and the control.")] = 0,
    label: Annotated[str | None, typer.Option(help="Label in the tables; by default the run's folder.")] = None,
    allow_overlap: AllowOverlap = False,
    plan: PlanOnly = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Measure what the loss makes of each term of each head.

    The effect of taking a term out of a head's scores is estimated for all heads and measured for some.
    """
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command to resume"):
        chosen = list(dict.fromkeys(_term(name) for name in terms.split(",")))
        locked, documents = load_model_and_documents(values, run, window, allow_overlap=allow_overlap)
        from qkscope.cause.effects import CONTROL, EffectOptions, EffectsJob, effect_tables
        from qkscope.files.atomic import check_writable
        from qkscope.results.effects import check_measured, interval_text, strongest_heads, write_measured
        from qkscope.runs.captured import CapturedSource

        check_writable(output)
        options, name = EffectOptions(passes, measure, gamma, batch, seed), label or run.absolute().name
        source = CapturedSource(locked.run).identity()
        check_measured(output, name, source)
        job = EffectsJob(locked, documents, options, output / "in-progress", head_pairs(heads or ()), chosen)
        report_plan(job.plan(), "fewer with --max-docs, --window, --passes or --measure", stop=plan)
        started = time.monotonic()
        with progress("passes") as on_done:
            frames = effect_tables(job, name, on_progress=lambda done, in_all: on_done(round(done), round(in_all)))
        for path in write_measured(output, frames, source):
            log.info("wrote %s", path)
        job.forget()
        prefix = "without" if gamma == 1 else f"with {gamma:g} less of"
        together = frames["effects_together"]
        for row in together[together["over"] == "all"].itertuples():
            heads_text = plural(int(str(row.n_heads)), f"{'' if row.heads == 'all' else f'{row.heads} '}head")
            ends = interval_text(row.delta_nll_low, row.delta_nll_high, ".3f")
            change = (
                "without a random direction as large as drift" if row.change == CONTROL else f"{prefix} {row.change}"
            )
            log.info("%s in %s: %+.3f nats per token%s", change, heads_text, row.delta_nll, ends)
        for line in strongest_heads(frames["effects"]):
            log.info("%s", line)
        log.info("done in %s", duration(time.monotonic() - started))


def report_plan(plan: PassPlan, advice: str, *, stop: bool) -> None:
    """Log what a measurement will take; end the command if that was all that was asked for."""
    if plan.passes:
        log.info("%s; %s", plan, advice)
    if stop:
        raise typer.Exit


def load_model_and_documents(
    values: dict[str, Any], run: Path, window: int | None, *, allow_overlap: bool
) -> tuple[LockedModel, list[torch.Tensor]]:
    """Load the model with its run, and the documents, cut to the window."""
    if not values["model"] or not values["texts"]:
        raise ConfigError("this needs a MODEL, a RUN and --texts")
    need_torch()
    import torch

    from qkscope.capture.corpus import Corpus
    from qkscope.capture.model import load_model, load_quietly
    from qkscope.cause.effects import check_apart
    from qkscope.cause.lockedmodel import LockedModel
    from qkscope.files.runfolder import RunFolder

    folder = RunFolder.open(run)
    if not in_view():
        load_quietly()
    options = from_values(ModelOptions, values)
    corpus = Corpus.read(from_values(TextOptions, values), options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    locked = LockedModel.of(load_model(options), folder)
    if not allow_overlap:
        check_apart(locked, corpus)
    return locked, corpus.cut(window or folder.manifest.window, locked.model)


def _term(name: str) -> int:
    from qkscope.headids import TERMS

    if name.strip() not in TERMS:
        raise ConfigError(f"unknown term {name.strip()!r}; choose from {', '.join(TERMS)}")
    return TERMS.index(name.strip())
