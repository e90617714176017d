"""Write the tree of the source, and the path of one head through its folders: capture, analyze, report.

python -m tools.walk [capture|analyze|report ...] [--write]

A room is a folder of src/qkscope or a module directly in it; its level is its place in the layers of pyproject.toml.
A profiler hook sees every call from a function of one room to a function of another, in one process. Printed are the
kinds of step (from which room to which), in order of first occurrence, and which of them go upward; imports are none.
Before them stands how many files and functions the command enters, and how many calls of ours lie above one another.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "qkscope"
PAGE = ROOT / "docs" / "architecture.md"
LENGTH = 300
"""Tokens of each document: the way is the same for any number."""


def main() -> None:
    """Print the requested paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", help=f"some of {', '.join(WAYS)}; by default all")
    parser.add_argument("--write", action="store_true", help="put them into docs/architecture.md")
    given = parser.parse_args()
    asked, shown = given.ways or list(WAYS), []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, command in WAYS.items():
            if any(name == way or list(WAYS).index(name) < list(WAYS).index(way) for way in asked):
                way = walk(command, watched=name in asked)
                shown += ["\n".join(described(name, way))] if name in asked else []
    text = "\n\n".join(shown)
    print(text)
    if given.write:
        page = PAGE.read_text()
        for part, content in (("tree", tree()), ("walk", text)):
            start, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
            before, _, rest = page.partition(start)
            page = f"{before}{start}\n\n```\n{content}\n```\n\n{end}{rest.partition(end)[2]}"
        PAGE.write_text(page)


def tree() -> str:
    """Every file of the source with the first line of its docstring."""
    lines = ["src/qkscope/"]
    for path in sorted(SOURCE.rglob("*.py"), key=_in_tree):
        indent = "  " * (len(path.relative_to(SOURCE).parts) - (path.name == "__init__.py" and path.parent != SOURCE))
        about = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0].rstrip(".")
        if path.name == "__init__.py" and path.parent != SOURCE:
            lines.append(f"{indent}{path.parent.name}/".ljust(26) + about)
            continue
        lines.append(f"{indent}{path.name}".ljust(26) + about)
    return "\n".join(lines)


def _in_tree(path: Path) -> tuple[object, ...]:
    """Modules before folders, folders from the lowest level up."""
    parts = path.relative_to(SOURCE).parts
    return (len(parts) > 1, levels().get(parts[0], 0), parts[:-1], parts[-1] != "__init__.py", parts[-1])


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


@dataclass
class Way:
    """The folders and functions that a command entered."""

    steps: dict[tuple[str, str], None] = field(default_factory=dict)
    """From which room to which, one of each kind."""
    functions: set[tuple[str, int]] = field(default_factory=set)
    """Files and first lines."""
    depth: int = 0
    """Largest depth of our own calls."""


def walk(command: list[str], *, watched: bool = True) -> Way:
    """Run a command in this process, and watch it."""
    from qkscope.cli.main import app

    way = Way()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (here := room(frame.f_code.co_filename)) is None:
            return
        above, there, depth = frame.f_back, None, 1
        while above is not None:
            if (outer := room(above.f_code.co_filename)) is not None:
                if above.f_code.co_name == "<module>":  # an import
                    return
                there = there or outer
                depth += not above.f_code.co_name.startswith("<")
            above = above.f_back
        if there is None or frame.f_code.co_name == "<module>":
            return
        if not frame.f_code.co_name.startswith("<"):  # a comprehension or a lambda is read where it stands
            way.functions.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
            way.depth = max(way.depth, depth)
        if there != here:
            way.steps.setdefault((there, here))

    sys.setprofile(hook if watched else None)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            app(command, standalone_mode=False)
    finally:
        sys.setprofile(None)
    return way


_ROOMS: dict[str, str | None] = {}


def room(file: str) -> str | None:
    """The folder of a source file; None for files of other packages."""
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


def described(name: str, way: Way) -> list[str]:
    """The steps in order, with a count of those that go upward."""
    level = levels()
    steps = [(there, here) for there, here in way.steps if there in level and here in level]
    upward = {step for step in steps if level[step[1]] > level[step[0]]}
    both = {*steps, *((here, there) for there, here in steps)}
    files = len({file for file, _ in way.functions})
    lines = [
        f"{name}: {len(steps)} kinds of step, {len(upward)} upward ({len(both)} with the ways back)",
        f"  {len(way.functions)} functions in {files} files, {way.depth} calls deep",
    ]
    return lines + [f"  {there} → {here}{'  (upward)' if (there, here) in upward else ''}" for there, here in steps]


if __name__ == "__main__":
    main()
