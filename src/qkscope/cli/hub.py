"""``qkscope push`` and ``qkscope pull``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.cli.common import Quiet, Verbose, WorkersOption, errors_as_lines, heads_done, log, set_up_logging
from qkscope.cli.ending import clickable
from qkscope.cli.options import with_options
from qkscope.integrations.hub import PushOptions
from qkscope.options import from_values

_RESUMES = "rerun the same command to resume"


@with_options(PushOptions)
def push_command(
    source: Annotated[Path, typer.Argument(help="Folder of a captured run, or a results folder.")],
    repo: Annotated[str, typer.Argument(help="Dataset repository on the Hub: owner/name.")],
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Send a run or results to the Hub with a card.

    Texts, tokens, paths and document names are left out.
    """
    from qkscope.integrations.hub import push as pushing

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines(_RESUMES):
        options = from_values(PushOptions, values)
        with heads_done() as on_heads:
            address = pushing.push(source, repo, options, workers=workers, on_heads=on_heads)
        typer.echo(address)


def pull_command(
    repo: Annotated[str, typer.Argument(help="What was pushed: owner/name, or an hf:// URL.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for it.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fetch a pushed run or results, and check them.

    The files are compared with their checksums.
    """
    from qkscope.integrations.hub import pull as pulling

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines(_RESUMES):
        log.info("fetching %s", repo)
        typer.echo(clickable(pulling.pull(repo, output, revision)))
