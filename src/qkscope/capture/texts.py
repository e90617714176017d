"""Documents from files, folders, globs, JSON lines, parquet columns or files of a Hub dataset; never concatenated."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from qkscope.errors import CaptureError
from qkscope.files.hub import locate
from qkscope.files.readers import parquet_file, read_text

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Document:
    """A text and its name."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        """Identifies the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def read_documents(places: list[str], field: str = "text", limit: int | None = None) -> list[Document]:
    """The documents at these places, in order: files, folders, globs or ``hf://datasets/…`` URLs."""
    documents: list[Document] = []
    for place in places:
        for document in _at(place, field):
            if limit is not None and len(documents) >= limit:
                return documents
            if document.text.strip():
                documents.append(document)
    if not documents:
        raise CaptureError(f"no text found at {', '.join(places)}; expected {', '.join(SUFFIXES)} files")
    return documents


def _at(place: str, field: str) -> Iterator[Document]:
    if place.startswith("hf://"):
        located = locate(place)
        names = [n for n in located.files.names() if n.startswith(located.prefix) and n.endswith(SUFFIXES)]
        for name in names:
            yield from _in_file(located.files.path(name), name, field)
        return
    for path in _paths(place):
        # A name that is not UTF-8 cannot be written into a manifest.
        yield from _in_file(path, os.fsencode(path.name).decode("utf-8", "replace"), field)


def _paths(place: str) -> list[Path]:
    path = Path(place)
    if not place:
        raise CaptureError("--texts is empty; give a file, a folder, a glob or an hf:// URL")
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    matches = sorted(Path(file) for file in glob.glob(place, recursive=True))  # noqa: PTH207
    if not matches:
        raise CaptureError(f"{place} matches no file, folder or glob")
    return [file for file in matches if file.is_file()]


def _in_file(path: Path, name: str, field: str) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, name, field)
        elif path.suffix == ".parquet":
            yield from _parquet(path, name, field)
        else:
            yield Document(name, read_text(path))
    except UnicodeDecodeError as error:
        problem = "is not UTF-8 text; convert it" if path.suffix != ".parquet" else f"cannot be read ({error})"
        raise CaptureError(f"{path} {problem}, or leave it out") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CaptureError(f"{path} cannot be read ({' '.join(str(error).split())[:200]}); leave it out") from None


def _parquet(path: Path, name: str, field: str) -> Iterator[Document]:
    with parquet_file(path) as file:
        if file.schema_arrow.names.count(field) != 1:
            names = ", ".join(file.schema_arrow.names[:10])
            raise CaptureError(f"{path}: expected one column {field!r}, got {names}; choose a column with --field")
        values = (value for batch in file.iter_batches(256, columns=[field]) for value in batch[0].to_pylist())
        for number, value in enumerate(values):
            if value:
                yield Document(f"{name}:{number}", _text(value, f"{path}, row {number}"))


def _text(value: object, where: str) -> str:
    """The value itself, if it is valid text; otherwise an error."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        raise CaptureError(f"{where}: expected text, got half of a surrogate pair; leave it out") from None
    raise CaptureError(f"{where}: expected text, got {type(value).__name__}; choose the field of the text with --field")


def _json_lines(path: Path, name: str, field: str) -> Iterator[Document]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)[field]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise CaptureError(f"{path}, line {number}: expected a JSON object with a field {field!r}") from None
            if value is not None:
                yield Document(f"{name}:{number}", _text(value, f"{path}, line {number}"))
