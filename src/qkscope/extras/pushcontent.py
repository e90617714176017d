"""What of a run or of results is pushed: an intact run whose manifest others may see, tables, a public summary."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.errors import HubError
from qkscope.extras.pushoptions import PushOptions
from qkscope.files.checksums import CHECKSUMS, checksums_bytes, compare, recorded_digests
from qkscope.files.hubmark import HubMark
from qkscope.files.hubupload import Upload
from qkscope.files.inprogress import json_bytes
from qkscope.files.publicnames import public_manifest, public_summary
from qkscope.files.readers import parquet_file, read_json
from qkscope.files.runfolder import MANIFEST, MOMENTS, RunFolder
from qkscope.files.vectors import DATA_FILE
from qkscope.results.folder import result_files
from qkscope.results.reader import read_folder
from qkscope.results.summary import SUMMARY

_MOST_LISTED = 20
"""Models that a card lists."""


@dataclass(frozen=True)
class Content:
    """What is sent, but for tables and card."""

    mark: HubMark
    """Without its files."""
    title: str
    measured: list[tuple[str, str]]
    """How it was measured, for the card."""
    uploads: list[Upload]
    tokens: bool = False
    """Whether the text of tokens is stored beside vectors."""


def run_content(folder: Path, options: PushOptions) -> Content:
    """A run's own files; its manifest as others may see it, and checksums that fit."""
    run = RunFolder.open(folder)
    problems, digests = compare(folder), recorded_digests(folder)
    if digests is None:
        raise HubError(f"{folder} has no {CHECKSUMS}, so nobody could tell whether it is intact; capture the run again")
    if problems:
        raise HubError(f"{folder} is not intact: {problems[0]}")
    with_text = next((name for name in digests if name.endswith(f"/{DATA_FILE}") and _has_text(folder / name)), None)
    if with_text is not None and not options.with_tokens:
        raise HubError(
            f"{folder / with_text} holds the text of tokens; add --with-tokens to send it, or capture the run again"
        )
    manifest = public_manifest(run.manifest, names=options.with_names, digest=digests[MANIFEST])
    unchanged = manifest is run.manifest
    first = Upload.of(MANIFEST, (folder / MANIFEST).read_bytes() if unchanged else json_bytes(manifest))
    uploads = [first, Upload.of(CHECKSUMS, checksums_bytes(digests | {MANIFEST: first.sha256}))]
    uploads += [Upload.of(name, folder / name, known) for name, known in digests.items() if name != MANIFEST]
    measured = _measured(manifest)
    title = str(manifest["model"].get("id") or folder.absolute().name)
    about = f"run of {title}, window {manifest['window']:,}, {len(manifest['documents']):,} documents"
    moments = "".join(f"{name} {known}\n" for name, known in sorted(digests.items()) if name.startswith(MOMENTS))
    identity = hashlib.sha256(moments.encode()).hexdigest()
    mark = HubMark(kind="run", qkscope=__version__, about=about, identity=identity, files={})
    return Content(mark, title, measured, uploads, tokens=with_text is not None)


def _measured(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """What a card says of a capture."""
    model, options = manifest["model"], manifest["options"]
    rows = [
        ("model", model.get("id")),
        ("revision", model.get("revision") or model.get("commit")),
        ("class", model.get("class")),
        ("precision", model.get("dtype")),
        ("parameters", f"{model['parameters']:,}" if isinstance(model.get("parameters"), int) else None),
        ("vectors", "before rotary encoding" if manifest["stage"] == "pre-rope" else "after rotary encoding"),
        ("window", f"{manifest['window']:,} tokens"),
        ("documents", f"{len(manifest['documents']):,}"),
        ("tokens", f"{sum(document['tokens'] for document in manifest['documents']):,}"),
        ("first positions left out", options.get("skip_first")),
        ("corpus", f"SHA-256 {manifest['corpus']}"),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def _has_text(path: Path) -> bool:
    """Whether vectors have the text of their tokens beside them."""
    with parquet_file(path) as file:
        if "token_str" not in file.schema_arrow.names:
            return False
        return any(batch[0].null_count < len(batch) for batch in file.iter_batches(columns=["token_str"]))


def results_content(folder: Path) -> Content:
    """What results are about; all their files are tables, or the summary."""
    results = read_folder(folder)
    models = results.models
    title = models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more"
    summary = public_summary(results.summary)
    measured = [(model, _origin(summary.get(model))) for model in models[:_MOST_LISTED]]
    mark = HubMark(kind="results", qkscope=__version__, about=f"tables of {title}", models=sorted(models), files={})
    return Content(mark, title, measured, [])


def _origin(entry: Any) -> str:
    """What the summary of a model says it was computed from."""
    summary: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dataset = summary.get("dataset")
    source: dict[str, Any] = dataset if isinstance(dataset, dict) else {}
    counts = {what: summary.get(f"n_{what}") for what in ("documents", "tokens")}
    known = [
        f"captured from {source.get('model')}" if source.get("kind") == "run" else "",
        f"vectors of {source.get('repo')}" if source.get("kind") == "hub" else "",
        *(f"{count:,} {what}" for what, count in counts.items() if isinstance(count, int)),
    ]
    return ", ".join(part for part in known if part) or "–"


def table_uploads(tables: Path, prefix: str) -> list[Upload]:
    """The tables of a folder, and its summary as others may see it."""
    uploads = [Upload.of(f"{prefix}{name}", tables / name) for name in result_files(tables) if name != SUMMARY]
    if (tables / SUMMARY).is_file():
        text = json.dumps(public_summary(read_json(tables / SUMMARY)), indent=2, ensure_ascii=False, allow_nan=False)
        uploads.append(Upload.of(f"{prefix}{SUMMARY}", f"{text}\n".encode()))
    return uploads
