"""Try what `make dist` built: sizes, contents, and two kinds of installation in new environments, outside the checkout.

python -m tools.dist [FOLDER]

FOLDER (dist by default) has one wheel and one sdist. Without torch: tables and a report of planted heads; and what
commands say that need torch. With torch: examples/first_look.ipynb beside the wheel, which its first cell installs; the
first Python snippet of README.md, `qkscope doctor` and `qkscope demo --fast`. It takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tools.constraints import FILE as CONSTRAINTS

ROOT = Path(__file__).parent.parent
MOST_WHEEL, MOST_DATA = 15e6, 12e6
"""Bytes of the wheel, and of the bundled family once it is installed."""
DATA = "qkscope/data/tinyrope/"
IN_WHEEL = ("extend-4k-step-0500", "extend-8k-step-0300", "pretrain-step-0020", "pretrain-step-3000")
NEEDS_TORCH = "install it with: pip install torch, then pip install 'qkscope[capture]'"
NOTEBOOK = ROOT / "examples" / "first_look.ipynb"
PLANTED = """\
import qkscope
from qkscope.data.planted import write_demo_dataset
write_demo_dataset("planted")
print(qkscope.__file__)
"""
EXECUTE = """\
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=600).execute()
import qkscope
print(qkscope.__file__)
"""


def main() -> None:
    """Run all checks in order, and stop at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    folder = parser.parse_args().folder.resolve()
    (wheel,), (sdist,) = folder.glob("qkscope-*.whl"), folder.glob("qkscope-*.tar.gz")
    check_files(wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="qkscope-dist-") as scratch:
        try_without_torch(Installation(Path(scratch) / "core"), wheel)
        try_with_torch(Installation(Path(scratch) / "capture"), wheel)
    print("both installations work")


def check_files(wheel: Path, sdist: Path) -> None:
    """Sizes, and which checkpoints are inside."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    with tarfile.open(sdist) as archive:
        source = archive.getnames()
    data = sum(size for name, size in sizes.items() if name.startswith(DATA))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, with {data / 1e6:.1f} MB of the bundled family")
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB")
    check(wheel.stat().st_size <= MOST_WHEEL, f"the wheel exceeds {MOST_WHEEL / 1e6:.0f} MB")
    check(data <= MOST_DATA, f"the bundled family exceeds {MOST_DATA / 1e6:.0f} MB")
    check(checkpoints(list(sizes)) == sorted(IN_WHEEL), f"the wheel has the checkpoints {checkpoints(list(sizes))}")
    trained = sorted(path.name for path in (ROOT / "src" / DATA / "checkpoints").iterdir())
    check(checkpoints(source) == trained, f"the sdist has the checkpoints {checkpoints(source)}")
    check(any(f"{DATA}variants/nope/model" in name for name in source), "the sdist has no variant")


def checkpoints(names: list[str]) -> list[str]:
    """Checkpoints whose weights are among these files."""
    return sorted(found[1] for name in names if (found := re.search(rf"{DATA}checkpoints/([^/]+)/model", name)))


def snippets() -> list[str]:
    """The Python snippets of README.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@dataclass(frozen=True)
class Installation:
    """A new virtual environment, and an empty folder to work in."""

    place: Path

    def __post_init__(self) -> None:
        work = self.place / "work"
        work.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.place / "venv")], check=True)

    @property
    def work(self) -> Path:
        """Where commands run."""
        return self.place / "work"

    def run(self, program: str, *arguments: object, expected: int = 0) -> str:
        """Return what a program of this environment prints; raise an error if it does not end as expected."""
        shown = " ".join([program, *(" ".join(str(word).split())[:80] for word in arguments)])
        print(f"{self.place.name}: {shown}", flush=True)
        command = [str(self.place / "venv" / "bin" / program), *map(str, arguments)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pinned = {"PIP_CONSTRAINT": str(CONSTRAINTS)} if sys.version_info[:2] == (3, 11) else {}
        path = {"PATH": f"{self.place / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            command, cwd=self.work, env=kept | pinned | path, capture_output=True, text=True, check=False
        )
        printed = done.stdout + done.stderr
        check(done.returncode == expected, f"{shown} ended with {done.returncode}, expected {expected}:\n{printed}")
        return printed

    def install(self, *what: str) -> None:
        """Install packages or files with pip, in the tested versions where this is their Python."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)

    def check_imported(self, printed: str) -> None:
        """Check that the installed qkscope was used."""
        check(f"{self.place}" in printed, f"qkscope was imported from elsewhere: {printed}")


def try_without_torch(core: Installation, wheel: Path) -> None:
    """Check that tables, figures and reports work, and that commands that capture say what to install."""
    core.install(str(wheel))
    core.check_imported(core.run("python", "-c", PLANTED))
    core.run("qkscope", "doctor")
    core.run("qkscope", "analyze", "planted", "-o", "results")
    core.run("qkscope", "report", "results", "-o", "report")
    check((core.work / "report" / "report.html").is_file(), "qkscope report wrote no report")
    commands = (["demo"], ["capture", "model", "--texts", "texts"], ["plan", "model"])
    for command in commands:
        lines = core.run("qkscope", *command, expected=2).strip().splitlines()
        check(len(lines) == 1 and NEEDS_TORCH in lines[0], f"qkscope {command[0]} says: {lines}")


def try_with_torch(full: Installation, wheel: Path) -> None:
    """Check that a model can be captured from Python, and that the demo runs."""
    pins = CONSTRAINTS.read_text().splitlines()
    full.install(next(pin for pin in pins if pin.startswith("torch==")))  # first and exactly, as in the Makefile
    full.install("nbclient", "ipykernel", "nbformat")
    shutil.copy(wheel, full.work)
    shutil.copy(NOTEBOOK, full.work)
    full.check_imported(full.run("python", "-c", EXECUTE, NOTEBOOK.name))
    full.check_imported(full.run("python", "-c", f"{snippets()[0]}\nprint(qkscope.__file__)"))
    check((full.work / "report" / "report.html").is_file(), "README's snippet wrote no report")
    full.run("qkscope", "doctor")
    full.run("qkscope", "demo", "--fast", "-o", "demo")
    check((full.work / "demo" / "report" / "explorer.html").is_file(), "the demo wrote no explorer")


def check(is_true: bool, otherwise: str) -> None:
    """End with a message unless it is true."""
    if not is_true:
        sys.exit(f"make dist: {otherwise}")


if __name__ == "__main__":
    main()
