"""The table ``cuts``: what each way of choosing key heads costs, on plain text and on a second copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from qkscope.extras.reach import Cut
from qkscope.results.effects import mean_with_interval
from qkscope.results.schema import column_names


def cut_table(
    locked: Any, documents: Sequence[Any], cuts: Sequence[Cut], model: str, on_pass: Callable[[int, int], None]
) -> pd.DataFrame:
    """Measure the cuts on a loaded model."""
    from qkscope.capture.cuts import cut_losses

    named = {f"{number:03d}": cut.windows for number, cut in enumerate(cuts)}
    losses = cut_losses(locked.model, documents, named, cuts[0].sinks, on_pass)
    in_all = max(len(cut.heads) for cut in cuts)
    length = float(np.mean([len(document) for document in documents]))
    entries = locked.entries
    seen = {layer: min(length, entry["sliding_window"] or length) for layer, entry in entries.items()}
    cache = sum(seen[layer] * len(entry["key_heads"]) for layer, entry in entries.items())
    rows, draw = [], 0
    for number, cut in enumerate(cuts):
        share = len(cut.heads) / max(in_all, 1)
        saved = sum(max(0.0, seen[layer] - cut.window - cut.sinks) for layer, _ in cut.heads) / cache
        for text in ("plain", "copy"):
            sums = losses[f"{number:03d}", text]
            nll, low, high = mean_with_interval(sums[:, 0], sums[:, 1])
            rows.append(
                {"model": model, "family": "", "order": cut.order, "draw": draw if cut.order == "random" else 0}
                | {"text": text, "w": cut.window, "share_cut": share, "cache_saved": saved}
                | {"nll": nll, "nll_low": low, "nll_high": high}
            )
        draw += cut.order == "random"
    return pd.DataFrame(rows, columns=column_names("cuts"))
