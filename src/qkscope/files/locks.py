"""Locks: one process at a time in a folder; ``holder.json`` names it to other processes.

The lock is on the folder itself and ends with the process, however it ends; ``holder.json`` only names the process.
On network file systems, locks may not work across machines.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from qkscope.errors import DatasetError, HeldError
from qkscope.files.atomic import write_together

HOLDER = "holder.json"
_PATIENCE = 2.0
"""Seconds to wait until the process that holds a folder has written holder.json or released the lock."""


@dataclass(frozen=True)
class HeldFolder:
    """A folder that this process holds."""

    folder: Path
    handle: int

    def check(self) -> None:
        """Raise an error if it was renamed or removed: files written now would go into a new folder of that name."""
        try:
            is_same = os.path.samestat(self.folder.stat(), os.fstat(self.handle))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise DatasetError(
                f"{self.folder} was renamed or removed while it was being written; rerun the same command with its "
                "new name to resume"
            )


@contextmanager
def held(folder: Path) -> Iterator[HeldFolder]:
    """Lock a folder, created if necessary, during the block; a ``HeldError`` names the process that holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _take(handle, folder)
        (folder / HOLDER).unlink(missing_ok=True)
        write_together(folder, {HOLDER: json.dumps(_this_process()).encode()})
        try:
            yield HeldFolder(folder, handle)
        finally:
            (folder / HOLDER).unlink(missing_ok=True)
    finally:
        os.close(handle)


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Prevent other processes from locking a folder while it is read; nothing is written."""
    if not folder.is_dir():
        yield  # the caller reports a missing folder when it reads it
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _take(handle, folder, shared=True)
        yield
    finally:
        os.close(handle)


def supports_locks(folder: Path) -> bool:
    """True if the file system of this folder supports locks."""
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _take(handle: int, folder: Path, *, shared: bool = False) -> None:
    import fcntl

    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(folder)
            if holder is None and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise HeldError(
                f"{folder} is in use by {holder or 'another process'}; wait until it ends, or choose another folder"
            ) from None
        return


def _this_process() -> dict[str, str | int]:
    return {"process": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}


def _holder(folder: Path) -> str | None:
    try:
        holder = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {int(holder['process'])} on {holder['host']}, since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None
