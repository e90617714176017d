"""qkscope.json, by which a repository on the Hub is known as one of ours: what it holds, and the SHA-256 of each file.

It is sent with the first commit of a push, so a push that was interrupted is known as such: files that it lists are
missing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from qkscope.errors import DatasetError
from qkscope.files.readers import read_text
from qkscope.files.runfolder import MANIFEST

HUB_MARK = "qkscope.json"
_Name = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
"""A relative path that leaves no folder and is not hidden."""


class MarkedFile(BaseModel):
    """One file of a repository."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0, strict=True)]


class HubMark(BaseModel):
    """What a repository holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal[1] = 1
    kind: Literal["run", "results"]
    qkscope: str
    """Version that pushed it."""
    about: str
    """What it is, for people."""
    identity: str = ""
    """Of a run: the digest of its moments, which is the same whatever is left out and whatever tables there are."""
    models: list[str] = []
    """Of results: the models they are about."""
    files: dict[_Name, MarkedFile]
    """Every file of the repository but this one."""

    @property
    def content(self) -> bytes:
        """The file."""
        return (json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()

    def succeeds(self, other: HubMark) -> bool:
        """Whether this is a later state of the same: the same run, or results about the same models and more."""
        same_run = self.identity == other.identity and set(self.models) >= set(other.models)
        return self.kind == other.kind and same_run

    def missing(self, names: Collection[str]) -> list[str]:
        """Files that are listed but not among these."""
        present = set(names)
        return [name for name in self.files if name not in present]


def read_mark(path: Path, where: str) -> HubMark:
    """Read and check it; a ``DatasetError`` says what is wrong with that of the repository ``where``."""
    try:
        mark = HubMark.model_validate_json(read_text(path))
    except (OSError, ValueError, ValidationError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else " ".join(str(error).split())[:200]
        raise DatasetError(f"{HUB_MARK} of {where} cannot be used ({problem}); push it again") from None
    if mark.kind == "run" and MANIFEST not in mark.files:
        raise DatasetError(f"{HUB_MARK} of {where} lists a run without its {MANIFEST}; push it again")
    return mark
