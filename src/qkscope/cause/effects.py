"""Effects of every term of every head on the prediction: estimated for all heads, measured for some and all at once.

Documents are processed one by one; the results of each are stored on disk until all are done, so that a killed
command resumes with the next one. The documents must not be those of the run, whose means define the terms.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from qkscope.capture import model as models
from qkscope.capture.corpus import Corpus
from qkscope.cause.ablation import Intervention, costs
from qkscope.cause.fisher import check_differentiable, fisher_draws
from qkscope.cause.intervene import Factors, LayerHead, scaled, without_drift
from qkscope.cause.lockedmodel import LockedModel
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.layerfiles import write_tensors
from qkscope.heads import TERMS, HeadId
from qkscope.options import option, out_of_range
from qkscope.results.effects import effects_frame, together_frame

DRIFT, CONTROL = "drift", "control"


@dataclass(frozen=True)
class EffectOptions:
    """The estimates and measurements to make."""

    passes: int = option(64, "Backward passes over all documents together, for the estimate; 0: none.", least=0)
    measure: int = option(
        8, "Heads whose terms are taken away one by one: half of them the strongest, half random.", least=0
    )
    gamma: float = option(1.0, "How much of a term is taken away: it is scaled by 1 − gamma.", above=0, most=2)
    batch: int = option(1, "Documents of equal length per backward pass.", least=1)
    seed: int = option(0, "Seed of the labels, of random heads and of the control.")

    def __post_init__(self) -> None:
        wrong = out_of_range(self) or ("" if self.gamma > 0 else f"expected a gamma above 0, got {self.gamma}")
        if wrong:
            raise CaptureError(wrong)


@dataclass(frozen=True)
class Effects:
    """Estimated and measured effects; documents are the first axis of every array."""

    heads: list[LayerHead]
    fisher: np.ndarray
    """F per token, mean over the draws of a document (documents, heads, 4); NaN where none was drawn."""
    single: dict[tuple[LayerHead, int], np.ndarray]
    """Costs of removing one term of one head: MEASURES by octave (documents, octaves, 4)."""
    together: dict[str, np.ndarray]
    """Costs of removing a term of all heads at once, the drift, and its control."""
    strongest: set[LayerHead] = field(default_factory=set)
    """Heads that were measured because their estimate is large; the others were drawn."""


@dataclass
class EffectsJob:
    """The job that measures documents one by one and stores their results in a folder."""

    locked: LockedModel
    documents: list[torch.Tensor]
    """Tokens of each document (T,)."""
    options: EffectOptions
    folder: Path
    """Folder of each document's results until all are done."""
    heads: list[LayerHead] = field(default_factory=list)
    terms: Sequence[int] = range(len(TERMS))
    on_progress: Callable[[float, float], None] = lambda _done, _in_all: None

    def run(self) -> Effects:
        """Estimate the effects of all heads, choose heads, measure these and all heads together."""
        self.heads = list(dict.fromkeys(self.heads)) or self.locked.heads
        self.locked.check_heads(self.heads)
        if self.options.passes:
            check_differentiable(self.locked.model)
        draws = -(-self.options.passes // len(self.documents))
        passes = 4.0 * draws * len(self.documents)  # a forward and a backward pass with vectors twice as long
        measured = min(self.options.measure, len(self.heads)) * len(self.terms) + len(self.terms) + 2
        self._in_all, self._done = passes + len(self.documents) * (measured + 1.0), 0.0
        estimates = self._estimates(draws)
        chosen, strongest = self._chosen(estimates)
        single = {(head, term): self._scale({head: self._factors(term)}) for head in chosen for term in self.terms}
        together: dict[str, Intervention] = {
            TERMS[term]: self._scale(dict.fromkeys(self.heads, self._factors(term))) for term in self.terms
        }
        together[DRIFT] = partial(without_drift, self.locked.model, self.locked, self.heads)
        together[CONTROL] = partial(
            without_drift, self.locked.model, self.locked, self.heads, control=self.options.seed + 1
        )
        named = {_result_name(head, term): change for (head, term), change in single.items()} | together
        by_document = [self._measured(number, named) for number in range(len(self.documents))]
        stacked = {name: _stacked([part[name] for part in by_document]) for name in named}
        return Effects(
            self.heads,
            estimates,
            {key: stacked[_result_name(*key)] for key in single},
            {name: stacked[name] for name in together},
            strongest,
        )

    def forget(self) -> None:
        """Remove the stored results."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- steps ----------------------------------------------------------------------------------

    def _estimates(self, draws: int) -> np.ndarray:
        if not draws:
            return np.full((len(self.documents), len(self.heads), len(TERMS)), np.nan)
        by_length: dict[int, list[int]] = {}
        for number, document in enumerate(self.documents):
            by_length.setdefault(len(document), []).append(number)
        estimates = np.zeros((len(self.documents), len(self.heads), len(TERMS)))
        for numbers in by_length.values():
            for first in range(0, len(numbers), self.options.batch):
                batch = numbers[first : first + self.options.batch]
                estimates[batch] = self._stored_or_computed(
                    f"fisher-{batch[0]:06d}", partial(self._draw, batch, draws)
                )["fisher"]
                self._report_progress(4.0 * draws * len(batch))
        return estimates

    def _draw(self, numbers: list[int], draws: int) -> dict[str, np.ndarray]:
        documents = torch.stack([self.documents[number] for number in numbers]).to(self.locked.model.device)
        seed = self.options.seed * 1_000_003 + numbers[0]
        return {"fisher": fisher_draws(self.locked, self.heads, documents, draws, seed).mean(0)}

    def _chosen(self, estimates: np.ndarray) -> tuple[list[LayerHead], set[LayerHead]]:
        """Return the chosen heads in order, half by their largest estimate, half drawn; and the former half."""
        n = min(self.options.measure, len(self.heads))
        has_estimates = np.isfinite(estimates).all()
        size = estimates.mean(0)[:, list(self.terms)].max(-1) if has_estimates else np.zeros(len(self.heads))
        ranked = np.argsort(-size, kind="stable")
        first = ranked[: n // 2 if has_estimates else 0].tolist()
        others = np.setdiff1d(np.arange(len(self.heads)), first)
        drawn = np.random.default_rng(self.options.seed).permutation(others)[: n - len(first)].tolist()
        return [self.heads[i] for i in sorted([*first, *drawn])], {self.heads[i] for i in first}

    def _measured(self, number: int, interventions: Mapping[str, Intervention]) -> dict[str, np.ndarray]:
        before = self._done

        def count_pass() -> None:
            self._report_progress(1.0)

        document = self.documents[number].to(self.locked.model.device)
        sums = self._stored_or_computed(
            f"costs-{number:06d}", lambda: costs(self.locked.model, document, interventions, count_pass)
        )
        self._done = before + len(interventions) + 1
        self._report_progress(0.0)
        return sums

    def _factors(self, term: int) -> Factors:
        remaining = 1.0 - self.options.gamma
        return tuple(remaining if term == number else 1.0 for number in range(len(TERMS)))  # type: ignore[return-value]

    def _scale(self, factors: dict[LayerHead, Factors]) -> Intervention:
        def intervention() -> AbstractContextManager[None]:
            return scaled(self.locked.model, self.locked, factors)

        return intervention

    def _report_progress(self, passes: float) -> None:
        self._done += passes
        self.on_progress(self._done, self._in_all)

    def _stored_or_computed(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the stored result of this name for this job, or compute and store it."""
        path = self.folder / self._digest / f"{name}.safetensors"
        if path.is_file():
            try:
                with safe_open(path, framework="numpy") as file:
                    return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError):
                path.unlink()  # damaged; computed again
        result = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, result)
        return result

    @property
    def _digest(self) -> str:
        """Digest that identifies the job: its run, model, documents and options."""
        texts = hashlib.sha256(b"".join(document.numpy().tobytes() for document in self.documents)).hexdigest()
        about: dict[str, Any] = asdict(self.options) | {"heads": self.heads, "terms": list(self.terms), "texts": texts}
        about |= {"run": self.locked.run.manifest.tokens, "model": models.describe_model(self.locked.model)}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def check_apart(locked: LockedModel, corpus: Corpus) -> None:
    """Raise an error if a document is one that the run was captured on."""
    run_digests = {document.digest for document in locked.run.manifest.documents}
    shared = [document.name for document in corpus.documents if document.digest in run_digests]
    if shared:
        others = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise ConfigError(
            f"{shared[0]}{others} is also in {locked.run.folder}, whose means define the terms; give other --texts, or "
            "--allow-overlap"
        )


