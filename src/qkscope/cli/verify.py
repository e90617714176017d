"""``qkscope verify``: a run against its checksums, and tables against the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import SOME_HEADS_FAILED, Quiet, WorkersOption, errors_as_lines, set_up_logging


def verify_command(
    run: Annotated[Path, typer.Argument(help="Folder of a captured run.")],
    tables: Annotated[
        Path | None, typer.Option(help="Tables to compare with those computed from the run; by default RUN/tables.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Label of the run in those tables.")] = None,
    workers: WorkersOption = None,
    quiet: Quiet = False,
) -> None:
    """Check a run's files, and tables against the run.

    Files are compared with their checksums, tables with those computed again; exit code 1 if they differ.
    """
    from qkscope.results.reader import TABLES_FOLDER
    from qkscope.results.verify import check_run, check_tables, removed_by_push

    set_up_logging(quiet=quiet, verbose=False)
    with errors_as_lines():
        problems = check_run(run)
        tables_folder = tables or run / TABLES_FOLDER
        compared = "no tables to compare"
        if tables is not None or tables_folder.is_dir():
            problems += check_tables(run, tables_folder, model, workers)
            compared = f"tables in {tables_folder} compared"
        for line in problems:
            typer.echo(line)
        left_out = removed_by_push(run)
        if left_out and not quiet:
            typer.echo(f"{run}: {', '.join(left_out)}: left out of run.json when the run was pushed")
        if not quiet:
            typer.echo(f"{run}: {len(problems)} difference{'' if len(problems) == 1 else 's'}; {compared}")
    raise typer.Exit(SOME_HEADS_FAILED if problems else 0)
