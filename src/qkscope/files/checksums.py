"""The bytes of a finished run: a SHA-256 of each of its files, so that damage can be told from data."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import check_regular, read_text

CHECKSUMS = "checksums.json"
_PARTS = ("run.json", "moments", "sample", "vectors")
"""What belongs to a run; tables made from it do not."""


def write_checksums(folder: Path) -> None:
    """Record the files of a finished run."""
    names = _names(folder)
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(digest, [folder / name for name in names])
        text = json.dumps(dict(zip(names, digests, strict=True)), indent=1) + "\n"
    write_together(folder, {CHECKSUMS: text.encode()})


def compare(folder: Path) -> list[str] | None:
    """Files that differ from what was recorded, are missing or came since; None if nothing was recorded."""
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        said = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); copy the run again") from None
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise DatasetError(f"{path}: expected an object of file names and digests; copy the run again")
    there = _names(folder)
    found = [f"{folder / name} is missing; copy the run again" for name in said if name not in there]
    found += [f"{folder / name} is no file of this run" for name in there if name not in said]
    changed = [name for name in there if name in said and digest(folder / name) != said[name]]
    return found + [f"{folder / name} is not what was captured; copy or capture the run again" for name in changed]


def _names(folder: Path) -> list[str]:
    files = [
        path
        for part in _PARTS
        for path in ([folder / part] if (folder / part).is_file() else (folder / part).rglob("*"))
    ]
    return sorted(path.relative_to(folder).as_posix() for path in files if path.is_file())


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
