"""SIGKILL at every rename and removal of a command, one after the other; then the same command again, to the end.

    python -m tests.dying capture STEP MODEL TEXTS PLACE
    python -m tests.dying merge STEP RUN_1 RUN_2 PLACE
    python -m tests.dying analyze STEP RUN PLACE
    python -m tests.dying report STEP RESULTS PLACE

With a step of 13, it is every thirteenth; for a report, whose figures are written one like the other, what a kill at
each of the others would leave is then copied, and the copy looked at. After each kill, tables and pages must be all old
or all new, once a reader has settled their folder; the second attempt must give, byte for byte, what a command gives
that was left alone. Exit code 1 unless all of them do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from qkscope.files.atomic import settle
from tests.forking import all_bytes, import_everything, start, timed, wait

CALLS = ("rename", "replace", "unlink", "remove", "rmdir")
ORIGINALS = {name: getattr(os, name) for name in CALLS}
COMMANDS: dict[str, Callable[..., list[str]]] = {
    "capture": lambda model, texts: [
        *["capture", model, "--texts", texts, "--threads", "1", "--documents-per-shard", "4", "--sample", "50"],
        *["--layers", "0,1", "--max-docs", "8", "-q", "-o"],
    ],
    "merge": lambda *shares: ["merge", *shares, "-q", "-o"],
    "analyze": lambda run: ["analyze", run, "--layers", "0", "--only", "pca,rotation", "--workers", "1", "-q", "-o"],
    "report": lambda results: ["report", results, "--workers", "1", "-q", "-o"],
}
"""What is run; the output folder is added."""
CHANGES = {"summary.json"}
"""Files that hold how long something took."""


def main(what: str, step: int, *places: str) -> int:
    import_everything()
    *given, place = places
    folder = Path(place)
    command = COMMANDS[what](*given)
    timed([*command, str(folder / "whole")], folder / "said")
    expected, before = contents(folder / "whole"), dict[str, bytes]()
    if what == "analyze":  # over older tables
        timed([*command, str(folder / "before"), "--no-intervals"], folder / "said")
        before = contents(folder / "before")
    number, kills, wrong = 1, 0, 0
    if what == "report":
        states, wrong = watched([*command, str(folder / "watched")], folder, before, expected, what)
        print(f"{states} states, {wrong} wrong")
    while True:
        target = folder / "killed"
        if before:
            shutil.copytree(folder / "before", target)
        if wait(dying([*command, str(target)], folder / "said", number)) == 0:
            print(f"{kills} kills, {wrong} wrong")
            return int(wrong > 0 or kills < 3)
        kills += 1
        wrong += not sound(target, before, expected, what)
        timed([*command, str(target)], folder / "said")
        if contents(target) != expected:
            wrong += 1
            odd = {name for name in {*contents(target), *expected} if contents(target).get(name) != expected.get(name)}
            print(f"kill {number}: {', '.join(sorted(odd)[:5])} differ after the second attempt")
        shutil.rmtree(target)
        number += step


def watched(
    command: list[str], folder: Path, before: dict[str, bytes], expected: dict[str, bytes], what: str
) -> tuple[int, int]:
    """Run a command and look, before each rename or removal, at a copy of what it has written; copies, wrong ones."""
    target, copy, record = Path(command[-1]), folder / "copy", folder / "record"
    record.touch()

    def look() -> None:
        if target.exists():
            with originals_of_os():
                shutil.copytree(target, copy, copy_function=os.link)  # nothing is written in place
                with record.open("a") as file:
                    file.write("." if sound(copy, before, expected, what) else "x")
                shutil.rmtree(copy)

    code = wait(at_each_call(command, folder / "said", look))
    assert code == 0, (folder / "said").read_text()
    return len(record.read_text()), record.read_text().count("x")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in all_bytes(folder).items() if Path(name).name not in CHANGES}


def sound(target: Path, before: dict[str, bytes], expected: dict[str, bytes], what: str) -> bool:
    """Return whether all tables or pages are old or all are new, after a reader has settled the folder."""
    if what not in ("analyze", "report") or not target.exists():
        return True
    for folder in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        settle(folder)
        inside = "" if folder == target else f"{folder.relative_to(target)}/"
        found = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")} - CHANGES
        if not any(is_state(folder, inside, found, state) for state in (before, expected, {})):
            print(f"{folder.relative_to(target)}: neither old nor new: {', '.join(sorted(found))}")
            return False
    return True


def is_state(folder: Path, inside: str, found: set[str], state: dict[str, bytes]) -> bool:
    """Return whether these files are those that a complete set has in this folder."""
    names = {name.removeprefix(inside) for name in state if str(Path(name).parent) == (inside.rstrip("/") or ".")}
    return found == names and all(_content(folder / name) == hash(state[inside + name]) for name in names)


def _content(path: Path) -> int:
    """The hash of a file's bytes; a file that was looked at before is not read again."""
    found = path.stat()
    return _hash(str(path), found.st_ino, found.st_mtime_ns, found.st_size)


@cache
def _hash(path: str, *_: int) -> int:
    return hash(Path(path).read_bytes())


def dying(arguments: list[str], said: Path, last: int) -> int:
    """Run a command in a process that is killed right before its ``last`` rename or removal."""
    counter = iter(range(1, last))

    def count() -> None:
        if next(counter, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return at_each_call(arguments, said, count)


def at_each_call(arguments: list[str], said: Path, look: Callable[[], None]) -> int:
    """Run a command in a process that calls ``look`` right before each rename or removal."""
    own = os.getpid()

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def at(*given: Any, **named: Any) -> Any:
            if os.getpid() != own:
                look()
            return call(*given, **named)

        return at

    for name, call in ORIGINALS.items():
        setattr(os, name, wrapped(call))
    try:
        return start(arguments, said)
    finally:
        for name, call in ORIGINALS.items():
            setattr(os, name, call)


@contextmanager
def originals_of_os() -> Iterator[None]:
    """Renames and removals that nobody watches."""
    watching = {name: getattr(os, name) for name in CALLS}
    for name, call in ORIGINALS.items():
        setattr(os, name, call)
    try:
        yield
    finally:
        for name, call in watching.items():
            setattr(os, name, call)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
