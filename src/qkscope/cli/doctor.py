"""``qkscope doctor``: check versions, devices, memory and disk of this installation."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer

from qkscope._version import __version__
from qkscope.cli.common import SOME_HEADS_FAILED, errors_as_lines, set_up_logging

NEEDED = ("numpy", "scipy", "pandas", "pyarrow", "safetensors", "pydantic", "matplotlib", "huggingface_hub")
EXTRAS = {
    "torch": ("capture", "qkscope capture and qkscope demo"),
    "transformers": ("capture", "qkscope capture and qkscope demo"),
    "gguf": ("gguf", "models in GGUF files"),
    "ray": ("ray", "--engine ray"),
}
LITTLE_DISK, LITTLE_MEMORY = 2.0, 4.0
"""GiB below which a note is printed."""

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class _Finding:
    """One line of the report."""

    level: Level
    name: str
    value: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "  ", "note": "- ", "problem": "! "}[self.level]
        return f"{mark}{self.name:<22}{self.value}" + (f"; {self.advice}" if self.advice else "")


def doctor_command(
    folder: Annotated[Path, typer.Argument(help="Folder for results.")] = Path(),
) -> None:
    """Print versions, devices, memory, disk, and problems.

    Exit code 1 if there are problems.
    """
    set_up_logging(quiet=False, verbose=False)
    with errors_as_lines():
        findings = examine(folder)
        for finding in findings:
            typer.echo(str(finding))
        problems = sum(finding.level == "problem" for finding in findings)
        typer.echo(f"{problems} problem{'' if problems == 1 else 's'}")
    raise typer.Exit(SOME_HEADS_FAILED if problems else 0)


def examine(folder: Path) -> list[_Finding]:
    """Run all checks that need no model, dataset or network; results go to ``folder``."""
    return [*_software(), *_machine(), *_gpus(), *_disk(folder), *_hub()]


def _software() -> Iterator[_Finding]:
    yield _Finding("ok", "qkscope", __version__)
    supported = sys.version_info >= (3, 11)
    advice = "" if supported else "install 3.11 or newer"
    yield _Finding("ok" if supported else "problem", "python", platform.python_version(), advice)
    for name in NEEDED:
        installed = _version(name)
        if installed is None:
            yield _Finding("problem", name, "not installed", "install it with: pip install qkscope")
        else:
            yield _Finding("ok", name, installed)
    for name, (extra, purpose) in EXTRAS.items():
        installed = _version(name)
        if installed is None:
            yield _Finding("note", name, "not installed", f"pip install 'qkscope[{extra}]' for {purpose}")
        else:
            yield _Finding("ok", name, installed)


def _machine() -> Iterator[_Finding]:
    import numpy as np
    from threadpoolctl import threadpool_info

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield _Finding("ok", "cores", f"{cores} ({platform.machine()})")
    np.ones((2, 2)) @ np.ones((2, 2))
    blas = [f"{lib['internal_api']} {lib['version']}" for lib in threadpool_info() if lib["user_api"] == "blas"]
    yield _Finding("ok", "linear algebra", ", ".join(blas) or "unknown")
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        is_little = memory < LITTLE_MEMORY
        hint = "use --workers 1" if is_little else ""
        yield _Finding("note" if is_little else "ok", "memory", f"{memory:.1f} GiB", hint)


def _gpus() -> Iterator[_Finding]:
    if _version("torch") is None:
        return
    try:
        from qkscope.capture.model import gpus

        devices = gpus()
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        yield _Finding("problem", "torch", f"cannot be used ({reason[:120]})", "install it again")
        return
    if not devices:
        yield _Finding("ok", "gpu", "none; captures run on the CPU")
    for number, gpu in enumerate(devices):
        yield _Finding("ok", f"cuda:{number}", f"{gpu.name}, {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free")
        if gpu.kernel:
            yield _Finding("ok", "  reduction kernel", "agrees with torch")
        else:
            yield _Finding("note", "  reduction kernel", "not used; captures of half-precision models are slower")


def _disk(folder: Path) -> Iterator[_Finding]:
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        yield _Finding("problem", "output folder", f"{nearest} is not a writable directory", "choose another")
        return
    free = shutil.disk_usage(nearest).free / 2**30
    hint = "qkscope plan shows what a capture needs" if free < LITTLE_DISK else ""
    yield _Finding("note" if free < LITTLE_DISK else "ok", "free disk", f"{free:.1f} GiB at {nearest}", hint)
    from qkscope.files.locks import supports_locks

    if not supports_locks(nearest):
        reason = f"{nearest} cannot be locked"
        yield _Finding("problem", "output folder", reason, "choose one on a local disk")


def _hub() -> Iterator[_Finding]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield _Finding("note", "hub", "offline (HF_HUB_OFFLINE is set)", "only what is in the cache can be read")
    else:
        yield _Finding("ok", "hub", f"{constants.ENDPOINT}, cache {constants.HF_HUB_CACHE}")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
