"""What of a run or of results is pushed: an intact run whose manifest others may see, tables, a public summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkscope._version import __version__
from qkscope.errors import HubError
from qkscope.extras.pushoptions import PushOptions
from qkscope.files.checksums import CHECKSUMS, checksums_bytes, compare, recorded_digests, run_digest
from qkscope.files.hubmark import HubMark
from qkscope.files.hubupload import Upload
from qkscope.files.inprogress import json_bytes
from qkscope.files.publicnames import public_manifest, public_summary
from qkscope.files.readers import read_frame, read_json
from qkscope.files.runfolder import MANIFEST, RunFolder
from qkscope.files.vectors import DATA_FILE, has_token_texts, write_without_texts
from qkscope.results.folder import result_files
from qkscope.results.points import POINTS_FILE, TOKEN
from qkscope.results.reader import read_folder
from qkscope.results.summary import SUMMARY
from qkscope.results.tables import frame_bytes

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


def run_content(folder: Path, options: PushOptions, scratch: Path) -> Content:
    """A run's own files; its manifest as others may see it, vectors without the text of tokens, checksums that fit.

    What is not sent as it is, is written to ``scratch`` first.
    """
    run = RunFolder.open(folder)
    problems, digests = compare(folder), recorded_digests(folder)
    if digests is None:
        raise HubError(f"{folder} has no {CHECKSUMS}, so nobody could tell whether it is intact; capture the run again")
    if problems:
        raise HubError(f"{folder} is not intact: {problems[0]}")
    texts = [name for name in digests if name.endswith(f"/{DATA_FILE}") and has_token_texts(folder / name)]
    left_out = [] if options.with_tokens else texts
    for name in left_out:
        write_without_texts(folder / name, scratch / name)
    further = ["text of tokens"] if left_out else []
    manifest = public_manifest(run.manifest, names=options.with_names, digest=digests[MANIFEST], further=further)
    unchanged = manifest is run.manifest
    first = Upload.of(MANIFEST, (folder / MANIFEST).read_bytes() if unchanged else json_bytes(manifest))
    uploads = [first, *(Upload.of(name, scratch / name) for name in left_out)]
    known = digests | {upload.name: upload.sha256 for upload in uploads}
    as_they_are = digests.keys() - {upload.name for upload in uploads}
    uploads += [Upload.of(name, folder / name, digests[name]) for name in sorted(as_they_are)]
    uploads.append(Upload.of(CHECKSUMS, checksums_bytes(known)))
    measured = _measured(manifest)
    title = str(manifest["model"].get("id") or folder.absolute().name)
    about = f"run of {title}, window {manifest['window']:,}, {len(manifest['documents']):,} documents"
    mark = HubMark(kind="run", qkscope=__version__, about=about, identity=run_digest(digests), files={})
    return Content(mark, title, measured, uploads, tokens=bool(texts) and options.with_tokens)


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


def table_uploads(tables: Path, prefix: str, *, tokens: bool) -> list[Upload]:
    """The tables of a folder, its points with the text of ``tokens`` or without, a summary that others may see."""
    names = [name for name in result_files(tables) if name not in (SUMMARY, POINTS_FILE)]
    uploads = [Upload.of(f"{prefix}{name}", tables / name) for name in names]
    if (tables / POINTS_FILE).is_file():
        frame = read_frame(tables / POINTS_FILE)
        sent = frame_bytes(frame.drop(columns=TOKEN)) if TOKEN in frame and not tokens else tables / POINTS_FILE
        uploads.append(Upload.of(f"{prefix}{POINTS_FILE}", sent))
    if (tables / SUMMARY).is_file():
        text = json.dumps(public_summary(read_json(tables / SUMMARY)), indent=2, ensure_ascii=False, allow_nan=False)
        uploads.append(Upload.of(f"{prefix}{SUMMARY}", f"{text}\n".encode()))
    return uploads
