"""A capture under way, or a job's share of one: what it is to become, the sums so far, the vectors kept so far.

    progress.json   the manifest of the whole run
    parts/…         sums of the shards that are done (parts.py)
    kept/…          their kept vectors, a file per shard
    holder.json     which process is at it (holding.py)

All of it goes when the run is finished; ``run.json`` is what tells that it is.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkscope.errors import DatasetError
from qkscope.files.atomic import remove_leftovers, write_together
from qkscope.files.checksums import CHECKSUMS
from qkscope.files.locks import HOLDER
from qkscope.files.manifest import problem
from qkscope.files.parts import PARTS, Parts
from qkscope.files.readers import read_text
from qkscope.files.runfolder import FORMAT, LEFT_OUT, MANIFEST, MOMENTS, ONE_BY_ONE, PROGRESS, SAMPLE

KEPT_FOLDER, VECTORS_FOLDER = "kept", "vectors"
_OURS = re.compile(r"(run|progress|checksums|holder|dataset)\.json|data\.parquet|(layer|shard)-\d+\.safetensors")


@dataclass
class CaptureInProgress:
    """The state of a capture in its folder."""

    folder: Path
    manifest: dict[str, Any]
    damaged: list[str] = field(default_factory=list)
    """Parts that were found damaged and removed."""

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
        """Take up what an earlier attempt left; a manifest that differs is an error that shows the difference."""
        self._remove_leftovers()
        source = self.folder / MANIFEST if self.finished else self.folder / PROGRESS
        if source.exists():
            before = read_manifest(source)
            before = {key: value for key, value in before.items() if key not in (LEFT_OUT, ONE_BY_ONE)}
            refuse_difference(self.folder, before, self.manifest)
        else:
            self._refuse_remains()
            write_together(self.folder, {PROGRESS: _as_json({"manifest": self.manifest})})
        if not self.finished:
            self.damaged = self.parts.open(self.kept)

    def forget(self) -> None:
        """Remove what an earlier attempt left, whatever its settings; a finished run is not touched."""
        if self.finished:
            raise DatasetError(f"{self.folder} holds a finished run; choose another folder")
        for name in (PARTS, KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER):
            if (self.folder / name).is_symlink():
                raise DatasetError(f"{self.folder / name} is a link, which a capture does not make; remove it yourself")
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in (PROGRESS, CHECKSUMS):
            (self.folder / name).unlink(missing_ok=True)

    def finish(self, left_out: list[dict[str, Any]], one_by_one: list[int]) -> None:
        """The run is complete: its manifest is written last, with what happened on the way if anything did."""
        happened = {LEFT_OUT: left_out, ONE_BY_ONE: one_by_one}
        write_together(self.folder, {MANIFEST: _as_json(self.manifest | {k: v for k, v in happened.items() if v})})

    def tidy(self) -> None:
        """Remove what a finished run no longer needs."""
        for name in (PARTS, KEPT_FOLDER):
            if not (self.folder / name).is_symlink():
                shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _refuse_remains(self) -> None:
        """What is left of a run that lost its manifest is neither gone on with nor mixed into another."""
        remains = [name for name in (MOMENTS, SAMPLE, VECTORS_FOLDER, CHECKSUMS) if (self.folder / name).exists()]
        if remains:
            raise DatasetError(
                f"{self.folder} holds remains of a run without its manifest ({', '.join(remains)}); choose another "
                "folder, or --no-resume to begin again"
            )

    def _remove_leftovers(self) -> None:
        remove_leftovers(self.folder, _OURS)
        for name in (KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER):
            place = self.folder / name
            if place.is_dir() and not place.is_symlink():
                for folder in (place, *(inner for inner in place.iterdir() if inner.is_dir())):
                    remove_leftovers(folder, _OURS)


def check_capture_folder(folder: Path) -> None:
    """A run has a folder of its own: new, empty, or with an earlier attempt at a run; nothing in it is a link."""
    if folder.exists() and not folder.is_dir():
        raise DatasetError(f"{folder} is not a folder")
    folders, files = (
        (PARTS, KEPT_FOLDER, MOMENTS, SAMPLE, VECTORS_FOLDER, "tables"),
        (MANIFEST, PROGRESS, CHECKSUMS, HOLDER),
    )
    begun = (folder / PROGRESS).exists() or (folder / MANIFEST).exists() or (folder / CHECKSUMS).exists()
    strange = []
    for path in folder.glob("*"):
        if path.name in (*folders, *files) and path.is_symlink() and path.name != "tables":
            raise DatasetError(f"{path} is a link, which a capture does not make; choose another folder")
        ours = path.is_dir() if path.name in folders else path.is_file() if path.name in files else _old(path)
        if not (ours and (begun or path.name in ("tables", HOLDER))) and not _leftover(path.name):
            strange.append(path.name)
    if strange:
        raise DatasetError(f"{folder} holds other things ({', '.join(sorted(strange)[:3])}); choose another folder")
    for path in (
        inner for name in (SAMPLE, VECTORS_FOLDER) for inner in (folder / name).glob("*") if inner.is_symlink()
    ):
        raise DatasetError(f"{path} is a link, which a capture does not make; choose another folder")


def _old(path: Path) -> bool:
    """What earlier versions kept while a capture was under way; reading progress.json will say so."""
    return path.is_dir() and (path.name == "shards" or path.name.startswith("moments-"))


def _leftover(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def read_manifest(source: Path) -> dict[str, Any]:
    """The manifest of a finished run, or of one under way, checked."""
    try:
        said = json.loads(read_text(source))
        manifest = dict(said["manifest"]) if source.name == PROGRESS else dict(said)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"{source} cannot be read ({error!r}); choose another folder") from None
    if "shards_done" in said:
        raise DatasetError(f"{source} was written by an earlier version of qkscope; choose another folder")
    wrong = f"format {manifest.get('format')}" if manifest.get("format") != FORMAT else problem(manifest)
    if wrong:
        raise DatasetError(f"{source} is no manifest of a capture ({wrong}); choose another folder")
    return manifest


def refuse_difference(
    folder: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    way_out: str = "choose another folder, or --no-resume to begin again",
) -> None:
    """Raise an error that shows what differs between two manifests, if anything does."""
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = "; ".join(_difference(key, before.get(key), now.get(key)) for key in different)
        raise DatasetError(f"{folder} holds a run of other settings ({shown}); {way_out}")


def _as_json(value: object) -> bytes:
    """As run.json is written."""
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _difference(key: str, before: object, now: object) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        inner = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
        return ", ".join(_difference(f"{key}.{k}", before.get(k), now.get(k)) for k in inner[:5])
    shown = [text if len(text := json.dumps(value)) < 80 else text[:77] + "..." for value in (before, now)]
    return f"{key}: {shown[0]} there, {shown[1]} now"
