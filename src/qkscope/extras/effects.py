"""From a model, a run and texts to the tables ``effects`` and ``effects_together``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from qkscope.errors import ConfigError
from qkscope.heads import TERMS, HeadId
from qkscope.results.effects import effects_frame, together_frame

if TYPE_CHECKING:
    from qkscope.capture.effects import EffectOptions


def effects(
    model: Any,
    run: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    options: EffectOptions | None = None,
    window: int | None = None,
    heads: Sequence[tuple[int, int]] = (),
    label: str = "",
    on_progress: Callable[[float, float], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """What each term of each head does to the prediction of a loaded model on these texts.

    Texts are strings, with a tokenizer, or token ids; they must not be those of the run. ``on_progress`` is told how
    much is done, and of how much. Returns the tables ``effects`` and ``effects_together``.
    """
    from qkscope.capture.effects import EffectOptions, EffectsJob, cut_documents
    from qkscope.capture.lockedmodel import LockedModel
    from qkscope.capture.tokenids import token_ids

    if tokenizer is None and any(isinstance(text, str) for text in texts):
        raise ConfigError("texts as strings need a tokenizer; give one, or token ids")
    ids = [token_ids(text, tokenizer) if isinstance(text, str) else np.asarray(text) for text in texts]
    found = LockedModel.of(model, run)
    documents = cut_documents(ids, window or int(found.run.manifest["window"]))
    with TemporaryDirectory() as folder:
        job = EffectsJob(found, documents, options or EffectOptions(), Path(folder), list(heads))
        return effect_tables(job, label or found.run.folder.name, on_progress=on_progress)


def effect_tables(
    job: Any, model: str, family: str = "", *, on_progress: Callable[[float, float], None] | None = None
) -> dict[str, pd.DataFrame]:
    """Run a job of capture/effects.py, and put what it found into tables."""
    if on_progress is not None:
        job.on_progress = on_progress
    found, gamma = job.run(), float(job.options.gamma)
    chosen = [TERMS[term] for term in job.terms]
    single = {(head, TERMS[term]): sums for (head, term), sums in found.single.items()}
    q_per_kv = int(job.locked.run.manifest["q_per_kv"])
    fisher = found.fisher[..., list(job.terms)]
    lengths = np.array([len(document) for document in job.documents], dtype=float)
    frame = effects_frame(model, family, q_per_kv, found.heads, chosen, fisher, single, found.strongest, gamma, lengths)
    together = together_frame(model, family, found.together, len(found.heads), gamma)
    return {"effects": frame, "effects_together": together}


def parsed_heads(text: str | None) -> list[tuple[int, int]]:
    """Query heads such as ``l00h03,l02h01``.

    >>> parsed_heads("l00h03,l12h1")
    [(0, 3), (12, 1)]
    """
    if not text:
        return []
    heads = [HeadId.match(part.strip() + "q") for part in text.split(",")]
    if None in heads:
        raise ConfigError(f"expected query heads such as l00h03,l02h01, got {text!r}")
    return list(dict.fromkeys((head.layer, head.head) for head in heads if head is not None))
