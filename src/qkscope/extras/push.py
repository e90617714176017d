"""A run or results to the Hub: without names of documents and paths, with a card, as one state that can be verified."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from qkscope._version import __version__
from qkscope.engine import Place
from qkscope.errors import HubError
from qkscope.extras.hubcard import CARD_FILE, PICTURE_FILE, CardFacts, card_text, picture
from qkscope.extras.pushoptions import PushOptions
from qkscope.files.checksums import CHECKSUMS, checksums_bytes, compare, recorded_digests
from qkscope.files.hub import Located
from qkscope.files.hubmark import HUB_MARK, HubMark, MarkedFile
from qkscope.files.hubupload import Branch, Upload, check_repository_name, create, existing, send, signed_in
from qkscope.files.inprogress import json_bytes
from qkscope.files.publicnames import public_manifest, public_summary
from qkscope.files.pushed import find_pushed
from qkscope.files.readers import parquet_file, read_json
from qkscope.files.runfolder import MANIFEST, MOMENTS, PROGRESS, RunFolder
from qkscope.files.vectors import DATA_FILE
from qkscope.pipeline.analyze import OnDone, analyze, write_results
from qkscope.pipeline.job import Job
from qkscope.results.folder import result_files
from qkscope.results.reader import is_results, read_folder
from qkscope.results.summary import SUMMARY
from qkscope.runs.run import open_run
from qkscope.study.study import Entry, build

RUN_TABLES = "tables"
"""The folder of a run that may hold its tables, and that a pushed run has."""


@dataclass(frozen=True)
class _Content:
    """What is to be sent, but for tables and card."""

    kind: Literal["run", "results"]
    identity: str
    about: str
    uploads: list[Upload]
    measured: list[tuple[str, str]]


def push(
    source: str | os.PathLike[str],
    repo: str,
    options: PushOptions | None = None,
    *,
    workers: int | None = 1,
    on_heads: OnDone | None = None,
) -> str:
    """Send the folder of a run, or a results folder, to ``owner/name`` on the Hub; returns where it is.

    A run without tables is analysed first; ``on_heads`` is told how far that is. No text, token or path, and no name of
    a document, is sent unless ``options`` say so; docs/hub.md has the list. An interrupted push resumes when it is
    called again.
    """
    folder, chosen = Path(source), options or PushOptions()
    check_repository_name(repo, chosen.revision)
    kind = _kind(folder)
    signed_in(repo)
    content = _run_content(folder, chosen) if kind == "run" else _results_content(folder)
    branch = existing(repo, chosen.revision)
    if branch is not None and not chosen.overwrite:
        _check_replaceable(branch, content)
    with _tables(folder, kind, workers, on_heads) as tables:
        prefix = f"{RUN_TABLES}/" if kind == "run" else ""
        uploads = [*content.uploads, *_table_uploads(tables, prefix)]
        uploads += _card(content, tables, prefix, repo, chosen)
        files = {upload.name: MarkedFile(sha256=upload.sha256, size=upload.size) for upload in uploads}
        mark = HubMark(kind=kind, qkscope=__version__, about=content.about, identity=content.identity, files=files)
        branch = branch or create(repo, chosen.revision, private=not chosen.public)
        send(branch, [Upload.of(HUB_MARK, mark.content), *uploads], content.about)
    return _address(repo, chosen.revision)


def _kind(folder: Path) -> Literal["run", "results"]:
    if (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file():
        return "run"
    if folder.is_dir() and is_results(folder):
        return "results"
    raise HubError(f"{folder} is neither a captured run nor a results folder; give one of them")


def _run_content(folder: Path, options: PushOptions) -> _Content:
    """An intact run whose manifest others may see, with checksums that fit it."""
    run = RunFolder.open(folder)
    problems, digests = compare(folder), recorded_digests(folder)
    if digests is None:
        raise HubError(f"{folder} has no {CHECKSUMS}, so nobody could tell whether it is intact; capture the run again")
    if problems:
        raise HubError(f"{folder} is not intact ({problems[0]}); see qkscope verify {folder}")
    if not options.with_tokens:
        _refuse_token_text(folder, [name for name in digests if name.endswith(f"/{DATA_FILE}")])
    manifest = public_manifest(run.manifest, names=options.with_names, digest=digests[MANIFEST])
    first = (folder / MANIFEST).read_bytes() if manifest is run.manifest else json_bytes(manifest)
    changed = Upload.of(MANIFEST, first)
    uploads = [changed, Upload.of(CHECKSUMS, checksums_bytes(digests | {MANIFEST: changed.sha256}))]
    uploads += [Upload.of(name, folder / name, known) for name, known in digests.items() if name != MANIFEST]
    measured = _measured(manifest)
    about = f"run of {measured[0][1]}, window {run.manifest['window']:,}, {len(run.manifest['documents'])} documents"
    moments = "".join(f"{name} {known}\n" for name, known in sorted(digests.items()) if name.startswith(MOMENTS))
    return _Content("run", hashlib.sha256(moments.encode()).hexdigest(), about, uploads, measured)


def _results_content(folder: Path) -> _Content:
    models = read_folder(folder).models
    more = f" and {len(models) - 3} more" if len(models) > 3 else ""
    measured = [("models", ", ".join(models))]
    return _Content("results", json.dumps(sorted(models)), f"tables of {', '.join(models[:3])}{more}", [], measured)


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
        ("first positions left out", str(options.get("skip_first", ""))),
        ("corpus", f"SHA-256 {manifest['corpus']}"),
    ]
    return [(name, str(value)) for name, value in rows if value]


def _refuse_token_text(folder: Path, names: list[str]) -> None:
    for name in names:
        with parquet_file(folder / name) as file:
            if "token_str" in file.schema_arrow.names and _any_text(file):
                raise HubError(
                    f"{folder / name} holds the text of tokens; add --with-tokens to send it, or capture the run again"
                )


def _any_text(file: pq.ParquetFile) -> bool:
    return any(batch[0].null_count < len(batch) for batch in file.iter_batches(columns=["token_str"]))


def _check_replaceable(branch: Branch, content: _Content) -> None:
    """Raise an error if a branch holds something other than an earlier state of this."""
    if not branch.names:
        return
    where = f"{branch.repo} at {branch.revision}"
    found = find_pushed(Located(branch.files))
    if found is None:
        raise HubError(
            f"{where} holds files that qkscope did not push ({min(branch.names)} …); choose another name, or "
            "--overwrite to replace them"
        )
    same = found.mark.kind == content.kind and (
        found.mark.identity == content.identity
        if content.kind == "run"
        else set(json.loads(found.mark.identity)) <= set(json.loads(content.identity))
    )
    if not same:
        raise HubError(
            f"{where} holds something else ({found.mark.about}); push to another --revision or name, or --overwrite it"
        )


@contextmanager
def _tables(folder: Path, kind: str, workers: int | None, on_heads: OnDone | None) -> Iterator[Path]:
    """The tables of a run or results; those of a run are computed if it has none."""
    own = folder / RUN_TABLES if kind == "run" else folder
    if own.is_dir() and is_results(own):
        yield own
        return
    with tempfile.TemporaryDirectory(prefix="qkscope-") as temporary:
        started = time.monotonic()
        job = Job(open_run(folder), config={"command": "analyze"})
        outcomes = analyze([job], place=Place(workers), strict=True, on_done=on_heads)
        write_results(Path(temporary), outcomes, wall_seconds=time.monotonic() - started)
        yield Path(temporary)


def _table_uploads(tables: Path, prefix: str) -> list[Upload]:
    uploads = [Upload.of(f"{prefix}{name}", tables / name) for name in result_files(tables) if name != SUMMARY]
    if (tables / SUMMARY).is_file():
        text = json.dumps(public_summary(read_json(tables / SUMMARY)), indent=2, ensure_ascii=False, allow_nan=False)
        uploads.append(Upload.of(f"{prefix}{SUMMARY}", f"{text}\n".encode()))
    return uploads


def _card(content: _Content, tables: Path, prefix: str, repo: str, options: PushOptions) -> list[Upload]:
    """README.md and, if there are numbers to map, its picture."""
    study = build([Entry(tables)])
    names = [name for name in result_files(tables) if name.endswith(".parquet")]
    n_rows = sum(pq.read_metadata(tables / name).num_rows for name in names)
    measured = [*content.measured, *_counts(study, content.kind)]
    by_table = {name.removesuffix(".parquet"): f"{prefix}{name}" for name in names}
    drawn = picture(study)
    facts = CardFacts(
        repo, options.revision, content.kind, options.license, measured, by_table, n_rows, options.with_names
    )
    text = card_text(facts, study, pictured=drawn is not None)
    pictures = [] if drawn is None else [Upload.of(PICTURE_FILE, drawn)]
    return [Upload.of(CARD_FILE, text.encode()), *pictures]


def _counts(study: Any, kind: str) -> list[tuple[str, str]]:
    """For results, windows and tokens of each run, as far as they are known."""
    if kind == "run":
        return []
    rows = []
    for run in study.runs[:20]:
        known = [
            f"{count:,} {what}"
            for count, what in (
                (run.window, "tokens of window"),
                (run.n_documents, "documents"),
                (run.n_tokens, "tokens"),
            )
            if count
        ]
        rows.append((run.label, ", ".join(known) or "–"))
    return rows


def _address(repo: str, revision: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/datasets/{repo}" + ("" if revision == "main" else f"/tree/{revision}")
