"""Effects of every term of every head on the prediction: estimated for all heads, measured for some and all at once.

Documents are processed one by one; the results of each are stored on disk until all are done, so that a killed
command resumes with the next one. The documents must not be those of the run, whose means define the terms.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from qkscope.capture import model as models
from qkscope.capture.corpus import Corpus
from qkscope.cause.ablation import Intervention, PassPlan, costs, seconds_of_a_pass
from qkscope.cause.fisher import check_differentiable, fisher_draws
from qkscope.cause.intervene import Factors, LayerHead, scaled, without_drift
from qkscope.cause.lockedmodel import LockedModel
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.checksums import recorded_digests, run_digest
from qkscope.files.layerfiles import write_tensors
from qkscope.headids import TERMS
from qkscope.options import option, out_of_range
from qkscope.progress import plural
from qkscope.results.effects import effects_frame, together_frame

DRIFT, CONTROL = "drift", "control"
ALL, NAMED, RANDOM, STRONGEST = "all", "named", "random", "strongest"


@dataclass(frozen=True)
class EffectOptions:
    """The estimates and measurements to make."""

    passes: int = option(64, "Backward passes over all documents together, for the estimate; 0: none.", least=0)
    measure: int = option(
        8,
        "Heads whose terms are taken away one by one: half the strongest, half random. Named heads: all, or none (0).",
        least=0,
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
    together: dict[tuple[str, str], tuple[int, np.ndarray]]
    """Costs of removing a term, the drift, and its control, by the change and the heads; and the number of heads."""
    chosen: dict[LayerHead, str] = field(default_factory=dict)
    """Why each measured head was measured: named, strongest or random."""


@dataclass
class EffectsJob:
    """The job that measures documents one by one and stores their results in a folder."""

    locked: LockedModel
    documents: list[torch.Tensor]
    """Tokens of each document (T,)."""
    options: EffectOptions
    folder: Path
    """Folder of each document's results until all are done."""
    named: list[LayerHead] = field(default_factory=list)
    """The heads to estimate and measure; empty: all heads of the run."""
    terms: Sequence[int] = range(len(TERMS))
    on_progress: Callable[[float, float], None] = lambda _done, _in_all: None

    def __post_init__(self) -> None:
        self.named = list(dict.fromkeys(self.named))
        self.locked.check_heads(self.named)
        if self.options.passes:
            check_differentiable(self.locked.model)

    @property
    def heads(self) -> list[LayerHead]:
        """The heads to estimate."""
        return self.named or self.locked.heads

    def plan(self) -> PassPlan:
        """Return the passes that are still to be made, after timing one."""
        n, terms = len(self.documents), len(self.terms)
        numbers = [
            name for batch in self._batches() for name in batch if not self._path(f"fisher-{batch[0]:06d}").is_file()
        ]
        unmeasured = [number for number in range(n) if not self._path(f"costs-{number:06d}").is_file()]
        passes = {
            "to estimate all terms": self._estimate_passes * len(numbers),
            f"to measure {plural(self._n_measured, 'head')} one by one": float(
                self._n_measured * terms * len(unmeasured)
            ),
            "to measure them together": float((1 + len(self._together())) * len(unmeasured)),
        }
        length = round(sum(map(len, self.documents)) / n)
        middle = min(self.documents, key=lambda document: abs(len(document) - length))
        return PassPlan(
            {step: count for step, count in passes.items() if count},
            length,
            seconds_of_a_pass(self.locked.model, middle),
        )

    def run(self) -> Effects:
        """Estimate the effects of all heads, choose heads, measure these and all heads together."""
        n, together = len(self.documents), self._together()
        self._in_all = self._estimate_passes * n + n * (self._n_measured * len(self.terms) + len(together) + 1.0)
        self._done = 0.0
        estimates = self._estimates()
        chosen = self._chosen(estimates)
        single = {(head, term): self._scale([head], term) for head in chosen for term in self.terms}
        by_name = {_result_name(*key): change for key, change in single.items()}
        by_name |= {"-".join(key): change for key, (_, change) in together.items()}
        by_document = [self._measured(number, by_name) for number in range(n)]
        stacked = {name: _stacked([part[name] for part in by_document]) for name in by_name}
        return Effects(
            self.heads,
            estimates,
            {key: stacked[_result_name(*key)] for key in single},
            {key: (n_heads, stacked["-".join(key)]) for key, (n_heads, _) in together.items()},
            chosen,
        )

    def forget(self) -> None:
        """Remove the stored results."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- steps ----------------------------------------------------------------------------------

    @property
    def _draws(self) -> int:
        """Draws of labels per document."""
        return -(-self.options.passes // len(self.documents))

    @property
    def _estimate_passes(self) -> float:
        """Forward passes that take as long as the estimate of one document: vectors are twice as long there."""
        return 4.0 * self._draws

    @property
    def _n_measured(self) -> int:
        """Number of heads that are measured one by one."""
        return (
            min(self.options.measure, len(self.heads))
            if not self.named
            else len(self.named) * (self.options.measure > 0)
        )

    def _together(self) -> dict[tuple[str, str], tuple[int, Intervention]]:
        """Return the changes of several heads at once: of all, or of the named ones and of as many random others."""
        others = [head for head in self.locked.heads if head not in set(self.named)] if self.named else []
        drawn = np.random.default_rng(self.options.seed).permutation(len(others))[: len(self.named)]
        groups = {NAMED if self.named else ALL: self.heads, RANDOM: [others[i] for i in sorted(drawn)]}
        changes: dict[tuple[str, str], tuple[int, Intervention]] = {
            (TERMS[term], name): (len(heads), self._scale(heads, term))
            for name, heads in groups.items()
            for term in self.terms
            if heads
        }
        first, drift = next(iter(groups)), partial(without_drift, self.locked.model, self.locked, self.heads)
        changes[DRIFT, first] = len(self.heads), drift
        changes[CONTROL, first] = len(self.heads), partial(drift, control=self.options.seed + 1)
        return changes

    def _batches(self) -> list[list[int]]:
        """Return the numbers of the documents of each backward pass, which have one length."""
        by_length: dict[int, list[int]] = {}
        for number, document in enumerate(self.documents):
            by_length.setdefault(len(document), []).append(number)
        size = self.options.batch
        return [numbers[i : i + size] for numbers in by_length.values() for i in range(0, len(numbers), size)]

    def _estimates(self) -> np.ndarray:
        estimates = np.full((len(self.documents), len(self.heads), len(TERMS)), np.nan)
        for batch in self._batches() if self._draws else []:
            estimates[batch] = self._stored_or_computed(f"fisher-{batch[0]:06d}", partial(self._draw, batch))["fisher"]
            self._report_progress(self._estimate_passes * len(batch))
        return estimates

    def _draw(self, numbers: list[int]) -> dict[str, np.ndarray]:
        documents = torch.stack([self.documents[number] for number in numbers]).to(self.locked.model.device)
        seed = self.options.seed * 1_000_003 + numbers[0]
        return {"fisher": fisher_draws(self.locked, self.heads, documents, self._draws, seed).mean(0)}

    def _chosen(self, estimates: np.ndarray) -> dict[LayerHead, str]:
        """Return the heads to measure in order, and why: they were named, or are the strongest, or were drawn."""
        n = self._n_measured
        if self.named:
            return dict.fromkeys(self.named[:n], NAMED)
        has_estimates = np.isfinite(estimates).all()
        size = estimates.mean(0)[:, list(self.terms)].max(-1) if has_estimates else np.zeros(len(self.heads))
        ranked = np.argsort(-size, kind="stable")
        first = ranked[: n // 2 if has_estimates else 0].tolist()
        others = np.setdiff1d(np.arange(len(self.heads)), first)
        drawn = np.random.default_rng(self.options.seed).permutation(others)[: n - len(first)].tolist()
        return {self.heads[i]: STRONGEST if i in first else RANDOM for i in sorted([*first, *drawn])}

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

    def _scale(self, heads: list[LayerHead], term: int) -> Intervention:
        remaining = 1.0 - self.options.gamma
        factors: Factors = tuple(remaining if term == number else 1.0 for number in range(len(TERMS)))  # type: ignore[assignment]
        return partial(scaled, self.locked.model, self.locked, dict.fromkeys(heads, factors))

    def _report_progress(self, passes: float) -> None:
        self._done += passes
        self.on_progress(self._done, self._in_all)

    def _stored_or_computed(self, name: str, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return the stored result of this name for this job, or compute and store it."""
        path = self._path(name)
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

    def _path(self, name: str) -> Path:
        return self.folder / self._digest / f"{name}.safetensors"

    @cached_property
    def _digest(self) -> str:
        """Digest that identifies the job: its run, model, documents and options."""
        texts = hashlib.sha256(b"".join(document.numpy().tobytes() for document in self.documents)).hexdigest()
        about: dict[str, Any] = asdict(self.options) | {"heads": self.heads, "terms": list(self.terms), "texts": texts}
        recorded = recorded_digests(self.locked.run.folder)
        run = self.locked.run.manifest.tokens if recorded is None else run_digest(recorded)
        about |= {"run": run, "model": models.describe_model(self.locked.model)}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def check_apart(locked: LockedModel, corpus: Corpus) -> None:
    """Raise an error if a document is one that the run was captured on."""
    run_digests = {document.digest for document in locked.run.manifest.documents}
    shared = [document.name for document in corpus.documents if document.digest in run_digests]
    if shared:
        others = f" and {len(shared) - 1} more are" if len(shared) > 1 else " is"
        raise ConfigError(
            f"{shared[0]}{others} also in {locked.run.folder}, whose means define the terms; give other --texts, or "
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
    found, gamma = job.run(), float(job.options.gamma)
    terms = [TERMS[term] for term in job.terms]
    single = {(head, TERMS[term]): sums for (head, term), sums in found.single.items()}
    lengths = np.array([len(document) for document in job.documents], dtype=float)
    about = {"model": model, "family": family, "window": int(lengths.max())}
    q_per_kv = job.locked.run.manifest.q_per_kv
    fisher = found.fisher[..., list(job.terms)]
    frame = effects_frame(about, q_per_kv, found.heads, terms, fisher, single, found.chosen, gamma, lengths)
    return {"effects": frame, "effects_together": together_frame(about, found.together, gamma)}
