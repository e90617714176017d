"""``qkscope analyze``."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from qkscope.cli.common import (
    EngineOption,
    HeadsOption,
    LayersOption,
    NoIntervals,
    Quiet,
    RayAddress,
    SampleHeads,
    Seed,
    Strict,
    Verbose,
    WorkersOption,
    chosen_indices,
    errors_as_lines,
    parse_points,
    prepare,
    progress,
    set_up_logging,
    write_and_exit_code,
)
from qkscope.errors import ConfigError


class AnalyzeCommand(TyperCommand):
    """Its help names all analyses, which are looked up only then: that takes a second."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The usual help, with the names behind ``--only``."""
        from qkscope.analyses.catalogue import ANALYSES_BY_NAME

        for parameter in self.params:
            if parameter.name == "only":
                parameter.help = f"Only some of {', '.join(ANALYSES_BY_NAME)}; comma-separated."  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def _show_columns(wanted: bool) -> None:
    if wanted:
        from qkscope.results.schema import described_columns

        typer.echo(described_columns())
        raise typer.Exit


def analyze_command(
    datasets: Annotated[list[str], typer.Argument(help="Dataset folders, Hub ids or hf:// URLs; each is one model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tables.")] = Path("results"),
    only: Annotated[str | None, typer.Option(help="Only some of the analyses; comma-separated.")] = None,
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
    decay_range: Annotated[
        int | None,
        typer.Option(min=2, help="Distances up to this one count for decay; by default half of what queries see."),
    ] = None,
    layers: LayersOption = None,
    heads: HeadsOption = None,
    sample_heads: SampleHeads = None,
    seed: Seed = None,
    max_samples: Annotated[int | None, typer.Option(min=2, help="At most this many rows of each head.")] = None,
    skip_first: Annotated[
        int, typer.Option(min=0, help="Leave out this many positions at the start of every document: attention sinks.")
    ] = 0,
    points: Annotated[
        str | None,
        typer.Option(help="Also write points.parquet, for pictures: all, a number of heads, or such as l05h13,l00h02."),
    ] = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
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
    from qkscope.pipeline.analyze import analysis_names
    from qkscope.pipeline.analyze import analyze as analyze_jobs
    from qkscope.pipeline.job import Job
    from qkscope.runs.run import open_run
    from qkscope.runs.selection import Selection

    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        if model and len(model) != len(datasets):
            raise ConfigError(
                f"--model was given {len(model)} times for {len(datasets)} datasets; give it once for each"
            )
        analyses, place = analysis_names(only), Place(workers, engine, ray_address)  # type: ignore[arg-type]
        chosen = Selection(chosen_indices(layers), chosen_indices(heads), sample_heads, seed or 0)
        reading: dict[str, Any] = {
            "q_per_kv": q_per_kv,
            "window": window,
            "max_samples": max_samples,
            "seed": seed or 0,
        }
        reading |= {} if rope_theta is None else {"rope": {"theta": rope_theta}}
        reading |= {"skip_first": skip_first} if skip_first else {}
        runs = [
            open_run(dataset, revision, model=label, family=family, **reading)
            for dataset, label in zip_longest(datasets, model or [])
        ]
        said = {"command": "analyze", "layers": layers, "heads": heads, "sample_heads": sample_heads} | reading
        said |= {} if decay_range is None else {"decay_range": decay_range}
        said |= {"intervals": False} if no_intervals else {}
        jobs = [
            Job(run, chosen, points=parse_points(points, run), buckets=buckets, decay_range=decay_range, config=said)
            for run in runs
        ]
        prepare(jobs, output)
        with progress() as on_done:
            outcomes = analyze_jobs(
                jobs,
                analyses,
                place=place,
                intervals=not no_intervals,
                strict=strict,
                on_done=on_done,
            )
        raise typer.Exit(write_and_exit_code(output, outcomes, started))
