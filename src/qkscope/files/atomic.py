"""Files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from qkscope.errors import TableError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.\d+\.tmp")


def check_writable(folder: Path) -> None:
    """Raise before the work what writing into a folder, made if need be, would raise after it."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise TableError(f"cannot write to {folder} ({nearest} is not a writable directory); choose another")


def temporary_name(name: str) -> str:
    """What a file is called until it is complete."""
    return f".{name}.{os.getpid()}.tmp"


def remove_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what a process that was killed left under temporary names; ``names`` says of which files."""
    for path in folder.glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found is not None and names.fullmatch(found["name"]) and path.is_file() and not path.is_symlink():
            path.unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, synced to disk, when the block ends well."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write several files of one folder: all are on disk under temporary names before the first takes its place."""
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
    """Hold a folder while its files are read, merged and written, so that two processes take turns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
