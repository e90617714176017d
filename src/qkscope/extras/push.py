"""A run or results to the Hub: without names of documents and paths, with a card, as one state that can be verified."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from qkscope.engine import Place
from qkscope.errors import HubError
from qkscope.extras.hubcard import CARD_FILE, PICTURE_FILE, CardFacts, card_text, picture
from qkscope.extras.pushcontent import Content, results_content, run_content, table_uploads
from qkscope.extras.pushoptions import PushOptions
from qkscope.files.hub import Located
from qkscope.files.hubmark import HUB_MARK, HubMark, MarkedFile
from qkscope.files.hubupload import Branch, Upload, check_repository_name, create, existing, send, signed_in
from qkscope.files.pushed import find_pushed
from qkscope.files.runfolder import MANIFEST, PROGRESS
from qkscope.pipeline.analyze import OnDone, analyze, write_results
from qkscope.pipeline.job import Job
from qkscope.report.gather import RUN_TABLES
from qkscope.results.folder import result_files
from qkscope.results.reader import is_results
from qkscope.runs.run import open_run
from qkscope.study.study import Entry, build


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
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qkscope-")))
        content = run_content(folder, chosen, scratch) if kind == "run" else results_content(folder)
        signed_in(repo)
        branch = existing(repo, chosen.revision)
        if branch is not None and not chosen.overwrite:
            _check_replaceable(branch, content.mark)
        tables = stack.enter_context(_tables(folder, kind, workers, on_heads))
        prefix = f"{RUN_TABLES}/" if kind == "run" else ""
        uploads = [*content.uploads, *table_uploads(tables, prefix, tokens=chosen.with_tokens)]
        uploads += _card(content, tables, prefix, repo, chosen)
        files = {upload.name: MarkedFile(sha256=upload.sha256, size=upload.size) for upload in uploads}
        mark = content.mark.model_copy(update={"files": files})
        branch = branch or create(repo, chosen.revision, private=not chosen.public)
        send(branch, [Upload.of(HUB_MARK, mark.content), *uploads], mark.about)
    return _address(repo, chosen.revision)


def _kind(folder: Path) -> Literal["run", "results"]:
    if (folder / MANIFEST).is_file() or (folder / PROGRESS).is_file():
        return "run"
    if folder.is_dir() and is_results(folder):
        return "results"
    raise HubError(f"{folder} is neither a captured run nor a results folder; give one of them")


def _check_replaceable(branch: Branch, mark: HubMark) -> None:
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
    if not mark.succeeds(found.mark):
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
        job = Job(open_run(folder), config={"command": "analyze"})
        outcomes = analyze([job], place=Place(workers), strict=True, on_done=on_heads)
        write_results(Path(temporary), outcomes, wall_seconds=0.0)
        yield Path(temporary)


def _card(content: Content, tables: Path, prefix: str, repo: str, options: PushOptions) -> list[Upload]:
    """README.md and, if there are numbers to map, its picture."""
    study = build([Entry(tables)])
    names = [name for name in result_files(tables) if name.endswith(".parquet")]
    drawn = picture(study)
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
    text = card_text(facts, study, pictured=drawn is not None)
    pictures = [] if drawn is None else [Upload.of(PICTURE_FILE, drawn)]
    return [Upload.of(CARD_FILE, text.encode()), *pictures]


def _address(repo: str, revision: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/datasets/{repo}" + ("" if revision == "main" else f"/tree/{revision}")
