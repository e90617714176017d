"""The command ``qkscope``."""

from __future__ import annotations

import typer

from qkscope.cli.analyze import analyze
from qkscope.cli.capture import capture, plan
from qkscope.cli.checks import doctor, verify
from qkscope.cli.common import Version
from qkscope.cli.demo import demo
from qkscope.cli.merge import merge
from qkscope.cli.report import report, view

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="For every attention head: how much of its query–key geometry is position, how much is content.",
    epilog="Example: qkscope analyze captures/my-model -o results/my-model",
)


@app.callback()
def main(version: Version = False) -> None:
    """For every attention head: how much of its query–key geometry is position, how much is content."""


app.command(epilog="Example: qkscope analyze captures/base captures/tuned -o results/compare --workers 2")(analyze)
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


def run() -> None:
    """Entry point of the installed command."""
    app()
