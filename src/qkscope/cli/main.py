"""The command ``qkscope``."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from qkscope.cli.analyze import AnalyzeCommand, analyze_command
from qkscope.cli.capture import capture_command, plan_command
from qkscope.cli.card import card_command
from qkscope.cli.common import Version
from qkscope.cli.compare import compare_command
from qkscope.cli.demo import demo_command
from qkscope.cli.doctor import doctor_command
from qkscope.cli.effects import effects_command
from qkscope.cli.export import export_command
from qkscope.cli.hub import pull_command, push_command
from qkscope.cli.merge import merge_command
from qkscope.cli.reach import reach_command
from qkscope.cli.report import report_command, view_command
from qkscope.cli.study import study_app, study_capture_command
from qkscope.cli.top import top_command
from qkscope.cli.verify import verify_command

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # before anything of the Hub is imported

app = typer.Typer(
    rich_markup_mode=None,  # whole names of options, whatever the width
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="For every attention head: how much of its query–key geometry is position, how much is content.",
    epilog="Example: qkscope analyze captures/my-model -o results/my-model",
)


@app.callback()
def main(version: Version = False) -> None:
    """For every attention head: how much of its query–key geometry is position, how much is content."""


_EXAMPLES: dict[Callable[..., None], str] = {
    analyze_command: "qkscope analyze captures/base captures/tuned -o results/compare --workers 2",
    demo_command: "qkscope demo -o demo",
    capture_command: "qkscope capture HuggingFaceTB/SmolLM2-135M --texts books/ --window 4096 -o runs/smollm2",
    merge_command: "qkscope merge runs/share-* -o runs/smollm2",
    report_command: "qkscope report study.yaml -o report",
    view_command: "qkscope view runs/base runs/tuned",
    top_command: "qkscope top runs/smollm2 --by part_content -n 10",
    compare_command: "qkscope compare runs/base runs/tuned -o compare",
    card_command: "qkscope card runs/smollm2 l07h00 -o card.png",
    effects_command: "qkscope effects HuggingFaceTB/SmolLM2-135M runs/smollm2 --texts other-books/ -o results/smollm2",
    reach_command: "qkscope reach runs/smollm2 --cut 256 --keep 0.5 -o reach/smollm2",
    export_command: "qkscope export runs/smollm2 --to triattention -o smollm2.pt",
    push_command: "qkscope push runs/smollm2 owner/smollm2-qk",
    pull_command: "qkscope pull owner/smollm2-qk -o runs/smollm2",
    verify_command: "qkscope verify runs/smollm2 --tables results/smollm2",
    doctor_command: "qkscope doctor results",
    plan_command: "qkscope plan HuggingFaceTB/SmolLM2-135M --texts books/",
}
for _command, _example in _EXAMPLES.items():
    _class = AnalyzeCommand if _command is analyze_command else None
    app.command(_command.__name__.removesuffix("_command"), cls=_class, epilog=f"Example: {_example}")(_command)
study_app.command("capture", epilog="Example: qkscope study capture study.yaml --texts books/")(study_capture_command)
app.add_typer(study_app, name="study")


def run() -> None:
    """Entry point of the installed command."""
    app()
