"""Pin every package of this environment in constraints.txt, so that a clone installs what was tested.

python -m tools.constraints

Run it with the Python of the environment whose tests passed; ``make constraints`` first makes a new one of the newest
versions. Left out are qkscope, what Python itself brings (pip, setuptools), and the build of a version: torch
2.13.0+cpu is pinned as 2.13.0, which is there for every machine.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

FILE = Path(__file__).parent.parent / "constraints.txt"
HEADER = """\
# Versions of all packages that qkscope was tested with, on Python {python}. The Makefile installs these.
# Written by: make constraints
"""
PYTHONS_OWN = ("pip", "setuptools")


def main() -> None:
    """Write the file."""
    python = ".".join(platform.python_version_tuple()[:2])
    FILE.write_text(HEADER.format(python=python) + "".join(f"{pin}\n" for pin in installed()))


def installed() -> list[str]:
    """One pin for each package that is installed here, by name."""
    skipped = [part for name in PYTHONS_OWN for part in ("--exclude", name)]
    command = [sys.executable, "-m", "pip", "list", "--format=freeze", "--exclude-editable", *skipped]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    versions = dict(line.split("==") for line in lines)
    return [f"{name}=={Version(versions[name]).public}" for name in sorted(versions, key=str.lower)]


def pins() -> dict[str, str]:
    """The versions in constraints.txt, by the canonical name of the package."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


if __name__ == "__main__":
    main()
