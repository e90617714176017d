"""The command ``qkscope``."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkscope.cli.capture import capture, plan
from qkscope.cli.common import (
    EngineName,
    Heads,
    Layers,
    NoIntervals,
    Quiet,
    RayAddress,
    SampleHeads,
    Seed,
    Strict,
    Verbose,
    Version,
    Workers,
    errors_as_lines,
    finish,
    parse_indices,
    parse_points,
    prepare,
    progress,
    set_up_logging,
)
from qkscope.cli.demo import demo
from qkscope.cli.merge import merge
from qkscope.cli.report import report, view
from qkscope.cli.trust import doctor, verify
from qkscope.errors import ConfigError

if TYPE_CHECKING:
    from qkscope.jobs import Analysis

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="For every attention head: how much of its query–key geometry is position, how much is content.",
    epilog="Example: qkscope analyze captures/my-model -o results/my-model",
)


@app.callback()
def main(version: Version = False) -> None:
    """For every attention head: how much of its query–key geometry is position, how much is content."""


def _show_columns(wanted: bool) -> None:
    if wanted:
        from qkscope.cli.show import columns_text

        typer.echo(columns_text())
        raise typer.Exit


@app.command(epilog="Example: qkscope analyze captures/base captures/tuned -o results/compare --workers 2")
def analyze(
    datasets: Annotated[list[str], typer.Argument(help="Dataset folders, Hub ids or hf:// URLs; each is one model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tables.")] = Path("results"),
    only: Annotated[
        str | None, typer.Option(help="Only some of pca, rotation, planes, distance, plasticity; comma-separated.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, for a Hub dataset.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Label in the tables, once per dataset; by default its folder or revision.")
    ] = None,
    family: Annotated[str, typer.Option(help="Family label in the tables.")] = "",
    q_per_kv: Annotated[int | None, typer.Option(min=1, help="Query heads per key head.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Context length of the capture, in tokens.")] = None,
    rope_theta: Annotated[
        float | None, typer.Option(min=1, help="Base of the rotary encoding, for datasets whose card does not say.")
    ] = None,
    buckets: Annotated[int | None, typer.Option(min=1, max=256, help="Position buckets of plasticity (16).")] = None,
    layers: Layers = None,
    heads: Heads = None,
    sample_heads: SampleHeads = None,
    seed: Seed = None,
    max_samples: Annotated[int | None, typer.Option(min=2, help="At most this many rows of each head.")] = None,
    points: Annotated[
        str | None,
        typer.Option(help="Also write points.parquet, for pictures: all, a number of heads, or such as l05h13,l00h02."),
    ] = None,
    workers: Workers = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    no_intervals: NoIntervals = False,
    strict: Strict = False,
    columns: Annotated[
        bool, typer.Option("--columns", callback=_show_columns, is_eager=True, help="Describe every column and stop.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compute all tables of one or more datasets in one read of each."""
    from qkscope.engine import Place
    from qkscope.jobs import Job, Selection
    from qkscope.pipeline import analyze as analyze_jobs
    from qkscope.run import open_run

    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        if model and len(model) != len(datasets):
            raise ConfigError(
                f"--model was given {len(model)} times for {len(datasets)} datasets; give it once for each"
            )
        analyses, place = _parse_analyses(only), Place(workers, engine, ray_address)  # type: ignore[arg-type]
        chosen = Selection(parse_indices(layers), parse_indices(heads), sample_heads, seed or 0)
        reading: dict[str, Any] = {
            "q_per_kv": q_per_kv,
            "window": window,
            "max_samples": max_samples,
            "seed": seed or 0,
        }
        reading |= {} if rope_theta is None else {"rope": {"theta": rope_theta}}
        runs = [
            open_run(dataset, revision, model=label, family=family, **reading)
            for dataset, label in zip_longest(datasets, model or [])
        ]
        said = {"command": "analyze", "layers": layers, "heads": heads, "sample_heads": sample_heads} | reading
        jobs = [Job(run, chosen, points=parse_points(points, run), buckets=buckets, config=said) for run in runs]
        prepare(jobs, output, analyses)
        with progress() as on_done:
            outcomes = analyze_jobs(
                jobs,
                analyses,
                place=place,
                intervals=not no_intervals,
                strict=strict,
                on_done=on_done,
            )
        raise typer.Exit(finish(output, outcomes, started))


app.command(epilog="Example: qkscope demo -o demo")(demo)
app.command(epilog="Example: qkscope capture HuggingFaceTB/SmolLM2-135M --texts books/ --window 4096 -o runs/smollm2")(
    capture
)
app.command(epilog="Example: qkscope merge runs/share-* -o runs/smollm2")(merge)
app.command(epilog="Example: qkscope report study.yaml -o report")(report)
app.command(epilog="Example: qkscope view runs/base runs/tuned")(view)
app.command(epilog="Example: qkscope verify runs/smollm2 --tables results/smollm2")(verify)
app.command(epilog="Example: qkscope doctor results")(doctor)
app.command(epilog="Example: qkscope plan HuggingFaceTB/SmolLM2-135M --texts books/")(plan)


def _parse_analyses(text: str | None) -> list[Analysis]:
    from qkscope.jobs import ANALYSES

    chosen = list(ANALYSES) if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in chosen if name not in ANALYSES]
    if unknown:
        raise ConfigError(f"unknown analysis {unknown[0]!r}; there are {', '.join(ANALYSES)}")
    return [name for name in ANALYSES if name in chosen]


def run() -> None:
    """Entry point of the installed command."""
    app()
