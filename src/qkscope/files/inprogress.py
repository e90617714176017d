"""A capture in progress, or one job's share of it: its manifest, its sums so far and its kept vectors so far.

    progress.json   the manifest of the whole run
    parts/…         sums of the completed shards (parts.py)
    kept/…          their kept vectors, one file per shard
    holder.json     the process that holds the folder (locks.py)

All of these are removed when the run is finished; only a finished run has ``run.json``.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import DatasetError
from qkscope.files.atomic import check_writable, remove_leftovers, write_together
from qkscope.files.checksums import CHECKSUMS
from qkscope.files.locks import HOLDER
from qkscope.files.manifest import problem
from qkscope.files.parts import PARTS, Parts
from qkscope.files.readers import read_text
from qkscope.files.runfolder import (
    FORMAT,
    LEFT_OUT,
    LOSS,
    MANIFEST,
    MOMENTS,
    ONE_BY_ONE,
    PASSAGE_FILE,
    PROGRESS,
    SAMPLE,
)

KEPT_FOLDER, VECTORS_FOLDER = "kept", "vectors"
_FILES = re.compile(
    r"(run|progress|checksums|holder|dataset)\.json|data\.parquet|((layer|shard)-\d+|passage)\.safetensors"
)
"""Names of the files that a capture writes."""


@dataclass
class CaptureInProgress:
    """A capture in progress, in its folder."""

    folder: Path
    manifest: dict[str, Any]
    damaged: list[str] = field(default_factory=list)
    """Damaged parts that were removed."""

    def __post_init__(self) -> None:
        self.parts = Parts(self.folder, self.manifest)

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return (self.folder / MANIFEST).exists()

    @property
    def kept(self) -> Path:
        """Folder of the vectors kept so far."""
        return self.folder / KEPT_FOLDER

    def resume(self) -> None:
        """Resume an earlier attempt; raise an error with the differences if its manifest differs."""
        self._remove_leftovers()
        manifest_file = self.folder / MANIFEST if self.finished else self.folder / PROGRESS
        if manifest_file.exists():
            recorded = read_manifest(manifest_file)
            recorded = {key: value for key, value in recorded.items() if key not in (LEFT_OUT, ONE_BY_ONE, LOSS)}
            check_same_settings(self.folder, recorded, self.manifest)
        else:
            self._check_no_remains()
            write_together(self.folder, {PROGRESS: json_bytes({"manifest": self.manifest})})
        if not self.finished:
            self.damaged = self.parts.open(self.kept)

    def forget(self) -> None:
        """Remove the files of an earlier attempt, whatever its settings; raise an error if a run is finished."""
        if self.finished:
            raise DatasetError(f"{self.folder} contains a finished run; choose another folder")
        for name in (PARTS, KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER):
            if (self.folder / name).is_symlink():
                raise DatasetError(f"{self.folder / name} is a symbolic link, which a capture never creates; remove it")
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (PROGRESS, CHECKSUMS, PASSAGE_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, left_out: list[dict[str, Any]], one_by_one: list[int], loss: dict[str, Any] | None) -> None:
        """Write the manifest of the finished run with omitted documents, shards measured one by one, and the loss."""
        notes = {LEFT_OUT: left_out, ONE_BY_ONE: one_by_one, LOSS: loss}
        manifest = self.manifest | {key: value for key, value in notes.items() if value}
        write_together(self.folder, {MANIFEST: json_bytes(manifest)})

    def tidy(self) -> None:
        """Remove files that a finished run no longer needs."""
        for name in (PARTS, KEPT_FOLDER):
            if not (self.folder / name).is_symlink():
                shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _check_no_remains(self) -> None:
        """Raise an error if the folder has files of a run without a manifest, which cannot be resumed."""
        names = (MOMENTS, SAMPLE, VECTORS_FOLDER, PASSAGE_FILE, CHECKSUMS)
        remains = [name for name in names if (self.folder / name).exists()]
        if remains:
            raise DatasetError(
                f"{self.folder} contains a run without its manifest ({', '.join(remains)}); choose another folder, or "
                "--no-resume to start over"
            )

    def _remove_leftovers(self) -> None:
        remove_leftovers(self.folder, _FILES)
        for name in (KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER):
            subfolder = self.folder / name
            if subfolder.is_dir() and not subfolder.is_symlink():
                for folder in (subfolder, *(child for child in subfolder.iterdir() if child.is_dir())):
                    remove_leftovers(folder, _FILES)


def check_capture_folder(folder: Path) -> None:
    """Raise an error unless a folder is new, empty or contains only an earlier attempt, without symbolic links."""
    check_writable(folder)
    folders, files = (
        (PARTS, KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER, "tables"),
        (MANIFEST, PROGRESS, CHECKSUMS, PASSAGE_FILE, HOLDER),
    )
    has_run = (folder / PROGRESS).exists() or (folder / MANIFEST).exists() or (folder / CHECKSUMS).exists()
    foreign = []
    for path in folder.glob("*"):
        if path.name in (*folders, *files) and path.is_symlink() and path.name != "tables":
            raise DatasetError(f"{path} is a symbolic link, which a capture never creates; choose another folder")
        is_capture_file = (
            path.is_dir()
            if path.name in folders
            else path.is_file()
            if path.name in files
            else _from_earlier_version(path)
        )
        if not (is_capture_file and (has_run or path.name in ("tables", HOLDER))) and not _leftover(path.name):
            foreign.append(path.name)
    if foreign:
        raise DatasetError(f"{folder} contains other files ({', '.join(sorted(foreign)[:3])}); choose another folder")
    for path in (
        child for name in (SAMPLE, VECTORS_FOLDER) for child in (folder / name).glob("*") if child.is_symlink()
    ):
        raise DatasetError(f"{path} is a symbolic link, which a capture never creates; choose another folder")


def _from_earlier_version(path: Path) -> bool:
    """True if an earlier version wrote it during a capture; reading progress.json will report this."""
    return path.is_dir() and (path.name == "shards" or path.name.startswith("moments-"))


def _leftover(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def read_manifest(path: Path) -> dict[str, Any]:
    """The checked manifest of a finished run or of a capture in progress."""
    try:
        content = json.loads(read_text(path))
        manifest = dict(content["manifest"]) if path.name == PROGRESS else dict(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read ({error!r}); choose another folder") from None
    if "shards_done" in content:
        raise DatasetError(f"{path} was written by an earlier version of qkscope; choose another folder")
    error_text = (
        f"expected format {FORMAT}, got {manifest.get('format')}"
        if manifest.get("format") != FORMAT
        else problem(manifest)
    )
    if error_text:
        raise DatasetError(f"{path} is not a valid manifest ({error_text}); choose another folder")
    return manifest


def check_same_settings(
    folder: Path,
    recorded: dict[str, Any],
    expected: dict[str, Any],
    advice: str = "choose another folder, or --no-resume to start over",
) -> None:
    """Raise an error that shows the differences between two manifests, if there are any."""
    different = [key for key in sorted({*recorded, *expected}) if recorded.get(key) != expected.get(key)]
    if different:
        differences = "; ".join(_difference(key, recorded.get(key), expected.get(key)) for key in different)
        raise DatasetError(f"{folder} contains a capture with different settings ({differences}); {advice}")


def json_bytes(value: object) -> bytes:
    """The bytes of a JSON file, formatted as run.json."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _difference(key: str, recorded: object, expected: object) -> str:
    if isinstance(recorded, dict) and isinstance(expected, dict):
        names = [name for name in sorted({*recorded, *expected}) if recorded.get(name) != expected.get(name)]
        return "; ".join(_difference(f"{key}.{name}", recorded.get(name), expected.get(name)) for name in names[:5])
    texts = [text if len(text := json.dumps(value)) < 80 else text[:77] + "..." for value in (recorded, expected)]
    return f"{key}: expected {texts[1]}, got {texts[0]}"
