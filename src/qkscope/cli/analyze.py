"""``qkscope analyze``."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from qkscope.analyses.options import AnalysisOptions
from qkscope.cli.common import (
    EngineOption,
    Quiet,
    RayAddress,
    Strict,
    Verbose,
    WorkersOption,
    errors_as_lines,
    heads_done,
    parse_points,
    prepare,
    set_up_logging,
    write_and_exit_code,
)
from qkscope.cli.options import with_options
from qkscope.errors import ConfigError
from qkscope.options import from_values
from qkscope.runs.selection import DatasetOptions, Selection


class AnalyzeCommand(TyperCommand):
    """A command that describes columns, and whose help lists all analyses; they are imported only then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; with ``--columns`` the others are words to look for, and no datasets."""
        if "--columns" in args:
            from qkscope.results.schema import described_columns

            set_up_logging(quiet=False, verbose=False)
            with errors_as_lines():
                typer.echo(described_columns([word for word in args if not word.startswith("-")]))
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usual help, with the names of analyses at ``--only``."""
        from qkscope.analyses.catalogue import ANALYSES_BY_NAME

        for parameter in self.params:
            if parameter.name == "only":
                parameter.help = f"Only some of {', '.join(ANALYSES_BY_NAME)}; comma-separated."  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


@with_options(DatasetOptions, Selection, AnalysisOptions)
def analyze_command(
    datasets: Annotated[list[str], typer.Argument(help="Dataset folders, Hub ids or hf:// URLs; each is one model.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tables.")] = Path("results"),
    only: Annotated[str | None, typer.Option(help="Only some of the analyses; comma-separated.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit, for a Hub dataset.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Label in the tables, once per dataset; by default its folder or revision.")
    ] = None,
    family: Annotated[str, typer.Option(help="Family label in the tables.")] = "",
    points: Annotated[
        str | None,
        typer.Option(help="Also write points.parquet, for pictures: all, a number of heads, or such as l05h13,l00h02."),
    ] = None,
    workers: WorkersOption = None,
    engine: EngineOption = "local",
    ray_address: RayAddress = None,
    strict: Strict = False,
    columns: Annotated[
        bool,
        typer.Option("--columns", help="Describe the columns that contain a word (--columns decay), or all; stop."),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Compute all tables of one or more datasets in one read of each."""
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analysis_names
    from qkscope.results.analyze import analyze as analyze_jobs
    from qkscope.results.job import Job
    from qkscope.runs.run import open_run

    started = time.monotonic()
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        if model and len(model) != len(datasets):
            raise ConfigError(
                f"--model was given {len(model)} times for {len(datasets)} datasets; give it once for each"
            )
        analyses, target = analysis_names(only), ExecutionTarget(workers, engine, ray_address)  # type: ignore[arg-type]
        dataset_options = from_values(DatasetOptions, values).keywords() | {"seed": values["seed"]}
        runs = [
            open_run(dataset, revision, model=label, family=family, **dataset_options)
            for dataset, label in zip_longest(datasets, model or [])
        ]
        jobs = [Job.from_options(run, "analyze", values, parse_points(points, run)) for run in runs]
        prepare(jobs, output, analyses)
        with heads_done() as on_done:
            results = analyze_jobs(jobs, analyses, target=target, strict=strict, on_done=on_done)
        raise typer.Exit(write_and_exit_code(output, results, started))
