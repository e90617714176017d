"""Model and texts → a Run on disk: every chosen head at every token, one forward pass per document."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from qkscope.capture.assemble import assemble
from qkscope.capture.corpus import Corpus, DocumentTokens, Passage, check_documents
from qkscope.capture.gate import gate_tokens
from qkscope.capture.images import ImageInputs
from qkscope.capture.model import check_tokens, resolved_device
from qkscope.capture.options import SHORTEST_WINDOW, CaptureOptions, ExecutionOptions, ModelOptions
from qkscope.capture.replica import Replica
from qkscope.capture.sampling import KeptVectors, numbered_tokens, sample_tokens, write_kept
from qkscope.capture.serve import ServingEngine
from qkscope.capture.shards import Shard, kept_tokens, per_shard
from qkscope.capture.shardsums import ModelReport, ShardSums
from qkscope.capture.texts import Document
from qkscope.capture.watch import is_split, plain_model
from qkscope.core.layermoments import LayerMoments
from qkscope.engine import pool
from qkscope.errors import CaptureError, ConfigError, NotNestedError
from qkscope.files.inprogress import CaptureInProgress, check_capture_folder
from qkscope.files.locks import HeldFolder, held
from qkscope.files.manifest import problem
from qkscope.files.parts import LeftOutDocument, PartMetadata, Span
from qkscope.files.runfolder import FORMAT, PASSAGE_ENTRY, Vectors, at_window, write_passage


def manifest(
    report: ModelReport,
    documents: list[Document],
    tokens: list[DocumentTokens],
    options: CaptureOptions,
    about: dict[str, Any],
    n_too_short: int,
    passage: Passage | None,
) -> dict[str, Any]:
    """Return the manifest of a capture, run.json; nothing in it depends on the time or speed of the run."""
    listed = [
        {"name": document.name, "digest": document.digest} | of_document.as_dict()
        for document, of_document in zip(documents, tokens, strict=True)
    ]
    digests = "".join(f"{entry['digest']}{entry['tokens']};" for entry in listed)
    corpus = hashlib.sha256(digests.encode()).hexdigest()
    return {
        "format": FORMAT,
        "model": about | report.model,
        "stage": "pre-rope" if options.pre_rope else "post-rope",
        "window": options.window,
        "q_per_kv": report.q_per_kv,
        "options": _recorded_options(options),
        "threads": report.threads,
        "corpus": corpus,
        "tokens": hashlib.sha256(b"".join(of_document.ids.tobytes() for of_document in tokens)).hexdigest(),
        "documents": listed,
        "layers": report.layers,
        "versions": report.versions,
        "documents_too_short": n_too_short,
    } | ({} if passage is None else {PASSAGE_ENTRY: {"tokens": list(passage.cut(report.longest).tokens)}})


def _recorded_options(options: CaptureOptions) -> dict[str, Any]:
    """Return the options for run.json; ``keep`` only if it is set, so that other runs stay the same.

    A run does not depend on the shorter windows that its passes also served. The passage has an entry of its own.
    """
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(options).items()
        if key not in ("compare_at", "passage") and (key != "keep" or value is not None)
    }


Words = Callable[[np.ndarray], list[str]]
"""A function from token ids to the text of each."""
_log = logging.getLogger("qkscope")


def capture(
    model: PreTrainedModel | ModelOptions | ServingEngine,
    corpus: Corpus,
    folder: Path,
    options: CaptureOptions,
    about: dict[str, Any],
    execution: ExecutionOptions | None = None,
) -> Path:
    """Measure the model on these documents; ``about`` states where the model comes from, for the manifest.

    The model is loaded, or in a serving engine, or given by the options with which workers load it. Documents without
    two tokens after ``skip_first`` are left out and counted in the manifest. All vectors of the corpus's passage are
    stored.
    """
    execution = execution or ExecutionOptions()
    for path in (folder, *nested_folders(folder, options.compare_at)):
        check_capture_folder(path)
    tokens = [DocumentTokens.of(document).cut(options.window) for document in corpus.tokens]
    usable = _usable(tokens, options.skip_first)
    longest = max(document.extent for document in tokens)
    options = _at_most(longest, options)
    if isinstance(model, ModelOptions):
        device = resolved_device(model.device)
    else:
        plain = _checked_model(model.decoder if isinstance(model, ServingEngine) else model, execution)
        model, device = model if isinstance(model, ServingEngine) else plain, plain.device.type
    options = replace(options, documents_per_shard=per_shard(options, longest, device))
    whole_passage = corpus.passage_of(options.passage)
    passage = None if whole_passage is None or options.pre_rope else whole_passage.cut(longest)
    gate, images = _gate_inputs(
        [tokens[number] for number in usable], gate_tokens(sum(map(len, tokens)), options.window)
    )
    _check_compare_at(options, longest, is_served=isinstance(model, ServingEngine), has_images=images is not None)
    passage_ids = None if passage is None else passage.ids
    replica = Replica(model, options, gate, passage_ids, execution.keep_going, corpus.repeated_tokens, images)
    in_all = -(-len(usable) // (options.documents_per_shard or 1))
    job_shards = range(in_all) if execution.share is None else execution.share.shards(in_all)
    with ExitStack() as stack:
        folders = [stack.enter_context(held(path)) for path in (folder, *nested_folders(folder, options.compare_at))]
        workers = stack.enter_context(pool(replica, execution.target(device), len(job_shards), per_worker=1))
        ((_, report),) = workers.map([None])
        assert isinstance(report, ModelReport)
        documents = [corpus.documents[number] for number in usable]
        names = [document.name for document in documents]
        own_window = options.window or max(min(longest, report.longest), SHORTEST_WINDOW)
        runs = []
        for held_folder, window in zip(folders, (own_window, *options.compare_at), strict=True):
            of_window = replace(options, window=window)
            cut = [tokens[number].cut(window) for number in usable]
            cut_passage = None if passage is None else passage.cut(max(document.extent for document in cut))
            run_manifest = manifest(
                report, documents, cut, of_window, about, len(corpus.tokens) - len(usable), cut_passage
            )
            _check(run_manifest, window, names, cut, report)
            state = _resumed(held_folder.folder, run_manifest, execution)
            if cut_passage is not None and not state.finished:
                write_passage(state.folder, {n: _first(qk, len(cut_passage.ids)) for n, qk in report.passage.items()})
            runs.append(_WindowRun(state, cut, of_window, held_folder))
        if not all(run.state.finished for run in runs):
            job = _Job(runs, report, names, execution, job_shards, corpus.words)
            replica.on_documents = job.tell
            job.do(workers.map)
        for run in runs:
            run.held_folder.check()
            if execution.share is None:
                assemble(run.state, execution.on_writing, run.last)
    return folder


def nested_folders(folder: Path, compare_at: Sequence[int]) -> list[Path]:
    """Return the folders of the runs at shorter windows."""
    return [Path(at_window(str(folder), window)) for window in compare_at]


def _check_compare_at(options: CaptureOptions, longest: int, *, is_served: bool, has_images: bool) -> None:
    """Raise an error if the options or documents do not allow shorter windows in the same passes."""
    if not options.compare_at:
        return
    reason = "an engine's requests cannot be cut" if is_served else "documents with images cannot be cut"
    if is_served or has_images:
        raise NotNestedError(f"--compare-at: {reason}; leave it out, and capture again with the other window")
    window = min(options.window or longest, longest)
    if options.compare_at[-1] >= window:
        raise CaptureError(
            f"--compare-at {options.compare_at[-1]} is not shorter than the window of {window}; leave it out"
        )
    if options.compare_at[0] < options.skip_first + 2:
        raise CaptureError(
            f"--compare-at {options.compare_at[0]} leaves no two tokens after --skip-first {options.skip_first}"
        )


def _first(vectors: Vectors, tokens: int) -> Vectors:
    q, k = vectors
    return q[:tokens], k[:tokens]


def _at_most(longest: int, options: CaptureOptions) -> CaptureOptions:
    """Return the options with the window cut to the longest document of the whole corpus, the same in every share."""
    window = max(longest, SHORTEST_WINDOW)
    if options.window is None or options.window <= window:
        return options
    _log.info("the window of %d is cut to %d, the length of the longest document", options.window, window)
    return replace(options, window=window)


def _resumed(folder: Path, run_manifest: dict[str, Any], execution: ExecutionOptions) -> CaptureInProgress:
    """Return the state of a new capture, or of an earlier attempt at it."""
    state = CaptureInProgress(folder, run_manifest)
    if not execution.resume:
        state.forget()
    state.resume()
    for line in state.damaged:
        _log.warning("%s; its shards are measured again", line)
    return state


def _checked_model(model: Any, execution: ExecutionOptions) -> PreTrainedModel:
    """Return a loaded model that is ready to be captured; errors say what to do first."""
    plain = plain_model(model)
    if not execution.alone:
        raise ConfigError("a loaded model cannot be sent to workers; pass ModelOptions instead")
    if plain.training:
        raise CaptureError(
            "the model is in training mode, in which dropout changes what it computes; call model.eval()"
        )
    if is_split(plain):
        raise CaptureError(
            "the model is split over several processes (tensor parallel or FSDP), each of which has only a part of it; "
            "load it on one GPU, or with device_map='auto' on several"
        )
    return plain


def _gate_inputs(documents: list[DocumentTokens], size: int) -> tuple[np.ndarray, ImageInputs | None]:
    """Return tokens for the parity check, from a text if there is one, and the first document with images."""
    texts = [document for document in documents if document.images is None]
    images = [document.images for document in documents if document.images is not None]
    return (texts or documents)[0].ids[:size], images[0] if images else None


def _usable(documents: list[DocumentTokens], skip_first: int) -> list[int]:
    """Return the numbers of the documents with two tokens after the first ones; an error if there is none."""
    usable = [number for number, tokens in enumerate(documents) if tokens.n_after(skip_first) > 1]
    if not usable:
        advice = "use longer texts or a smaller --skip-first"
        raise CaptureError(f"no document has two tokens after the first {skip_first}; {advice}")
    return usable


def _check(
    run_manifest: dict[str, Any], window: int, names: list[str], ids: list[DocumentTokens], report: ModelReport
) -> None:
    """Raise an error if the manifest is not valid or documents do not fit the model; warn of a long window."""
    error_text = problem(run_manifest)
    if error_text:
        raise CaptureError(f"this capture would not be valid ({error_text}); choose other options")
    if window > report.longest:
        _log.warning("the window of %d exceeds the model's max_position_embeddings of %d", window, report.longest)
    check_tokens([tokens.ids for tokens in ids], report.vocabulary)
    check_documents(names, ids, report)


@dataclass
class _WindowRun:
    """The run at one window: its state, and its documents cut to the window."""

    state: CaptureInProgress
    ids: list[DocumentTokens]
    options: CaptureOptions
    held_folder: HeldFolder
    last: tuple[int, KeptVectors] | None = field(default=None, init=False)
    """Number and vectors of the shard that completes the run, which are not on disk."""

    def is_done(self, number: int) -> bool:
        """True if a shard need not be measured for this run."""
        return self.state.finished or number in self.state.parts.done

    def shard(self, number: int, examples: list[int], names: list[str]) -> Shard:
        """Return a shard of these documents."""
        assert self.options.window is not None
        positions, options, sampled = [tokens.positions for tokens in self.ids], self.options, None
        if len(examples) == len(self.ids):
            sampled = numbered_tokens(sample_tokens(positions, options.sample, options.seed, options.skip_first))
        return Shard(
            number,
            examples,
            [names[example] for example in examples],
            [self.ids[example].ids for example in examples],
            [self._kept[example] for example in examples],
            self.options.window,
            sampled,
            {example: images for example in examples if (images := self.ids[example].images) is not None},
        )

    @cached_property
    def _kept(self) -> list[np.ndarray]:
        return kept_tokens([tokens.positions for tokens in self.ids], self.options)

    def save(self, shard: Shard, sums: ShardSums, words: Words | None, *, whole_job: bool) -> None:
        """Save the vectors first, then the part that lists them; the shard that completes the run is not saved."""
        self.held_folder.check()
        if self.is_done(shard.number):
            return
        span, kept = Span(shard.number), self._with_texts(sums.kept, words)
        is_last = whole_job and self.state.parts.completes(span)
        note = PartMetadata(
            one_by_one=[shard.number] if sums.one_by_one else [],
            kept={} if is_last else write_kept(self.state.kept, shard.number, kept),
            losses=sums.losses,
            left_out=[LeftOutDocument(document=document, reason=reason) for document, reason in sums.left_out.items()],
        )
        if is_last:  # the run is written immediately afterwards
            self.last = shard.number, kept
        layers = {layer: _as_loader(moments) for layer, moments in sums.moments.items()}
        self.state.parts.add(span, layers, note, save=not is_last)

    def _with_texts(self, kept: KeptVectors, words: Words | None) -> KeptVectors:
        """Return the kept vectors with their tokens as text."""
        if words is None or not self.options.token_text or not len(kept.position):
            return kept
        ids = np.zeros_like(kept.position)
        for example in np.unique(kept.example_id):
            rows = kept.example_id == example
            ids[rows] = self.ids[example].at(kept.position[rows])
        return replace(kept, texts=words(ids))


@dataclass
class _Job:
    """One job's share of the capture: it distributes the shards that are not done yet, and saves their sums."""

    runs: list[_WindowRun]
    """The run at the whole window, then those at shorter ones."""
    report: ModelReport
    names: list[str]
    execution: ExecutionOptions
    shards: range
    """The shards of this job, done or not."""
    words: Words | None
    _tokens: int = field(default=0, init=False)
    _documents: int = field(default=0, init=False)
    _saving: Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.ids = self.runs[0].ids
        self._size = self.runs[0].options.documents_per_shard or 1
        self._job_ids = self.ids[self.shards.start * self._size : self.shards.stop * self._size]
        self._tokens_in_all = sum(map(len, self._job_ids))

    def do(self, measure: Callable[[Sequence[Shard]], Any]) -> None:
        """Measure every shard of this job that a run lacks.

        On a GPU and with workers, a shard is saved while the next one is measured; the one after that waits, so at most
        two are in memory.
        """
        done = {number for number in self.shards if all(run.is_done(number) for run in self.runs)}
        for number in done:
            self._count(self._examples(number))
        pending = [self._shard(number) for number in self.shards if number not in done]
        with ThreadPoolExecutor(1) as saver:
            for index, sums in measure(pending):
                self._wait_until_saved()
                self._saving = saver.submit(self._save, pending[index], sums)
                if self.execution.alone and self.report.threads is not None:
                    self._wait_until_saved()  # on a CPU, saving would slow down the next pass by more than it takes
                self._count(pending[index].examples)
                if not self.execution.alone:
                    self._report_progress(self._documents, self._tokens)
            self._wait_until_saved()

    def tell(self, shard: Shard, rows: list[int]) -> None:
        """Report that these documents of a shard have been measured so far, in this process."""
        if self._saving is not None and self._saving.done():
            self._saving.result()  # report a full disk now, not one shard later
        tokens = sum(len(shard.ids[row]) for row in rows)
        self._report_progress(self._documents + len(rows), self._tokens + tokens)

    def _wait_until_saved(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def _report_progress(self, documents: int, tokens: int) -> None:
        if self.execution.on_progress is not None:
            note = f"{documents} of {len(self._job_ids)} documents"
            self.execution.on_progress(tokens, self._tokens_in_all, note)

    def _count(self, examples: list[int]) -> None:
        self._documents += len(examples)
        self._tokens += sum(len(self.ids[example]) for example in examples)

    def _examples(self, number: int) -> list[int]:
        return list(range(number * self._size, min((number + 1) * self._size, len(self.ids))))

    def _shard(self, number: int) -> Shard:
        whole, *nested = (run.shard(number, self._examples(number), self.names) for run in self.runs)
        return replace(whole, nested=tuple(nested))

    def _save(self, shard: Shard, sums: ShardSums) -> None:
        """Save the sums of a shard in every run that lacks them."""
        if sums.report_digest != self.report.digest:
            raise CaptureError(
                f"the worker that measured {shard} has another model, GPU type or package versions than the first one; "
                "use the same on all machines"
            )
        for document, reason in sums.left_out.items():
            _log.error("left out document %d (%s): %s", document, self.names[document], reason)
        if sums.one_by_one:
            _log.warning("%s did not fit into memory in batches and were measured one by one", shard)
        whole_job = self.execution.share is None
        for run, of_window in zip(self.runs, (sums, *sums.nested), strict=True):
            run.save(shard, of_window, self.words, whole_job=whole_job)


def _as_loader(moments: LayerMoments) -> Callable[[], LayerMoments]:
    return lambda: moments
