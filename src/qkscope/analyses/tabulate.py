"""From the moments of a batch of heads to tidy tables: identifying columns, estimates, intervals, flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from jaxtyping import Float, Int

from qkscope.analyses.columns import Columns, Tables, repeated
from qkscope.analyses.headvariance import HeadVariance, head_variance
from qkscope.analyses.heldout import held_out
from qkscope.analyses.pca import TAXONOMY, Components, components, taxonomy
from qkscope.analyses.replicates import Again, Replicates, pca_again, replicates, rotation_again
from qkscope.analyses.rotation import Centering, Pairing, Rotation, leftovers, rotation
from qkscope.analyses.uncertainty import Scale, flags, interval_columns, usable_groups
from qkscope.core.headmoments import HeadMoments
from qkscope.core.moments import Moments


@dataclass(frozen=True)
class PcaOptions:
    """Choices of the combined PCA."""

    n_components: int = 10
    """How many components are kept."""
    high: float = 0.7
    """Above this |r| a head counts as strongly positional."""
    low: float = 0.3
    """Below this |r| a head counts as not positional."""

    def __post_init__(self) -> None:
        if self.n_components < 1 or not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"expected n_components of 1 or more and 0 ≤ low ≤ high ≤ 1, got {self}")


@dataclass(frozen=True)
class RotationOptions:
    """Choices of the planar rotation model."""

    centering: Centering = "pooled"
    """About which mean Cov(x, t) is taken: that of the pool (as published) or each class's own."""
    pairing: Pairing = "independent"
    """Which pairs δ = q − k runs over: all of them, or those at the same token."""

    def __post_init__(self) -> None:
        for name, choices in (("centering", get_args(Centering)), ("pairing", get_args(Pairing))):
            if getattr(self, name) not in choices:
                raise ValueError(f"expected {name} to be {' or '.join(choices)}, got {getattr(self, name)!r}")


PC_INTERVALS = {"r_q": Scale.CORRELATION, "r_k": Scale.CORRELATION, "explained_variance": Scale.SHARE}
HEAD_INTERVALS = {
    "posvar_q_published": Scale.SHARE,
    "posvar_k_published": Scale.SHARE,
    "posvar_q": Scale.SHARE,
    "posvar_k": Scale.SHARE,
    "positional_overhead": Scale.SHARE,
    "amplification": Scale.LINEAR,
    "fisher": Scale.LINEAR,
    "separation": Scale.LINEAR,
    "lda_accuracy_gaussian": Scale.SHARE,
}
ROTATION_INTERVALS = {
    "position_r": Scale.MAGNITUDE,
    "r_q_a": Scale.CORRELATION,
    "r_k_a": Scale.CORRELATION,
    "alpha_q": Scale.LINEAR,
    "alpha_k": Scale.LINEAR,
    "mu_q_a": Scale.LINEAR,
    "mu_k_a": Scale.LINEAR,
    "mu_q_b": Scale.LINEAR,
    "mu_k_b": Scale.LINEAR,
    "bias_strength": Scale.LINEAR,
    "query_term": Scale.LINEAR,
    "interaction": Scale.LINEAR,
    "constant": Scale.LINEAR,
    "bias_full": Scale.LINEAR,
    "separation_strength": Scale.SHARE,
    "var_frac_a": Scale.SHARE,
    "var_frac_b": Scale.SHARE,
    "plane_var_fraction": Scale.SHARE,
    "content_var_b": Scale.LINEAR,
    "linearity_r2": Scale.SHARE,
}
OVER_WINDOW = {"bias_window": "bias_strength", "bias_full_window": "bias_full", "bias_causal_window": "bias_causal"}
"""Each bias over the window, and the bias per token that it is a multiple of."""

LINE_INTERVAL = {"lda_accuracy": Scale.PROPORTION}

_PC_NUMBERS = ("explained_variance", "r_q", "r_k", "mu_q", "mu_k", "slope_q", "slope_k", "var_q", "var_k",
               "fisher", "separation")  # fmt: skip
_HEAD_NUMBERS = tuple(HeadVariance.__dataclass_fields__)
_ROTATION_NUMBERS = ("position_r", "r_q_a", "r_k_a", "alpha_q", "alpha_k", "mu_q_a", "mu_k_a", "mu_q_b", "mu_k_b",
                     "separation_strength", "var_frac_a", "var_frac_b", "plane_var_fraction", "content_var_b",
                     "bias_strength", "query_term", "interaction", "constant", "bias_full")  # fmt: skip


