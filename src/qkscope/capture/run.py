"""Model and texts → a Run on disk: every chosen head at every token, one forward pass per document.

Documents are done in shards, by this process or by workers that have a replica of the model each. The sums of every
shard are kept on disk until all are there; a capture that is killed goes on with the shards that are missing. Neither
that nor the number of workers, or of jobs that share the work, changes a byte of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qkscope.capture.assemble import assemble
from qkscope.capture.manifest import manifest
from qkscope.capture.modelreport import ModelReport, ShardSums
from qkscope.capture.models import resolved_device
from qkscope.capture.options import CaptureOptions, ExecutionOptions, ModelOptions, Progress
from qkscope.capture.replica import Replica
from qkscope.capture.shards import Shard, kept_tokens, per_shard
from qkscope.capture.texts import Document
from qkscope.capture.vectors import write_kept
from qkscope.core.layermoments import LayerMoments
from qkscope.engine import pool
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.inprogress import CaptureInProgress, check_capture_folder
from qkscope.files.locks import held
from qkscope.files.manifest import problem
from qkscope.files.parts import LeftOutDocument, Note, Span

_log = logging.getLogger("qkscope")

PARITY_TOKENS = 1024


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Token ids of each document, whole; the window is cut from their beginning later."""
    return [np.asarray(tokenizer(document.text)["input_ids"], dtype=np.int64) for document in documents]


