"""Atomic writes: after a crash, a file is either the old one or the new one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qkscope.errors import TableError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+\.tmp")


def check_writable(folder: Path) -> None:
    """Raise a ``TableError`` before the work starts if this folder could not be written after it."""
    if folder.is_symlink() and not folder.exists():
        raise TableError(
            f"cannot write to {folder} (it is a link to {folder.readlink()}, which does not exist); choose another"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise TableError(f"cannot write to {folder} ({nearest} is not a writable directory); choose another")


def temporary_name(name: str) -> str:
    """Name of a file until it is complete."""
    return f".{name}.{os.getpid()}.tmp"


def remove_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Remove temporary files that a killed process left; ``names`` matches the final names of these files."""
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and names.fullmatch(match["name"]) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path``; if the block succeeds, it is synced to disk and replaces ``path``."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write several files into one folder; all are on disk under temporary names before the first is renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = {folder / temporary_name(name): folder / name for name in contents}
    try:
        for temporary, content in zip(staged, contents.values(), strict=True):
            temporary.write_bytes(content)
            sync(temporary)
        for temporary, final in staged.items():
            temporary.replace(final)
        sync(folder)
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder while its files are read, merged and written; a second process waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file, or the directory entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
