"""``qkscope card``: a picture of one head, to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, errors_as_lines, set_up_logging
from qkscope.cli.ending import clickable
from qkscope.errors import ConfigError


def card_command(
    run: Annotated[str, typer.Argument(help="Captured run, or dataset.")],
    head: Annotated[str, typer.Argument(help="Query head, such as l07h00.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Picture, .png or .svg.")] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Draw a card of one head: its queries and keys, its distance curve, its four terms, and a sentence."""
    import io

    from qkscope.files.atomic import check_writable, write_together
    from qkscope.heads import HeadId
    from qkscope.runs.run import open_run

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("no picture was written"):
        named = HeadId.match(f"{head}q")
        if named is None:
            raise ConfigError(f"expected a head such as l07h00, got {head!r}")
        path = output or Path(f"{head}.png")
        if path.suffix not in (".png", ".svg"):
            raise ConfigError(f"expected a file name that ends with .png or .svg, got {path}")
        check_writable(path.parent)
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; choose another --output")
        opened = open_run(run)

        from qkscope.figures.card import CARD_DPI
        from qkscope.plot import card

        picture = io.BytesIO()
        card(opened, (named.layer, named.head)).savefig(picture, format=path.suffix[1:], dpi=CARD_DPI)
        write_together(path.parent, {path.name: picture.getvalue()})
        typer.echo(clickable(path))