def _result_name(head: LayerHead, term: int) -> str:
    return f"l{head[0]}h{head[1]}-{TERMS[term]}"


def _stacked(parts: list[np.ndarray]) -> np.ndarray:
    """Return sums of documents with different numbers of octaves as one array."""
    most = max(len(part) for part in parts)
    return np.stack([np.pad(part, ((0, most - len(part)), (0, 0))) for part in parts])


def effect_tables(
    job: Any, model: str, family: str = "", *, on_progress: Callable[[float, float], None] | None = None
) -> dict[str, pd.DataFrame]:
    """Run an ``EffectsJob`` and return its results as tables."""
    if on_progress is not None:
        job.on_progress = on_progress
    measured_effects, gamma = job.run(), float(job.options.gamma)
    chosen = [TERMS[term] for term in job.terms]
    single = {(head, TERMS[term]): sums for (head, term), sums in measured_effects.single.items()}
    q_per_kv = job.locked.run.manifest.q_per_kv
    fisher = measured_effects.fisher[..., list(job.terms)]
    lengths = np.array([len(document) for document in job.documents], dtype=float)
    frame = effects_frame(
        model,
        family,
        q_per_kv,
        measured_effects.heads,
        chosen,
        fisher,
        single,
        measured_effects.strongest,
        gamma,
        lengths,
    )
    together = together_frame(model, family, measured_effects.together, len(measured_effects.heads), gamma)
    return {"effects": frame, "effects_together": together}


def parsed_heads(text: str | None) -> list[tuple[int, int]]:
    """Parse query heads such as ``l00h03,l02h01``.

    >>> parsed_heads("l00h03,l12h1")
    [(0, 3), (12, 1)]
    """
    if not text:
        return []
    heads = [HeadId.match(part.strip() + "q") for part in text.split(",")]
    if None in heads:
        raise ConfigError(f"expected query heads such as l00h03,l02h01, got {text!r}")
    return list(dict.fromkeys((head.layer, head.head) for head in heads if head is not None))