def pca_tables(
    index: Columns,
    moments: HeadMoments,
    options: PcaOptions | None = None,
    pcs: Components | None = None,
    lines: Sequence[tuple[float, Float[np.ndarray, "8"]]] | None = None,
    again: Replicates | None = None,
    *,
    intervals: bool = True,
) -> Tables:
    """``qk`` (one row per head and component) and ``heads`` (one row per head).

    ``index`` names each head of the batch: model, family, layer, head, k_head; ``pcs`` and ``again`` (with each
    document group left out) spare computing them again; ``lines`` are the accuracies of the line between queries and
    keys on held-out documents, and with each document group left out.
    """
    options = options or PcaOptions()
    q, k = moments.total_q, moments.total_k
    pcs = pcs or components(q, k, options.n_components, pooled=moments.pooled, whole_basis=intervals)
    whole = head_variance(q, k, pcs)
    if intervals and again is None:
        (again,) = replicates(moments, pca_columns_again(pcs))
    kind = np.array(TAXONOMY)[taxonomy(pcs.r_q[:, 0], pcs.r_k[:, 0], options.high, options.low)]
    qk = _pc_rows(index | {"taxonomy": kind, "flags": np.array(flags(moments))}, moments, pcs, again)
    heads = _head_rows(index | {"taxonomy": kind}, moments, whole, again)
    pc0 = {name: values[..., 0] if name in PC_INTERVALS else values for name, values in (again or {}).items()}
    columns, again_line = _line_columns(lines, moments, intervals=intervals)
    return Tables(
        {"qk": qk, "heads": heads | columns, "axes": _axes_rows(index, pcs)}, _present(pc0, moments) | again_line
    )


def rotation_tables(
    index: Columns,
    moments: HeadMoments,
    options: RotationOptions | None = None,
    model: Rotation | None = None,
    again: Replicates | None = None,
    *,
    intervals: bool = True,
) -> Tables:
    """``rotated``: one row per head, without ``omega``; ``model`` and ``again`` spare constructing it again."""
    options = options or RotationOptions()
    q, k = moments.total_q, moments.total_k
    model = model or rotation_model(moments, options, intervals=intervals)
    if intervals and again is None:
        (again,) = replicates(moments, rotation_columns_again(options, model))
    numbers = _numbers(model, _ROTATION_NUMBERS)
    numbers |= _numbers(leftovers(q, k, moments.k_buckets, model, options.centering))
    numbers |= _numbers(held_out(moments, options.centering))
    numbers |= interval_columns(ROTATION_INTERVALS, numbers, again, usable_groups(moments))
    numbers |= over_window(numbers, ("bias_window", "bias_full_window"), moments.window)
    numbers["logit_bias_window"] = numbers["bias_full_window"] * moments.scaling
    counts = {"n_q": q.n.astype(np.int64), "n_k": k.n.astype(np.int64), "window": moments.window}
    rotated = index | counts | numbers | {"flags": np.array(flags(moments))}
    return Tables({"rotated": rotated}, _present(again or {}, moments))


def pca_columns_again(pcs: Components) -> Again:
    """The columns of ``qk`` and ``heads`` that have intervals, for ``replicates``."""
    return pca_again(pcs, PC_INTERVALS, HEAD_INTERVALS)


def rotation_columns_again(options: RotationOptions, model: Rotation) -> Again:
    """The columns of ``rotated`` that have intervals, for ``replicates``."""
    return rotation_again(options.centering, model, ROTATION_INTERVALS, paired=options.pairing == "token")


def rotation_model(moments: HeadMoments, options: RotationOptions, *, intervals: bool = True) -> Rotation:
    """The axes of a batch of heads and what is measured along them."""
    paired = _paired(moments, options)
    cross = None if paired is None else paired.merged()
    return rotation(
        moments.total_q, moments.total_k, cross, options.centering, pooled=moments.pooled, whole_basis=intervals
    )


def _paired(moments: HeadMoments, options: RotationOptions) -> Moments | None:
    if options.pairing == "token" and moments.cross is None:
        raise ValueError("pairing='token' needs moments with cross statistics")
    return moments.cross if options.pairing == "token" else None


