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
"""Files that are read from a folder; others, such as an array in .json, are read if they are named."""
CHAT = "messages"
"""The field of a conversation, which the tokenizer's chat template turns into one text."""
Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Document:
    """A text and its name."""

    name: str
    text: str
    chat: Messages | None = None
    """A conversation; ``text`` then identifies it."""

    @property
    def digest(self) -> str:
        """Digest that identifies the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def read_documents(locations: list[str], field: str = "text", limit: int | None = None) -> list[Document]:
    """Read the documents at these locations, in order: files, folders, globs or ``hf://datasets/…`` URLs."""
    documents: list[Document] = []
    for location in locations:
        for document in _documents_at(location, field):
            if limit is not None and len(documents) >= limit:
                return documents
            if document.text.strip():
                documents.append(document)
    if not documents:
        raise CaptureError(f"no text found at {', '.join(locations)}; expected {', '.join(SUFFIXES)} files")
    return documents


def _documents_at(location: str, field: str) -> Iterator[Document]:
    if location.startswith("hf://"):
        located = locate(location)
        names = [n for n in located.files.names() if n.startswith(located.prefix) and n.endswith(SUFFIXES)]
        for name in names:
            yield from _documents_in(located.files.path(name), name, field)
        return
    for path in _paths(location):
        # A name that is not UTF-8 cannot be written into a manifest.
        yield from _documents_in(path, os.fsencode(path.name).decode("utf-8", "replace"), field)


def _paths(location: str) -> list[Path]:
    path = Path(location)
    if not location:
        raise CaptureError("--texts is empty; give a file, a folder, a glob or an hf:// URL")
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    matches = sorted(Path(file) for file in glob.glob(location, recursive=True))  # noqa: PTH207
    if not matches:
        raise CaptureError(f"{location} matches no file, folder or glob")
    return [file for file in matches if file.is_file()]


def _documents_in(path: Path, name: str, field: str) -> Iterator[Document]:
    try:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, name, field)
        elif path.suffix == ".json":
            yield from _json_array(path, name, field)
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
                yield _document(f"{name}:{number}", value, f"{path}, row {number}", field)


def _text(value: object, where: str) -> str:
    """Return the value if it is valid text; otherwise raise an error."""
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
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):
                    raise CaptureError(f"{where}: expected a JSON object with a field {field!r}") from None
                yield from _entry(f"{name}:{number}", entry, where, field)


def _json_array(path: Path, name: str, field: str) -> Iterator[Document]:
    """Texts, or objects with a field of text, in one array."""
    try:
        entries = json.loads(read_text(path))
    except RecursionError:
        entries = None
    if not isinstance(entries, list):
        raise CaptureError(f"{path}: expected a JSON array of texts, or of objects with a field {field!r}")
    for number, entry in enumerate(entries):
        value = {field: entry} if isinstance(entry, str) else entry
        yield from _entry(f"{name}:{number}", value, f"{path}, entry {number}", field)


def _entry(name: str, entry: object, where: str, field: str) -> Iterator[Document]:
    """The document of a JSON object: its text or, where it has none, its conversation."""
    if not isinstance(entry, dict):
        raise CaptureError(f"{where}: expected a JSON object with a field {field!r}")
    key = CHAT if field not in entry and CHAT in entry else field
    if key not in entry:
        fields = ", ".join(map(repr, list(entry)[:10])) or "none"
        raise CaptureError(f"{where}: expected a JSON object with a field {field!r}, got {fields}; choose with --field")
    if entry[key] is not None:
        yield _document(name, entry[key], where, key)


def _document(name: str, value: object, where: str, field: str) -> Document:
    """A text, or a conversation in the field that holds them."""
    if field != CHAT or isinstance(value, str):
        return Document(name, _text(value, where))
    messages = value if isinstance(value, list) else []
    for message in messages or [None]:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise CaptureError(f"{where}: expected messages, each with a role and a content that are text")
    chat = tuple({"role": message["role"], "content": message["content"]} for message in messages)
    return Document(name, _text(json.dumps(chat), where), chat)
