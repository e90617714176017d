"""Atomic writes: after a crash, a file is either the old one or the new one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from qkscope.errors import TableError
from qkscope.files.readers import read_text

RENAMES = ".renames.json"
"""The list of files that are complete under temporary names: {temporary: name}."""
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.tmp")


def check_writable(folder: Path) -> None:
    """Raise a ``TableError`` if this folder cannot be written, before long work starts."""
    if is_url(folder):
        raise TableError(
            f"{as_url(folder)} is not a folder: object storage has neither renames nor locks; write to a local folder, "
            "and copy it there, also while it is being written"
        )
    if folder.is_symlink() and not folder.exists():
        raise TableError(
            f"cannot write to {folder} (it is a link to {folder.readlink()}, which does not exist); choose another"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise TableError(f"cannot write to {folder} ({nearest} is not a writable directory); choose another")


def is_url(path: Path | str) -> bool:
    """True if a path is a URL of object storage or another remote system, such as s3://bucket/run.

    >>> is_url(Path("s3://bucket/run")), is_url(Path("runs/s3")), is_url("hf://datasets/owner/name")
    (True, False, False)
    """
    return re.match(r"(?!(hf|file):)[a-z][a-z0-9+.-]+:/.", str(path)) is not None and not Path(path).exists()


def as_url(path: Path | str) -> str:
    """The URL of a path; ``Path`` drops one of its two slashes.

    >>> as_url(Path("s3://bucket/run"))
    's3://bucket/run'
    """
    return re.sub(r"^([a-z][a-z0-9+.-]+):/+", r"\1://", str(path))


def temporary_name(name: str) -> str:
    """The name of a file until it is complete."""
    return f".{name}.{os.getpid()}.tmp"


def remove_leftovers(folder: Path, names: re.Pattern[str], *, dead: bool = False) -> None:
    """Remove temporary files of a killed process; ``names`` matches their final names.

    With ``dead``, needed without a lock, only files of processes that no longer run are removed.
    """
    for path in folder.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not (names.fullmatch(match["name"]) or match["name"] == RENAMES):
            continue
        if path.is_file() and not path.is_symlink() and not (dead and _is_running(int(match["process"]))):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it belongs to another user
    return True


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder; if the block succeeds, it is synced to disk and replaces ``path``."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_together(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write several files into one folder, as one step: after a crash, either all are old or all are new.

    All files are first written to disk under temporary names, then a list of them. Once the list is on disk, the files
    count as written: after a crash, the next process renames the rest (``settle``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    finish(folder)
    remove_leftovers(folder, re.compile("|".join(map(re.escape, contents))), dead=True)
    staged = {temporary_name(name): name for name in contents}
    has_list = len(staged) > 1
    try:
        for temporary, content in zip(staged, contents.values(), strict=True):
            (folder / temporary).write_bytes(content)
            sync(folder / temporary)
        if has_list:
            with atomic_path(folder / RENAMES) as temporary_list:
                temporary_list.write_text(json.dumps(staged))
        _rename(folder, staged)
        if has_list:
            (folder / RENAMES).unlink(missing_ok=True)
    finally:
        if not (has_list and (folder / RENAMES).exists()):
            for temporary in staged:
                (folder / temporary).unlink(missing_ok=True)


def settle(folder: Path) -> None:
    """Rename files that a killed process wrote but did not rename; wait for a process that still writes."""
    if not (folder / RENAMES).exists():
        return
    try:
        with locked(folder):
            finish(folder)
    except OSError as error:
        raise TableError(
            f"writing to {folder} was interrupted and cannot be completed ({error.strerror}); make the folder writable"
        ) from None


def finish(folder: Path) -> None:
    """As ``settle``, for a caller that has locked the folder."""
    list_file = folder / RENAMES
    if list_file.exists():
        _rename(folder, _read_renames(list_file))
        list_file.unlink(missing_ok=True)


def _read_renames(path: Path) -> dict[str, str]:
    """Read the renames that a killed process did not complete: {temporary: name}."""
    try:
        staged = dict(json.loads(read_text(path)))
        matches = {temporary: _TEMPORARY.fullmatch(temporary) for temporary in staged}
    except (OSError, ValueError, TypeError, RecursionError):
        matches = {"": None}
    if not all(match and match["name"] == staged[name] and "/" not in name for name, match in matches.items()):
        raise TableError(f"{path} was not written by qkscope; move it away")
    return staged


def _rename(folder: Path, staged: Mapping[str, str]) -> None:
    for temporary, name in staged.items():
        with suppress(FileNotFoundError):  # it was already renamed
            (folder / temporary).replace(folder / name)
    sync(folder)


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
