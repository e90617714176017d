"""A capture in progress, or one job's share of it: the manifest, the sums so far and the kept vectors so far.

    progress.json   the manifest of the whole run
    parts/…         sums of the shards that are done (parts.py)
    kept/…          their kept vectors, one file per shard
    holder.json     which process holds the folder (locks.py)

All of it is removed when the run is finished; only a finished run has ``run.json``.
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
        """Whether the run is complete."""
        return (self.folder / MANIFEST).exists()

    @property
    def kept(self) -> Path:
        """Folder of the vectors kept so far."""
        return self.folder / KEPT_FOLDER

    def resume(self) -> None:
        """Continue what an earlier attempt left; if its manifest differs, an error shows the difference."""
        self._remove_leftovers()
        manifest_file = self.folder / MANIFEST if self.finished else self.folder / PROGRESS
        if manifest_file.exists():
            earlier = read_manifest(manifest_file)
            earlier = {key: value for key, value in earlier.items() if key not in (LEFT_OUT, ONE_BY_ONE, LOSS)}
            refuse_difference(self.folder, earlier, self.manifest)
        else:
            self._refuse_remains()
            write_together(self.folder, {PROGRESS: json_bytes({"manifest": self.manifest})})
        if not self.finished:
            self.damaged = self.parts.open(self.kept)

    def forget(self) -> None:
        """Remove what an earlier attempt left, whatever its settings; a finished run is not touched."""
        if self.finished:
            raise DatasetError(f"{self.folder} contains a finished run; choose another folder")
        for name in (PARTS, KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER):
            if (self.folder / name).is_symlink():
                raise DatasetError(f"{self.folder / name} is a symbolic link, which a capture never creates; remove it")
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (PROGRESS, CHECKSUMS, PASSAGE_FILE):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, left_out: list[dict[str, Any]], one_by_one: list[int], loss: dict[str, Any] | None) -> None:
        """Write the manifest of the finished run, with documents left out, shards measured one by one and the loss."""
        notes = {LEFT_OUT: left_out, ONE_BY_ONE: one_by_one, LOSS: loss}
        manifest = self.manifest | {key: value for key, value in notes.items() if value}
        write_together(self.folder, {MANIFEST: json_bytes(manifest)})

    def tidy(self) -> None:
        """Remove what a finished run no longer needs."""
        for name in (PARTS, KEPT_FOLDER):
            if not (self.folder / name).is_symlink():
                shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _refuse_remains(self) -> None:
        """Raise an error if a run without its manifest is left: it is neither resumed nor mixed into another run."""
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
    """Raise an error unless a folder is new, empty or contains nothing but an earlier attempt, without links."""
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
        is_ours = (
            path.is_dir()
            if path.name in folders
            else path.is_file()
            if path.name in files
            else _from_earlier_version(path)
        )
        if not (is_ours and (has_run or path.name in ("tables", HOLDER))) and not _leftover(path.name):
            foreign.append(path.name)
    if foreign:
        raise DatasetError(f"{folder} contains other files ({', '.join(sorted(foreign)[:3])}); choose another folder")
    for path in (
        child for name in (SAMPLE, VECTORS_FOLDER) for child in (folder / name).glob("*") if child.is_symlink()
    ):
        raise DatasetError(f"{path} is a symbolic link, which a capture never creates; choose another folder")


def _from_earlier_version(path: Path) -> bool:
    """Whether an earlier version wrote it during a capture; reading progress.json will report that version."""
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


def refuse_difference(
    folder: Path,
    found: dict[str, Any],
    expected: dict[str, Any],
    advice: str = "choose another folder, or --no-resume to start over",
) -> None:
    """Raise an error that shows the differences between two manifests, if there are any."""
    different = [key for key in sorted({*found, *expected}) if found.get(key) != expected.get(key)]
    if different:
        differences = "; ".join(_difference(key, found.get(key), expected.get(key)) for key in different)
        raise DatasetError(f"{folder} contains a capture with different settings ({differences}); {advice}")


def json_bytes(value: object) -> bytes:
    """The bytes of a JSON file, formatted as run.json."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _difference(key: str, found: object, expected: object) -> str:
    if isinstance(found, dict) and isinstance(expected, dict):
        names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
        return "; ".join(_difference(f"{key}.{name}", found.get(name), expected.get(name)) for name in names[:5])
    texts = [text if len(text := json.dumps(value)) < 80 else text[:77] + "..." for value in (found, expected)]
    return f"{key}: expected {texts[1]}, got {texts[0]}"