def capture(
    model: PreTrainedModel | ModelOptions,
    documents: list[Document],
    ids: list[np.ndarray],
    folder: Path,
    options: CaptureOptions,
    about: dict[str, Any],
    doing: ExecutionOptions | None = None,
) -> Path:
    """Measure the model on these documents; ``about`` says where the model comes from, for the manifest.

    The model is one that is here, or a description that workers load it by. Documents without two tokens past
    ``skip_first`` are left out and counted in the manifest.
    """
    doing = doing or ExecutionOptions()
    check_capture_folder(folder)
    usable = [number for number, one in enumerate(ids) if len(one) > options.skip_first + 1]
    if not usable:
        way_out = "give longer texts, or a smaller --skip-first"
        raise CaptureError(f"no document has two tokens past the first {options.skip_first}; {way_out}")
    if isinstance(model, PreTrainedModel) and not doing.alone:
        raise ConfigError("a model that is loaded already cannot be sent to workers; give them a ModelOptions")
    device = model.device.type if isinstance(model, PreTrainedModel) else resolved_device(model.device)
    longest = min(max(map(len, ids)), options.window or 2**31)
    options = replace(options, documents_per_shard=per_shard(options, longest, device))
    gate = ids[usable[0]][: min(PARITY_TOKENS, options.window or PARITY_TOKENS)]
    replica = Replica(model, options, gate, doing.keep_going)
    in_all = -(-len(usable) // (options.documents_per_shard or 1))
    mine = range(in_all) if doing.share is None else doing.share.shards(in_all)
    with held(folder), pool(replica, doing.place(device), len(mine), per_worker=1) as workers:
        ((_, seen),) = workers.map([None])
        assert isinstance(seen, ModelReport)
        window = options.window or min(longest, seen.longest)
        cut, options = [ids[number][:window] for number in usable], replace(options, window=window)
        found = manifest(seen, [documents[number] for number in usable], cut, options, about)
        found["documents_too_short"] = len(ids) - len(usable)
        wrong = problem(found)
        if wrong:
            raise CaptureError(f"this capture could not be read again ({wrong}); choose other options")
        _refuse_strange_tokens(cut, seen)
        if window > seen.longest:
            _log.warning("the window of %d goes past the %d positions the model was made for", window, seen.longest)
        state = CaptureInProgress(folder, found)
        if not doing.resume:
            state.forget()
        state.resume()
        for line in state.damaged:
            _log.warning("%s; what it held is measured again", line)
        if not state.finished:
            job = _Job(state, seen, cut, [documents[number].name for number in usable], options, doing, mine)
            replica.on_documents = job.tell
            job.do(workers.map)
        if doing.share is None:
            assemble(state, doing.on_writing)
    return folder


def _refuse_strange_tokens(ids: list[np.ndarray], seen: ModelReport) -> None:
    highest = max(int(one.max()) for one in ids)
    if highest >= seen.vocabulary or min(int(one.min()) for one in ids) < 0:
        way_out = "give the model's own with --tokenizer"
        raise CaptureError(f"the tokenizer gives token {highest}, and the model knows {seen.vocabulary}; {way_out}")


@dataclass
class _Job:
    """The shards of one job that are not done yet: handed out, and saved as they come back."""

    state: CaptureInProgress
    seen: ModelReport
    ids: list[np.ndarray]
    names: list[str]
    options: CaptureOptions
    doing: ExecutionOptions
    mine: range
    """The shards of this job."""
    _tokens: int = field(default=0, init=False)
    _documents: int = field(default=0, init=False)
    _before: int = field(default=0, init=False)
    _saving: Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        size = self.options.documents_per_shard or 1
        self._whole = self.ids[self.mine.start * size : self.mine.stop * size]
        self._tokens_in_all = sum(map(len, self._whole))

    def do(self, measure: Callable[[Sequence[Shard]], Any]) -> None:
        """Measure every shard of this job's share that no part holds yet.

        A shard is saved while the next one is measured; the next but one waits, so that no more than two are in memory.
        """
        done = self.state.parts.done
        kept = kept_tokens([len(one) for one in self.ids], self.options)
        for number in self.mine:
            if number in done:
                self._count(self._examples(number))
        self._before = self._tokens
        todo = [self._shard(number, kept) for number in self.mine if number not in done]
        with ThreadPoolExecutor(1) as saver:
            for index, sums in measure(todo):
                self._saved()
                self._saving = saver.submit(self._save, todo[index], sums)
                self._count(todo[index].examples)
                if not self.doing.alone:
                    self._say(self._documents, self._tokens)
            self._saved()

    def tell(self, shard: Shard, documents: int) -> None:
        """So many documents of a shard have been measured in this process."""
        if self._saving is not None and self._saving.done():
            self._saving.result()  # a disk that is full is not to be found out a shard later
        self._say(self._documents + documents, self._tokens + sum(map(len, shard.ids[:documents])))

    def _saved(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def _say(self, documents: int, tokens: int) -> None:
        if self.doing.on_progress is not None:
            now = Progress(documents, len(self._whole), tokens, self._tokens_in_all, self._before)
            self.doing.on_progress(now)

    def _count(self, examples: list[int]) -> None:
        self._documents += len(examples)
        self._tokens += sum(len(self.ids[example]) for example in examples)

    def _examples(self, number: int) -> list[int]:
        size = self.options.documents_per_shard or 1
        return list(range(number * size, min((number + 1) * size, len(self.ids))))

    def _shard(self, number: int, kept: list[np.ndarray]) -> Shard:
        examples = self._examples(number)
        assert self.options.window is not None
        names, ids = ([things[example] for example in examples] for things in (self.names, self.ids))
        return Shard(number, examples, names, ids, [kept[example] for example in examples], self.options.window)  # type: ignore[arg-type]

    def _save(self, shard: Shard, sums: ShardSums) -> None:
        """The vectors first, then the part that names them."""
        if sums.seen != self.seen.digest:
            raise CaptureError(
                f"the worker that measured {shard} sees another model, another kind of GPU or other versions than the "
                "first one; give all machines the same"
            )
        for document, reason in sums.left_out.items():
            _log.error("left out document %d (%s): %s", document, self.names[document], reason)
        if sums.one_by_one:
            _log.warning("%s did not fit into memory in batches and were measured one by one", shard)
        note = Note(
            one_by_one=[shard.number] if sums.one_by_one else [],
            kept=write_kept(self.state.kept, shard.number, sums.kept),
            left_out=[LeftOutDocument(document=document, reason=reason) for document, reason in sums.left_out.items()],
        )
        layers = {layer: _there(moments) for layer, moments in sums.moments.items()}
        self.state.parts.add(Span(shard.number), layers, note)


def _there(moments: LayerMoments) -> Callable[[], LayerMoments]:
    return lambda: moments
