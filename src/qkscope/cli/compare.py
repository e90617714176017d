"""``qkscope compare``: two runs head by head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, WorkersOption, errors_as_lines, heads_done, log, set_up_logging

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for compare.csv, compare_means.csv and compare.png.")
]
ByColumn = Annotated[
    str | None, typer.Option("--by", help="Column of the picture and the list; by default the one that changed most.")
]


def compare_command(
    a: Annotated[str, typer.Argument(help="A captured run or a results folder.")],
    b: Annotated[str, typer.Argument(help="Another of the same shape.")],
    output: Output = Path("compare"),
    by: ByColumn = None,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what differs between two runs, and in which heads.

    Intervals are paired by document, if both runs read the same. Runs are compared at the largest window they share.
    """
    from qkscope.figures.compare import draw_comparison
    from qkscope.figures.style import house_style
    from qkscope.figures.write import rendered
    from qkscope.files.atomic import check_writable, write_together
    from qkscope.headids import head_name
    from qkscope.results.frames import csv_bytes
    from qkscope.results.runtables import compared

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        check_writable(output)
        with heads_done() as on_done:
            comparison = compared(a, b, workers, on_done)
        column = by or comparison.main_column
        heads = comparison.changed_most(column)
        with house_style():
            picture = rendered(draw_comparison(comparison, column), "png")
        output.mkdir(parents=True, exist_ok=True)
        tables = {"compare.csv": csv_bytes(comparison.table), "compare_means.csv": csv_bytes(comparison.summary)}
        write_together(output, tables | {"compare.png": picture})
        typer.echo(comparison.sentence)
        if len(heads):
            typer.echo(f"Heads whose {column} changed most:")
        for row in heads.to_dict("records"):
            change = f"{row['difference']:+.3g} [{row['low']:+.2g}, {row['high']:+.2g}]"
            typer.echo(f"  {head_name(row['layer'], row['head'])}  {row['a']:.3g} → {row['b']:.3g}  {change}")
        for name in (*tables, "compare.png"):
            log.info("wrote %s", output / name)
