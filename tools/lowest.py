"""The lowest version of every package that qkscope itself needs, as requirements for pip.

python -m tools.lowest [-o FILE]

The versions are the lower bounds in pyproject.toml, of the dependencies and of the extras that add a capability.
``make lowest`` installs them into .venv-lowest and runs tests there. torch is the exception: its pin is that of
constraints.txt, because any other version brings gigabytes of GPU packages, so its lower bound is not tried.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tools.constraints import pins

ROOT = Path(__file__).parent.parent
EXTRAS = ("capture", "gguf", "ray")
"""Extras of users; tools of developers are installed in their newest versions that go with the lowest of these."""
AS_TESTED = {"torch"}


def main() -> None:
    """Print the pins, or write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="file to write; by default they are printed")
    output = parser.parse_args().output
    text = "".join(f"{pin}\n" for pin in lowest())
    if output is None:
        print(text, end="")
    else:
        output.write_text(text)


def lowest() -> list[str]:
    """One pin per direct dependency, in the order of pyproject.toml."""
    tested = pins()
    return [
        f"{needed.name}=={tested[needed.name] if needed.name in AS_TESTED else lower_bound(needed)}"
        for extra in ("", *EXTRAS)
        for needed in direct(extra)
    ]


def direct(extra: str = "") -> list[Requirement]:
    """Direct dependencies of qkscope, or of one of its extras, without qkscope itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [needed for needed in map(Requirement, lines) if needed.name != project["name"]]


def lower_bound(needed: Requirement) -> str:
    """The version after ``>=``."""
    bounds = [part.version for part in needed.specifier if part.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"pyproject.toml: {needed} has {len(bounds)} lower bounds (>=), expected one")
    return bounds[0]


if __name__ == "__main__":
    main()