def _present(replicates: Columns, moments: HeadMoments) -> Columns:
    return {name: np.where(usable_groups(moments) > 0, values, np.nan) for name, values in replicates.items()}


# ---- rows ---------------------------------------------------------------------------------------


def _pc_rows(index: Columns, moments: HeadMoments, pcs: Components, again: Columns | None) -> Columns:
    n_heads, n_pcs = pcs.r_q.shape
    n_q, n_k = (m.n.sum(-1).astype(np.int64).repeat(n_pcs) for m in (moments.q, moments.k))
    numbers = _numbers(pcs, _PC_NUMBERS) | {"eigengap": pcs.eigengap}
    of_pcs = None if again is None else {name: again[name] for name in PC_INTERVALS}
    ranges = interval_columns(PC_INTERVALS, numbers, of_pcs, usable_groups(moments))
    for name in ranges:
        if name.startswith(("r_q", "r_k")):
            ranges[name] = np.where(np.arange(n_pcs) == 0, ranges[name], np.nan)
    pc = np.tile(np.arange(n_pcs), n_heads)
    columns = repeated(index, n_pcs) | {"pc": pc, "n_q": n_q, "n_k": n_k}
    columns |= {name: values.reshape(-1) for name, values in (numbers | ranges).items()}
    columns["concordant"] = np.where(pcs.sign_anchored_on_k, np.nan, pcs.concordant).reshape(-1)
    columns["degenerate"] = pcs.degenerate.reshape(-1)
    # n rows span n − 1 dimensions about their mean; components beyond that do not exist.
    there = pc < n_q + n_k - 1
    return columns if there.all() else {name: values[there] for name, values in columns.items()}


def _axes_rows(index: Columns, pcs: Components) -> Columns:
    """The axes themselves: one row per head and component, with a column of vectors."""
    n_heads, n_pcs, d = pcs.axes.shape
    columns = repeated({name: index[name] for name in ("model", "layer", "head")}, n_pcs)
    return columns | {"pc": np.tile(np.arange(n_pcs), n_heads), "axis": pcs.axes.reshape(-1, d).astype(np.float32)}


def _head_rows(index: Columns, moments: HeadMoments, whole: HeadVariance, again: Columns | None) -> Columns:
    numbers = _numbers(whole, _HEAD_NUMBERS)
    numbers["amplification_window"] = whole.amplification * moments.window
    of_heads = None if again is None else {name: again[name] for name in HEAD_INTERVALS}
    ranges = interval_columns(HEAD_INTERVALS, numbers, of_heads, usable_groups(moments))
    for part in ENDS:
        ranges[f"amplification_window{part}"] = ranges[f"amplification{part}"] * moments.window
    return index | numbers | ranges


def _line_columns(
    lines: Sequence[tuple[float, Float[np.ndarray, "8"]]] | None, moments: HeadMoments, *, intervals: bool
) -> tuple[Columns, dict[str, Float[np.ndarray, "heads groups"]]]:
    """``lda_accuracy`` with its interval, and its replicates."""
    if lines is None:
        return {f"lda_accuracy{end}": np.full(len(moments.window), np.nan) for end in ("", *ENDS)}, {}
    value, again = np.array([one for one, _ in lines]), np.stack([left_out for _, left_out in lines])
    usable = usable_groups(moments) * ~np.isnan(again).any(-1, keepdims=True)
    numbers = {"lda_accuracy": value}
    again_filled = {"lda_accuracy": np.nan_to_num(again)} if intervals else None
    columns = numbers | interval_columns(LINE_INTERVAL, numbers, again_filled, usable)
    return columns, {"lda_accuracy": np.where(usable > 0, again, np.nan)} if intervals else {}


ENDS = ("_se", "_low", "_high")


def over_window(numbers: Columns, names: tuple[str, ...], window: Int[np.ndarray, "heads"]) -> Columns:
    """Biases over the whole window, with their intervals: what stays comparable when the window grows."""
    parts = [(f"{name}{end}", OVER_WINDOW[name] + end) for name in names for end in ("", *ENDS)]
    return {name: np.asarray(numbers[per_token] * window) for name, per_token in parts}


def _numbers(result: object, names: Mapping[str, object] | tuple[str, ...] | None = None) -> Columns:
    """The named attributes of a result, or all its fields."""
    chosen = names if names is not None else getattr(type(result), "__dataclass_fields__")  # noqa: B009
    return {name: getattr(result, name) for name in chosen}
