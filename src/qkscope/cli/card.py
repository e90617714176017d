"""``qkscope card``: a picture of one head, to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, errors_as_lines, log, name_heads, set_up_logging
from qkscope.cli.ending import clickable
from qkscope.errors import ConfigError
from qkscope.options import head_pair


def card_command(
    run: Annotated[str, typer.Argument(help="Captured run, dataset, or folder of tables.")],
    head: Annotated[str, typer.Argument(help="Query head, such as l07h00.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Picture, .png or .svg.")] = None,
    window: Annotated[
        int | None, typer.Option("--window", help="Window that the run was also captured at; by default its own.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw a card of one head, to share.

    It shows its queries and keys, its distance curve, its four terms, a text as it scores it, and a sentence.
    """
    import io

    from qkscope.files.atomic import check_writable, write_together
    from qkscope.runs.run import Run, open_run

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("no picture was written"):
        pair = head_pair(head)
        path = output or Path(f"{head}.png")
        if path.suffix not in (".png", ".svg"):
            raise ConfigError(f"expected a file name that ends with .png or .svg, got {path}")
        check_writable(path.parent)
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; choose another --output")
        from qkscope.figures.card import CARD_DPI
        from qkscope.plot import card
        from qkscope.results.job import Job
        from qkscope.results.reader import is_results
        from qkscope.results.runtables import captured_at, stored_tables

        source = captured_at(run if is_results(Path(run)) else open_run(run), window)
        picture = io.BytesIO()
        if not isinstance(source, Run) and not is_results(Path(source)):
            source = open_run(str(source))
        card(source, pair).savefig(picture, format=path.suffix[1:], dpi=CARD_DPI)
        write_together(path.parent, {path.name: picture.getvalue()})
        if isinstance(source, Run):
            stored = stored_tables(Job.from_options(source, "analyze"))
            if stored is not None:
                name_heads(stored.tables)
            log.info("%s of %s, %s", head, source.model, source.head(*pair).summary)
        typer.echo(clickable(path))
