"""``qkscope merge``: merge the shares of several jobs into one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.capture import report_outcome
from qkscope.cli.common import Quiet, Verbose, errors_as_lines, log, set_up_logging
from qkscope.progress import plural, progress


def merge_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders that capture --shard wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("run"),
    partial: Annotated[
        bool, typer.Option("--partial", help="Some shares are missing: write a larger share, to be merged again.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Merge the shares of several capture jobs into one run.

    It is byte for byte the run that a single job would capture.
    """
    from qkscope.capture.assemble import merge as merge_shares
    from qkscope.files.atomic import check_writable

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command to resume"):
        check_writable(output)
        with progress("layers") as on_done:
            missing = merge_shares(folders, output, partial=partial, on_done=on_done)
        if missing:
            log.info("still missing: %s", plural(len(missing), "shard"))
        raise typer.Exit(report_outcome(output))
