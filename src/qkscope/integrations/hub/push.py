"""Push a run or results to the Hub: with a card and checksums, without paths and names of documents."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from qkscope._version import __version__
from qkscope.config import StudyRunConfig
from qkscope.engine import ExecutionTarget
from qkscope.errors import HubError
from qkscope.files.checksums import CHECKSUMS, checksums_bytes, compare, recorded_digests, run_digest
from qkscope.files.hub import Located
from qkscope.files.inprogress import json_bytes
from qkscope.files.manifest import RunManifest
from qkscope.files.publicnames import public_manifest, public_summary
from qkscope.files.pushed import HUB_MARK, HubMark, MarkedFile, find_pushed
from qkscope.files.readers import read_frame, read_json
from qkscope.files.runfolder import MANIFEST, PASSAGE_ENTRY, PASSAGE_FILE, PROGRESS, RunFolder, is_bundled
from qkscope.files.vectors import DATA_FILE, has_token_texts, write_without_texts
from qkscope.integrations.hub import PushOptions
from qkscope.integrations.hub.card import CARD_FILE, PICTURE_FILE, CardFacts, card_text, picture
from qkscope.integrations.hub.upload import Branch, Upload, check_repository_name, create, existing, send, signed_in
from qkscope.options import check_options, check_path
from qkscope.results.analyze import OnDone, analyze, write_results
from qkscope.results.folder import result_files
from qkscope.results.frames import frame_bytes
from qkscope.results.job import Job
from qkscope.results.reader import TABLES_FOLDER, is_results, read_folder
from qkscope.results.side import PASSAGES, POINTS, TOKEN
from qkscope.results.study import build
from qkscope.results.summary import SUMMARY
from qkscope.runs.run import open_run

_MOST_LISTED = 20
"""Largest number of models that a card lists."""


@dataclass(frozen=True)
class Content:
    """The content of a push, except tables and card."""

    mark: HubMark
    """The mark of the repository, without its files."""
    title: str
    measured: list[tuple[str, str]]
    """The measurement as (name, value) rows, for the card."""
    uploads: list[Upload]
    tokens: bool = False
    """True if the text of tokens is stored with vectors."""


def run_content(folder: Path, options: PushOptions, scratch: Path) -> Content:
    """The files of a run: with a public manifest, vectors without the text of tokens, and matching checksums.

    Changed files are written to ``scratch`` first.
    """
    run = RunFolder.open(folder)
    problems, digests = compare(folder), recorded_digests(folder)
    if digests is None:
        raise HubError(f"{folder} has no {CHECKSUMS}, so it cannot be verified; capture the run again")
    if problems:
        raise HubError(f"{folder} is not intact: {problems[0]}")
    with_texts = [name for name in digests if name.endswith(f"/{DATA_FILE}") and has_token_texts(folder / name)]
    stripped = [] if options.with_tokens else with_texts
    for name in stripped:
        write_without_texts(folder / name, scratch / name)
    passage = run.manifest.passage
    is_private = passage is not None and not options.with_tokens and not is_bundled(passage.tokens)
    raw = {key: value for key, value in run.raw.items() if key != PASSAGE_ENTRY} if is_private else run.raw
    digests = {name: value for name, value in digests.items() if name != PASSAGE_FILE} if is_private else digests
    further = ["text of tokens"] * bool(stripped) + ["a passage of one's own"] * is_private
    manifest = public_manifest(raw, names=options.with_names, digest=digests[MANIFEST], further=further)
    is_unchanged = manifest is run.raw
    run_json = Upload.of(MANIFEST, (folder / MANIFEST).read_bytes() if is_unchanged else json_bytes(manifest))
    uploads = [run_json, *(Upload.of(name, scratch / name) for name in stripped)]
    sent_digests = digests | {upload.name: upload.sha256 for upload in uploads}
    unchanged = digests.keys() - {upload.name for upload in uploads}
    uploads += [Upload.of(name, folder / name, digests[name]) for name in sorted(unchanged)]
    uploads.append(Upload.of(CHECKSUMS, checksums_bytes(sent_digests)))
    public = RunManifest.model_validate(manifest)
    measured, title = _measured(public), str(public.model.id or folder.absolute().name)
    about = f"run of {title}, window {public.window:,}, {len(public.documents):,} documents"
    mark = HubMark(kind="run", qkscope=__version__, about=about, identity=run_digest(digests), files={})
    return Content(mark, title, measured, uploads, tokens=bool(with_texts) and options.with_tokens)


def _measured(manifest: RunManifest) -> list[tuple[str, str]]:
    """The (name, value) rows about a capture, for the card."""
    model = manifest.model
    rows = [
        ("model", model.id),
        ("revision", model.revision or model.commit),
        ("class", model.type),
        ("precision", model.dtype),
        ("parameters", f"{model.parameters:,}" if isinstance(model.parameters, int) else None),
        ("vectors", "after rotary encoding" if manifest.rotated else "before rotary encoding"),
        ("window", f"{manifest.window:,} tokens"),
        ("documents", f"{len(manifest.documents):,}"),
        ("tokens", f"{sum(document.tokens for document in manifest.documents):,}"),
        ("first positions left out", manifest.options.skip_first),
        ("corpus", f"SHA-256 {manifest.corpus}"),
    ]
    return [(name, str(value)) for name, value in rows if value is not None]


def results_content(folder: Path) -> Content:
    """The content of a results folder; all its files are tables or the summary."""
    results = read_folder(folder)
    models = results.models
    title = models[0] if len(models) == 1 else f"{models[0]} and {len(models) - 1} more"
    summary = public_summary(results.summary)
    measured = [(model, _origin(summary.get(model))) for model in models[:_MOST_LISTED]]
    mark = HubMark(kind="results", qkscope=__version__, about=f"tables of {title}", models=sorted(models), files={})
    return Content(mark, title, measured, [])


def _origin(entry: Any) -> str:
    """The source of a model's results, according to its summary."""
    summary: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dataset = summary.get("dataset")
    source: dict[str, Any] = dataset if isinstance(dataset, dict) else {}
    counts = {name: summary.get(f"n_{name}") for name in ("documents", "tokens")}
    parts = [
        f"captured from {source.get('model')}" if source.get("kind") == "run" else "",
        f"vectors of {source.get('repo')}" if source.get("kind") == "hub" else "",
        *(f"{count:,} {name}" for name, count in counts.items() if isinstance(count, int)),
    ]
    return ", ".join(part for part in parts if part) or "–"


