"""Checksums of a finished run: the SHA-256 of each of its files, to detect damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import check_regular, read_text

CHECKSUMS = "checksums.json"
_DIFFERS = "{} differs from its checksum; copy or capture the run again"
_MOMENTS = "moments/"
_RUN_ENTRIES = ("run.json", "moments", "passage.safetensors", "sample", "vectors")
"""Files and folders that belong to a run; tables computed from it do not."""


def write_checksums(folder: Path, known_digests: Mapping[Path, str] | None = None) -> None:
    """Write the checksums of a finished run; ``known_digests`` need not be computed again."""
    names, known_digests = _names(folder), known_digests or {}
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(lambda path: known_digests.get(path) or digest(path), [folder / name for name in names])
        content = checksums_bytes(dict(zip(names, digests, strict=True)))
    write_together(folder, {CHECKSUMS: content})


def checksums_bytes(digests: Mapping[str, str]) -> bytes:
    """The content of checksums.json."""
    return (json.dumps(digests, indent=1) + "\n").encode()


def recorded_digests(folder: Path) -> dict[str, str] | None:
    """The recorded digest of each file; None if the folder has no checksums."""
    path = folder / CHECKSUMS
    if not path.exists():
        return None
    try:
        recorded = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); copy the run again") from None
    if not isinstance(recorded, dict) or not all(isinstance(value, str) for value in recorded.values()):
        raise DatasetError(f"{path}: expected a JSON object of file names and digests; copy the run again")
    return recorded


def run_digest(recorded: Mapping[str, str]) -> str:
    """An identifier of a run: the digest of its moments' digests, the same if a copy lacks other files."""
    moments = "".join(f"{name} {sha256}\n" for name, sha256 in sorted(recorded.items()) if name.startswith(_MOMENTS))
    return hashlib.sha256(moments.encode()).hexdigest()


def compare(folder: Path) -> list[str] | None:
    """One line for each file changed, missing or added since the capture; None if there are no checksums."""
    recorded = recorded_digests(folder)
    if recorded is None:
        return None
    present = _names(folder)
    problems = [f"{folder / name} is missing; copy the run again" for name in recorded if name not in present]
    problems += [f"{folder / name} is not a file of this run; remove it" for name in present if name not in recorded]
    changed = [name for name in present if name in recorded and digest(folder / name) != recorded[name]]
    return problems + [_DIFFERS.format(folder / name) for name in changed]


def difference(folder: Path, names: Iterable[str]) -> str | None:
    """An error text for the first of these files that has changed since the capture; None if none has.

    Each file is read only once per process; if there are no checksums, none is read.
    """
    path = folder / CHECKSUMS
    recorded = (_recorded_once(folder, *file_state(path)) if path.exists() else None) or {}
    for name in names:
        file = folder / name
        if name in recorded and file.is_file() and _digest_once(file, *file_state(file)) != recorded[name]:
            return _DIFFERS.format(file)
    return None


def file_state(path: Path) -> tuple[int, int, int]:
    """Inode, time and size of a file: at least one changes when it is written or replaced. Zeros if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _recorded_once(folder: Path, *_: int) -> dict[str, str] | None:
    return recorded_digests(folder)


@lru_cache(maxsize=4096)
def _digest_once(path: Path, *_: int) -> str:
    return digest(path)


def _names(folder: Path) -> list[str]:
    files = [
        path
        for entry in _RUN_ENTRIES
        for path in ([folder / entry] if (folder / entry).is_file() else (folder / entry).rglob("*"))
    ]
    return sorted(path.relative_to(folder).as_posix() for path in files if path.is_file())


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
