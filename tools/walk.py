"""The way of one head through the rooms of the house: capture, analyze, report.

python -m tools.walk [capture|analyze|report ...] [--write]

A room is a folder of src/qkscope or a module directly in it; its level is its place in the layers of pyproject.toml.
A profiler hook sees every call from a function of one room to a function of another, in one process. Printed are the
kinds of step (from which room to which), in order of first occurrence, and which of them go upward; imports are none.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "qkscope"
PAGE, START, END = ROOT / "docs" / "architecture.md", "<!-- walk -->", "<!-- end of walk -->"
LENGTH = 300
"""Tokens of each document: the way is the same for any number."""


def main() -> None:
    """Walk the ways that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", help=f"some of {', '.join(WAYS)}; by default all")
    parser.add_argument("--write", action="store_true", help="put them into docs/architecture.md")
    given = parser.parse_args()
    asked, shown = given.ways or list(WAYS), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, command in WAYS.items():
            if any(name == way or list(WAYS).index(name) < list(WAYS).index(way) for way in asked):
                steps = walk(command, watched=name in asked)
                shown += ["\n".join(described(name, steps))] if name in asked else []
    text = "\n\n".join(shown)
    print(text)
    if given.write:
        before, _, rest = PAGE.read_text().partition(START)
        PAGE.write_text(f"{before}{START}\n\n```\n{text}\n```\n\n{END}{rest.partition(END)[2]}")


def _texts() -> list[str]:
    texts = sorted((SOURCE / "data" / "tinyrope" / "texts").iterdir())[:5]
    return [part for path in texts for part in ("--texts", str(path))]


def _capture() -> list[str]:
    data = SOURCE / "data" / "tinyrope"
    model = str(data / "checkpoints" / "pretrain-step-0100")
    return ["capture", model, *_texts(), "--tokenizer", str(data / "tokenizer"), "--window", str(LENGTH), "-o", "run"]


WAYS = {
    "capture": [*_capture(), "--device", "cpu", "--quiet"],
    "analyze": ["analyze", "run", "--layers", "1", "--heads", "1", "-o", "results", "--workers", "1", "--quiet"],
    "report": ["report", "results", "-o", "report", "--workers", "1", "--quiet"],
}


def walk(command: list[str], *, watched: bool = True) -> list[tuple[str, str]]:
    """Run a command in this process; its steps from room to room, one of each kind."""
    from qkscope.cli.main import app

    steps: dict[tuple[str, str], None] = {}

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        here = room(frame.f_code.co_filename)
        if here is None:
            return
        before = frame.f_back
        while before is not None and (there := room(before.f_code.co_filename)) is None:
            before = before.f_back
        importing = before is None or "<module>" in (before.f_code.co_name, frame.f_code.co_name)
        if not importing and there != here:
            steps.setdefault((str(there), here))

    sys.setprofile(hook if watched else None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app(command, standalone_mode=False)
    finally:
        sys.setprofile(None)
    return list(steps)


_ROOMS: dict[str, str | None] = {}


def room(file: str) -> str | None:
    """The room that a source file belongs to; None for files of others."""
    if file not in _ROOMS:
        path = Path(file)
        inside = path.relative_to(SOURCE).parts if path.is_relative_to(SOURCE) else ()
        _ROOMS[file] = inside[0].removesuffix(".py") if inside else None
    return _ROOMS[file]


def levels() -> dict[str, int]:
    """The level of each room, the lowest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {
        name.strip().removeprefix("qkscope."): level
        for level, layer in enumerate(reversed(layers))
        for name in layer.replace(":", "|").split("|")
    }


def described(name: str, steps: list[tuple[str, str]]) -> list[str]:
    """The steps in order, with a count of those that go upward."""
    level = levels()
    steps = [(there, here) for there, here in steps if there in level and here in level]
    upward = {step for step in steps if level[step[1]] > level[step[0]]}
    both = {*steps, *((here, there) for there, here in steps)}
    lines = [f"{name}: {len(steps)} kinds of step, {len(upward)} upward ({len(both)} with the ways back)"]
    return lines + [f"  {there} → {here}{'  (upward)' if (there, here) in upward else ''}" for there, here in steps]


if __name__ == "__main__":
    main()