def table_uploads(tables: Path, prefix: str, *, tokens: bool) -> list[Upload]:
    """The tables of a folder, its points (with token text only if ``tokens``), and a public summary.

    Passages of one's own are sent only if ``tokens``, too.
    """
    names = [name for name in result_files(tables) if name not in (SUMMARY, POINTS.file)]
    if not tokens and not _passages_are_bundled(tables):
        names.remove(PASSAGES.file)
    uploads = [Upload.of(f"{prefix}{name}", tables / name) for name in names]
    if (tables / POINTS.file).is_file():
        frame = read_frame(tables / POINTS.file)
        sent = frame_bytes(frame.drop(columns=TOKEN)) if TOKEN in frame and not tokens else tables / POINTS.file
        uploads.append(Upload.of(f"{prefix}{POINTS.file}", sent))
    if (tables / SUMMARY).is_file():
        text = json.dumps(public_summary(read_json(tables / SUMMARY)), indent=2, ensure_ascii=False, allow_nan=False)
        uploads.append(Upload.of(f"{prefix}{SUMMARY}", f"{text}\n".encode()))
    return uploads


def _passages_are_bundled(tables: Path) -> bool:
    passages = PASSAGES.read(tables)
    if passages is None:
        return True
    texts = passages[["model", "k_token", "text"]].drop_duplicates().sort_values("k_token")
    return all(is_bundled(tokens.tolist()) for _, tokens in texts.groupby("model")["text"])


