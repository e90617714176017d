"""Checksums of a finished run: the SHA-256 of each of its files, to detect damage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qkscope.errors import DatasetError
from qkscope.files.atomic import write_together
from qkscope.files.readers import check_regular, read_text

CHECKSUMS = "checksums.json"
_RUN_ENTRIES = ("run.json", "moments", "passage.safetensors", "sample", "vectors")
"""Files and folders that belong to a run; tables computed from it do not."""


def write_checksums(folder: Path, known: Mapping[Path, str] | None = None) -> None:
    """Write the checksums of a finished run; the digests of files just written may be known."""
    names, known = _names(folder), known or {}
    with ThreadPoolExecutor(4) as threads:
        digests = threads.map(lambda path: known.get(path) or digest(path), [folder / name for name in names])
        content = checksums_bytes(dict(zip(names, digests, strict=True)))
    write_together(folder, {CHECKSUMS: content})


def checksums_bytes(digests: Mapping[str, str]) -> bytes:
    """The content of checksums.json."""
    return (json.dumps(digests, indent=1) + "\n").encode()


def recorded_digests(folder: Path) -> dict[str, str] | None:
    """The digest of each file as the capture recorded it; None without checksums."""
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


def compare(folder: Path) -> list[str] | None:
    """One line for each file that changed, is missing or was added since the capture; None without checksums."""
    recorded = recorded_digests(folder)
    if recorded is None:
        return None
    present = _names(folder)
    problems = [f"{folder / name} is missing; copy the run again" for name in recorded if name not in present]
    problems += [f"{folder / name} is not a file of this run; remove it" for name in present if name not in recorded]
    changed = [name for name in present if name in recorded and digest(folder / name) != recorded[name]]
    return problems + [f"{folder / name} differs from its checksum; copy or capture the run again" for name in changed]


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
