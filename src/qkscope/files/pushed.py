"""Find, download and check a run or results that qkscope pushed to the Hub, against their list of digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from qkscope.errors import DatasetError
from qkscope.files.checksums import CHECKSUMS, digest
from qkscope.files.hub import Files, LocalFiles, Located
from qkscope.files.readers import read_text
from qkscope.files.runfolder import MANIFEST, MOMENTS, PASSAGE_FILE, SAMPLE
from qkscope.progress import progress

HUB_MARK = "qkscope.json"
_Name = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""A relative path without .. and without hidden names."""


class MarkedFile(BaseModel):
    """One file of a repository."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, strict=True)]


class HubMark(BaseModel):
    """The content of qkscope.json: kind and files of a repository."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    kind: Literal["run", "results"]
    qkscope: str
    """Version of qkscope that pushed it."""
    about: str
    """A short description for readers."""
    identity: str = ""
    """For a run: the digest of its moments, which does not depend on removed files or on tables."""
    models: list[str] = []
    """For results: their models."""
    files: dict[_Name, MarkedFile]
    """All files of the repository except this one."""

    @property
    def content(self) -> bytes:
        """The bytes of the file."""
        return (json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()

    def succeeds(self, other: HubMark) -> bool:
        """True if this is a later state of ``other``: the same run, or results of the same models and more."""
        same_run = self.identity == other.identity and set(self.models) >= set(other.models)
        return self.kind == other.kind and same_run

    def missing(self, names: Collection[str]) -> list[str]:
        """Listed files that are not among ``names``."""
        present = set(names)
        return [name for name in self.files if name not in present]


def read_mark(path: Path, where: str) -> HubMark:
    """Read and check the qkscope.json of the repository ``where``; a ``DatasetError`` says what is wrong."""
    try:
        mark = HubMark.model_validate_json(read_text(path))
    except (OSError, ValueError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
        raise DatasetError(f"{HUB_MARK} of {where} cannot be used ({problem}); push it again") from None
    if mark.kind == "run" and MANIFEST not in mark.files:
        raise DatasetError(f"{HUB_MARK} of {where} lists a run without its {MANIFEST}; push it again")
    return mark


_AT_ONCE = 8
"""Number of parallel downloads."""


@dataclass(frozen=True)
class Pushed:
    """A run or results on the Hub, or in its cache."""

    files: Files
    mark: HubMark

    def check_finished(self) -> None:
        """Raise an error if the push was interrupted."""
        missing = self.mark.missing(self.files.names())
        if missing:
            raise DatasetError(
                f"the push of {self.files} is unfinished: {len(missing)} of {len(self.mark.files)} files are missing "
                f"({missing[0]} …); rerun the push to resume"
            )

    def run_folder(self) -> Path:
        """Download the run into huggingface_hub's cache, without tables and saved vectors; returns its folder."""
        if self.mark.kind != "run":
            raise DatasetError(
                f"{self.files} holds tables ({self.mark.about}), not a run; fetch them with qkscope pull, or read them "
                "with datasets.load_dataset"
            )
        self.check_finished()
        run_files = (MANIFEST, CHECKSUMS, PASSAGE_FILE)
        names = [
            name for name in self.mark.files if name in run_files or name.startswith((f"{MOMENTS}/", f"{SAMPLE}/"))
        ]
        self.download(names, self._cached)
        return self.files.path(MANIFEST).parent

    def download(self, names: Sequence[str], fetch: Callable[[str], Path]) -> None:
        """Fetch files and compare each with its digest; a file that differs is removed, so that a rerun fetches it."""
        total, fetched = sum(self.mark.files[name].size for name in names), 0
        with progress("fetching", "B", delay=2.0) as on_progress:
            threads = ThreadPoolExecutor(_AT_ONCE)
            try:
                tasks = {threads.submit(self._checked, name, fetch): name for name in names}
                for task in as_completed(tasks):
                    task.result()
                    fetched += self.mark.files[tasks[task]].size
                    on_progress(fetched, total)
            finally:
                threads.shutdown(cancel_futures=True)

    def _checked(self, name: str, fetch: Callable[[str], Path]) -> None:
        path = fetch(name)
        if digest(path) == self.mark.files[name].sha256:
            return
        for copy in {path.resolve(), path}:  # in the cache, the path is a link
            copy.unlink(missing_ok=True)
        raise DatasetError(
            f"{name} of {self.files} differs from its checksum and was removed; rerun the same command to fetch it "
            "again, or push it again if that does not help"
        )

    def _cached(self, name: str) -> Path:
        path = self.files.path(name)
        if not path.is_file():
            raise DatasetError(f"HF_HUB_OFFLINE is set and {name} of this run is not in the cache; unset it")
        return path


def find_pushed(located: Located) -> Pushed | None:
    """The run or results pushed to this location, or pulled from it; None if there are none."""
    files = located.files
    has_mark = (files.folder / HUB_MARK).is_file() if isinstance(files, LocalFiles) else HUB_MARK in files.names()
    if located.prefix or not has_mark:
        return None
    return Pushed(files, read_mark(files.path(HUB_MARK), str(files)))
