"""One process at a time in a folder, and who that is, for the one that comes second.

The hold is a lock on the folder itself, which ends with the process however it ends; ``holder.json`` only says whose
it is. Locks of network file systems may not reach other machines.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from qkscope.errors import HeldError
from qkscope.files.atomic import write_together

HOLDER = "holder.json"
_PATIENCE = 2.0
"""Seconds in which a process that holds a folder has said who it is, or is gone again."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, made if need be, for as long as the block lasts; a ``HeldError`` says who else has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _take(handle, folder)
        (folder / HOLDER).unlink(missing_ok=True)
        write_together(folder, {HOLDER: json.dumps(_me()).encode()})
        try:
            yield
        finally:
            (folder / HOLDER).unlink(missing_ok=True)
    finally:
        os.close(handle)


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Keep others from holding a folder while it is read; nothing is written into it."""
    if not folder.is_dir():
        yield  # whoever reads it will say so
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _take(handle, folder, shared=True)
        yield
    finally:
        os.close(handle)


def can_be_held(folder: Path) -> bool:
    """Whether the file system of this folder knows locks."""
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

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _who(folder)
            if who is None and time.monotonic() < until:
                time.sleep(0.02)
                continue
            raise HeldError(
                f"{folder} is held by {who or 'another process'}; wait for it, or choose another folder"
            ) from None
        return


def _me() -> dict[str, str | int]:
    return {"process": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"}


def _who(folder: Path) -> str | None:
    try:
        said = json.loads((folder / HOLDER).read_text(encoding="utf-8"))
        return f"process {int(said['process'])} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None
