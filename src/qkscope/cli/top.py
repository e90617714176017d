"""``qkscope top``: the heads that a column ranks highest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qkscope.cli.common import Quiet, Verbose, WorkersOption, errors_as_lines, heads_done, log, set_up_logging
from qkscope.headids import TERMS, head_name

if TYPE_CHECKING:
    import pandas as pd

By = Annotated[str, typer.Option("--by", help="A number of heads, such as part_content, decay or ap_fixed_overall.")]


def top_command(
    run: Annotated[str, typer.Argument(help="A captured run or a results folder.")],
    by: By = "part_position",
    n: Annotated[int, typer.Option("-n", help="How many heads.", min=1)] = 10,
    lowest: Annotated[bool, typer.Option("--lowest", help="The lowest values instead of the highest.")] = False,
    model: Annotated[str | None, typer.Option(help="One model of a results folder; by default all.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write them to this csv file.")] = None,
    workers: WorkersOption = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """List the heads with the highest values of a column.

    Their class, their role and the parts of their scores stand beside the value.
    """
    from qkscope.files.atomic import write_together
    from qkscope.results.analyze import tables_of
    from qkscope.results.derived import one_row_per_head, top_heads
    from qkscope.results.frames import csv_bytes

    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        with heads_done() as on_done:
            folder = tables_of(run, workers=workers, on_done=on_done)
        rows = top_heads(one_row_per_head(folder.tables, model), by, n, lowest=lowest)
        for line in heads_as_lines(rows, by):
            typer.echo(line)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_together(output.parent, {output.name: csv_bytes(rows)})
            log.info("wrote %s", output)


def heads_as_lines(rows: pd.DataFrame, by: str) -> list[str]:
    """Heads with a value, its interval, their class, role and the parts of their scores, as lines of a terminal."""
    import pandas as pd

    several = rows["model"].nunique() > 1
    intervals = [(row.get(f"{by}_low"), row.get(f"{by}_high")) for row in rows.to_dict("records")]
    values = [
        f"{value:.3g}" + ("" if pd.isna(low) else f" [{low:.3g}, {high:.3g}]")
        for value, (low, high) in zip(rows[by], intervals, strict=True)
    ]
    width = max(24, len(by), *map(len, values)) + 2
    windows = ", ".join(f"{window:,.0f}" for window in rows.get("window", pd.Series()).dropna().unique())
    at = f"   (window {windows})" if windows else ""
    lines = [f"head     {by:<{width}}class     role       position    key  query content   decay{at}"]
    for row, value in zip(rows.to_dict("records"), values, strict=True):
        cells = [(row.get(f"part_{term}"), ".0%", width) for term, width in zip(TERMS, (8, 7, 7, 8), strict=True)]
        cells.append((row.get("decay"), "+.2f", 8))
        shares = "".join(f"{'' if pd.isna(x) else format(x, form):>{width}}" for x, form, width in cells)
        name = head_name(row["layer"], row["head"])
        label = f"  {row['model']}" if several else ""
        kind, role = ("" if pd.isna(row.get(column)) else row[column] for column in ("head_class", "role"))
        lines.append(f"{name}   {value:<{width}}{kind:<10}{role:<11}{shares}{label}")
    return lines