def push(
    source: str | os.PathLike[str],
    repo: str,
    options: PushOptions | None = None,
    *,
    workers: int | None = 1,
    on_heads: OnDone | None = None,
) -> str:
    """Push the folder of a run, or a results folder, to ``owner/name`` on the Hub; returns its address.

    A run without tables is analysed first, with ``on_heads`` as progress callback. Texts, tokens, paths and names of
    documents are sent only if ``options`` allow it; docs/hub.md has the list. Calling ``push`` again resumes an
    interrupted push.
    """
    check_path(source, "source")
    check_options(options, "options", PushOptions)
    folder, push_options = Path(source), options or PushOptions()
    check_repository_name(repo, push_options.revision)
    kind = _kind(folder)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qkscope-")))
        content = run_content(folder, push_options, scratch) if kind == "run" else results_content(folder)
        signed_in(repo)
        branch = existing(repo, push_options.revision)
        if branch is not None and not push_options.overwrite:
            _check_replaceable(branch, content.mark)
        tables = stack.enter_context(_tables(folder, kind, workers, on_heads))
        prefix = f"{TABLES_FOLDER}/" if kind == "run" else ""
        uploads = [*content.uploads, *table_uploads(tables, prefix, tokens=push_options.with_tokens)]
        uploads += _card(content, tables, prefix, repo, push_options)
        files = {upload.name: MarkedFile(sha256=upload.sha256, size=upload.size) for upload in uploads}
        mark = content.mark.model_copy(update={"files": files})
        branch = branch or create(repo, push_options.revision, private=not push_options.public)
        send(branch, [Upload.of(HUB_MARK, mark.content), *uploads], mark.about)
    return _address(repo, push_options.revision)


def _kind(folder: Path) -> Literal["run", "results"]:
    if (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file():
        return "run"
    if folder.is_dir() and is_results(folder):
        return "results"
    raise HubError(f"{folder} is neither a captured run nor a results folder; give one of them")


def _check_replaceable(branch: Branch, mark: HubMark) -> None:
    """Raise an error if a branch contains anything but an earlier state of the same content."""
    if not branch.names:
        return
    location = f"{branch.repo} at {branch.revision}"
    pushed = find_pushed(Located(branch.files))
    if pushed is None:
        raise HubError(
            f"{location} holds files that qkscope did not push ({min(branch.names)} …); choose another name, or "
            "--overwrite to replace them"
        )
    if not mark.succeeds(pushed.mark):
        raise HubError(
            f"{location} holds something else ({pushed.mark.about}); push to another --revision or name, or "
            "--overwrite it"
        )


@contextmanager
def _tables(folder: Path, kind: str, workers: int | None, on_heads: OnDone | None) -> Iterator[Path]:
    """The tables of a run or results; those of a run are computed if it has none."""
    existing_tables = folder / TABLES_FOLDER if kind == "run" else folder
    if existing_tables.is_dir() and is_results(existing_tables):
        yield existing_tables
        return
    with tempfile.TemporaryDirectory(prefix="qkscope-") as temporary:
        job = Job.from_options(open_run(folder), "analyze")
        results = analyze([job], target=ExecutionTarget(workers), strict=True, on_done=on_heads)
        write_results(Path(temporary), results, wall_seconds=0.0)
        yield Path(temporary)


def _card(content: Content, tables: Path, prefix: str, repo: str, options: PushOptions) -> list[Upload]:
    """README.md and, if there are numbers to map, a picture."""
    study = build([StudyRunConfig(path=str(tables))])
    names = [name for name in result_files(tables) if name.endswith(".parquet")]
    picture_bytes = picture(study)
    facts = CardFacts(
        title=content.title,
        repo=repo,
        revision=options.revision,
        kind=content.mark.kind,
        license=options.license,
        measured=content.measured,
        tables={name.removesuffix(".parquet"): f"{prefix}{name}" for name in names},
        n_rows=sum(pq.read_metadata(tables / name).num_rows for name in names),
        names=options.with_names,
        tokens=content.tokens,
    )
    text = card_text(facts, study, pictured=picture_bytes is not None)
    pictures = [] if picture_bytes is None else [Upload.of(PICTURE_FILE, picture_bytes)]
    return [Upload.of(CARD_FILE, text.encode()), *pictures]


def _address(repo: str, revision: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/datasets/{repo}" + ("" if revision == "main" else f"/tree/{revision}")
