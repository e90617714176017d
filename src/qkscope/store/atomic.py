"""Files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, synced to disk, when the block ends well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write several files of one folder: all are on disk under temporary names before the first takes its place."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = {folder / f".{name}.{os.getpid()}.tmp": folder / name for name in contents}
    try:
        for temporary, content in zip(staged, contents.values(), strict=True):
            temporary.write_bytes(content)
            _sync(temporary)
        for temporary, final in staged.items():
            temporary.replace(final)
        _sync(folder)
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


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Hold a folder for as long as the block lasts; False if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
