"""Coverage of 95% intervals on planted heads with random document effects, from strong to weak drift.

python -m benchmarks.coverage --heads 400

Means over heads: python -m benchmarks.meancoverage
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import numpy as np
from tests.helpers import head_data, one_head, tables_of, with_intervals

from qkscope.analyses.causal import CausalBias, causal_bias
from qkscope.analyses.components import components, head_variance
from qkscope.analyses.distancecurve import distance_curve, score_pairs
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.meanfield import MeanField
from qkscope.analyses.pairplasticity import along, plasticity_over_window, reversible
from qkscope.analyses.pca import HEADS_TABLE, QK_TABLE
from qkscope.analyses.plasticity import AP
from qkscope.analyses.position import distances, recency
from qkscope.analyses.rotation import ROTATED_TABLE
from qkscope.analyses.rotationmodel import rotation_model
from qkscope.analyses.uncertainty import Scale, jackknife, usable_groups
from qkscope.core.bucketspread import spread_along
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import (
    N_BUCKETS,
    HeadMoments,
    bucket_moments,
    bucket_width,
    group_moments,
    undone_sums,
)
from qkscope.core.keypairs import key_pairs
from qkscope.core.moments import Moments
from qkscope.core.planted import Law, PlantedHead, Ring, plant
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from qkscope.core.visible import VisibleKeys
from qkscope.engine import ExecutionTarget, for_each
from qkscope.headids import TERMS

WINDOW = 2048
SIGHT = VisibleKeys(WINDOW)
WIDTH = bucket_width(WINDOW)
OF_COMPONENTS = with_intervals(QK_TABLE)
OF_HEADS = with_intervals(HEADS_TABLE, "lda_accuracy")
FROM_VECTORS = ("bias_causal", "bias_causal_window", "bias_causal_by_query")
OF_ROTATION = with_intervals(ROTATED_TABLE, *FROM_VECTORS)
PRODUCTS = [
    c for table in (HEADS_TABLE, ROTATED_TABLE) for c in table.columns if c.per_token and c.name not in FROM_VECTORS
]
DRIFTS = {"no drift": 0.0, "slight": 0.15, "moderate": 0.6, "clear": 1.2, "strong": 18.0}


@dataclass(frozen=True)
class Coverage:
    """Coverage of the intervals at one level of drift."""

    held: dict[str, float]
    """By column, over all heads."""
    unflagged: dict[str, float]
    """The same over heads whose row does not carry ``weak_axis``; NaN if there are none."""
    weak: float
    """Share of heads with that flag."""
    r: tuple[float, float]
    """Mean r_q_a and r_k_a of the truth."""


def coverage(n_heads: int, strength: float, *, vectors: bool = True) -> Coverage:
    """Share of heads whose interval holds the population value; without ``vectors`` the flags know no null."""
    heads = planted(n_heads, strength)
    q, k = Moments.stack(h.truth.q for h in heads), Moments.stack(h.truth.k for h in heads)
    pcs, model = components(q, k), rotation_model(q, k)
    truths = {name: getattr(pcs, name)[:, 0] for name in OF_COMPONENTS}
    truths |= {name: getattr(head_variance(q, k, pcs), name) for name in OF_HEADS if name != "amplification_window"}
    truths |= {name: getattr(model, name) for name in OF_ROTATION if name in dir(model)}
    truths |= {column.name: WINDOW * truths[column.per_token] for column in PRODUCTS}
    data = [
        head_data(one_head(h.q, h.k, WINDOW), number, vectors=Pair(h.q, h.k) if vectors else None)
        for number, h in enumerate(heads)
    ]
    tables = tables_of(data, "pca", "rotation")
    weak = tables["rotated"]["flags"].str.contains("weak_axis").to_numpy()
    held, unflagged = {}, {}
    frames = (tables["qk"].query("pc == 0"), tables["heads"], tables["rotated"])
    for frame, names in zip(frames, (OF_COMPONENTS, OF_HEADS, OF_ROTATION), strict=True):
        for name in names:
            inside = (frame[f"{name}_low"].to_numpy() <= truths[name]) & (
                truths[name] <= frame[f"{name}_high"].to_numpy()
            )
            held[name] = float(inside.mean())
            unflagged[name] = float(inside[~weak].mean()) if not weak.all() else float("nan")
    return Coverage(held, unflagged, float(weak.mean()), (float(np.mean(model.r_q_a)), float(np.mean(model.r_k_a))))


def coverage_of_scores(n_heads: int, workers: int = 2) -> dict[str, float]:
    """The same, at clear drift, for columns that come from vectors: the causal bias, plasticity, the Q/K line."""
    chunks = [range(first, min(first + 20, n_heads)) for first in range(0, n_heads, 20)]
    ranges: dict[str, list[tuple[float, float, float]]] = {}
    for _, found in for_each(_ranges, chunks, ExecutionTarget(workers)):
        for name, rows in found.items():
            ranges.setdefault(name, []).extend(rows)
    return {name: _held(*(np.array(part) for part in zip(*rows, strict=True))) for name, rows in ranges.items()}


def _ranges(seeds: range) -> dict[str, list[tuple[float, float, float]]]:
    """(low, truth, high) of every column, head by head."""
    ranges: dict[str, list[tuple[float, float, float]]] = {}
    for head in planted(seeds.stop, DRIFTS["clear"], seeds.start):
        pair, moments = Pair(head.q, head.k), one_head(head.q, head.k, WINDOW)
        axes = components(head.truth.q, head.truth.k, 2).axes
        line = lda_accuracy(group_moments(head.q), group_moments(head.k), pair, axes)
        causal, truth = causal_bias(pair, SIGHT), _causal_truth(head)
        found = {
            "bias_causal": (_interval(moments, causal.pooled, Scale.LINEAR), truth.pooled[0]),
            "bias_causal_by_query": (_interval(moments, causal.by_query, Scale.LINEAR), truth.by_query[0]),
            "lda_accuracy": (_interval(moments, np.append(*line), Scale.PROPORTION), _line_truth(head, axes)),
        }
        row = tables_of(head_data(moments, vectors=pair, q_buckets=bucket_moments(head.q, WINDOW)), "plasticity")[
            "plasticity"
        ].iloc[0]
        found |= {name: ((row[f"{name}_low"], row[f"{name}_high"]), value) for name, value in _ap_truth(head).items()}
        for name, ((low, high), value) in found.items():
            ranges.setdefault(name, []).append((low, value, high))
    for seed in seeds:
        for name, found_range in _field_ranges(seed).items():
            ranges.setdefault(name, []).append(found_range)
    return ranges


def _interval(moments: HeadMoments, found: np.ndarray, scale: Scale) -> tuple[float, float]:
    """The interval of a value, which is followed by what it is with each document group left out."""
    interval = jackknife(found[:1], found[None, 1:], usable_groups(moments)[None], scale)
    return float(interval.low[0]), float(interval.high[0])


def _held(low: np.ndarray, value: np.ndarray, high: np.ndarray) -> float:
    return float(((low <= value) & (value <= high)).mean())


def planted(n_heads: int, strength: float, first: int = 0) -> list[PlantedHead]:
    """Heads with rings, uneven noise and document effects, number ``first`` and on; ``strength`` scales their drift."""
    rng = np.random.default_rng(1)
    means = [(rng.normal(2, 1), rng.normal(0, 1)) for _ in range(n_heads)]
    return [
        plant(
            16,
            n=4096,
            documents=32,
            window=WINDOW,
            rings=[Ring(0.02, 1.0, 1.0)],
            sigma=np.linspace(0.5, 1.5, 16),
            sigma_document=0.4,
            mu_q=(means[seed][0], 3.0),
            mu_k=(means[seed][1], -3.0),
            alpha_q=5e-4 * strength,
            alpha_k=1e-3 * strength,
            seed=seed,
        )
        for seed in range(first, n_heads)
    ]


# ---- what is true of a planted head -------------------------------------------------------------


def _everywhere(law: Law) -> Rows:
    """The mean at every position of one document."""
    t = np.arange(WINDOW)
    return Rows(law.mean_at(t.astype(float)), t, np.zeros(WINDOW, dtype=int))


def _causal_truth(head: PlantedHead) -> CausalBias:
    """Noise and document effects of queries and keys are independent, so the slope is that of the means."""
    rng, means = np.random.default_rng(6), []
    for law in (head.truth.law_q, head.truth.law_k):
        drawn = law.draw(128 * 200, 200, rng)
        means.append(Rows(law.mean_at(drawn.position.astype(float)), drawn.position, drawn.example_id))
    return causal_bias(Pair(*means), SIGHT)


def _ap_truth(head: PlantedHead) -> dict[str, float]:
    """Population moments of the queries of each bucket, and very many pairs of keys."""
    law, rng = head.truth.law_q, np.random.default_rng(7)
    means = bucket_moments(_everywhere(law), WINDOW)
    cov = means.cov_x + np.diag(law.frame.sigma**2 + law.frame.sigma_document**2)
    keys = key_pairs(head.truth.law_k.draw(200 * 64, 200, rng), WINDOW, N_BUCKETS, most=3000)
    pp = reversible(along(keys.delta, means.mean_x), spread_along(keys.delta, cov))
    ap = np.where(keys.n > 0, (pp * keys.weight).sum(-1) / np.maximum(keys.n, 1), np.nan)
    found = plasticity_over_window(ap, means.n, WINDOW)
    return {name: float(getattr(found, name)) for name in AP_NAMES}


def _line_truth(head: PlantedHead, axes: np.ndarray) -> float:
    """The population's line on very many new vectors."""
    q, k = head.truth.q.project(axes), head.truth.k.project(axes)
    w = np.linalg.solve(q.cov_x + k.cov_x, q.mean_x - k.mean_x)
    threshold = w @ (q.mean_x + k.mean_x) / 2
    rng = np.random.default_rng(8)
    right = [
        (law.draw(40_000, 400, rng).x @ axes.T @ w > threshold).mean() for law in (head.truth.law_q, head.truth.law_k)
    ]
    return float(right[0] + 1 - right[1]) / 2


ROPE = Rope(np.array([1.0, 0.2, 0.03, 0.002]))
EFFECT = 0.4
"""Standard deviation of document effects."""


FROM_MANY = {f"part_{term}": "scores" for term in TERMS} | {"ap_fixed_overall": "plasticity"}
"""Columns whose truth is their value over very many documents, and their tables."""
AP_NAMES = tuple(column.name for column in AP if column.name not in FROM_MANY)
FIELD_COLUMNS = ("position_share_of_score", "decay_measured", "content_offset", "position_share_q", "position_share_k",
                 "position_share", "decay", "decay_r2", "curve_range", "part_position", "part_key", "part_query",
                 "part_content", "ap_fixed_overall")  # fmt: skip


def _field_ranges(seed: int) -> dict[str, tuple[float, float, float]]:
    """(low, truth, high) of what follows from undone means, for a mean-field head with document effects."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((2, 8))
    row = {}
    for name, frame in tables_of(_field_head(means, 32, rng), "position", "distance", "scores", "plasticity").items():
        if name in ("position", "distance", "scores", "plasticity"):
            row |= frame.iloc[0].to_dict()
    truth = _field_truth(means, rng)
    return {name: (row[f"{name}_low"], truth[name], row[f"{name}_high"]) for name in FIELD_COLUMNS}


def _field_head(means: np.ndarray, documents: int, rng: np.random.Generator, noise: float = 1.0) -> HeadData:
    position = np.concatenate([np.sort(rng.choice(WINDOW, 40, replace=False)) for _ in range(documents)])
    document, parts = np.repeat(np.arange(documents), 40), []
    for mean in means:
        effect = EFFECT * rng.standard_normal((documents, 8))[document]
        x = mean + noise * (rng.standard_normal((len(document), 8)) + effect)
        z = ROPE.planes_of(x) * np.exp(1j * position[:, None] * ROPE.frequencies)
        parts.append(Rows(np.concatenate([z.real, z.imag], -1), position, document))
    moments = replace(one_head(*parts, WINDOW), scaling=np.asarray(1.0))
    rotary = HeadRotary(ROPE, *(undone_sums(rows, ROPE) for rows in parts))
    return head_data(moments, vectors=Pair(*parts), rotary=rotary, q_buckets=bucket_moments(parts[0], WINDOW))


def _field_truth(means: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
    """The shares and the curve from the planted means; what pairs are needed for, from very many documents."""
    many = _field_head(means, 400, rng)
    assert many.vectors is not None
    assert many.rotary is not None
    undone = ROPE.planes_of(means)
    field = MeanField(ROPE, np.tile(undone[0] * undone[1].conj(), (9, 1)), np.zeros(9), 1.0)
    at = distances(WINDOW // 2)
    curve = recency(field.curves(at)[:1], at)
    pairs = distance_curve(score_pairs(many.vectors, 1.0, SIGHT), field, WINDOW // 2)
    plain = np.exp(1j * np.arange(WINDOW)[:, None] * ROPE.frequencies).mean(0) * undone
    moved = (np.abs(undone) ** 2).sum(-1) - (np.abs(plain) ** 2).sum(-1)
    content = 8 * (1 + EFFECT**2)
    of_many = tables_of(many, "scores", "plasticity")
    still = _field_head(means, 200, rng, noise=0.0).vectors
    assert still is not None
    without_noise = distance_curve(score_pairs(still, 1.0, SIGHT), field, WINDOW // 2)
    return {
        "position_share_of_score": float(pairs.position_share_of_score[0]),
        "decay_measured": float(without_noise.decay_measured[0]),
        "content_offset": 0.0,
        "position_share_q": float(moved[0] / (moved[0] + content)),
        "position_share_k": float(moved[1] / (moved[1] + content)),
        "position_share": float(moved.sum() / (moved.sum() + 2 * content)),
        **{name: float(value[0]) for name, value in vars(curve).items()},
        **{name: float(of_many[table].iloc[0][name]) for name, table in FROM_MANY.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=400)
    n_heads = parser.parse_args().heads
    results = {name: coverage(n_heads, strength) for name, strength in DRIFTS.items()}
    titles = [
        f"{name} (r_q_a {found.r[0]:.2f}, r_k_a {found.r[1]:.2f}; weak_axis {found.weak:.0%})"
        for name, found in results.items()
    ]
    print("| column | " + " | ".join(titles) + " |")
    print("|---|" + "---|" * len(results))
    for column in next(iter(results.values())).held:
        cells = [f"{found.held[column]:.1%} / {found.unflagged[column]:.1%}" for found in results.values()]
        print(f"| `{column}` | " + " | ".join(cells) + " |", flush=True)
    print("\n| column | clear drift |\n|---|---|")
    for column, held in coverage_of_scores(n_heads).items():
        print(f"| `{column}` | {held:.1%} |")


if __name__ == "__main__":
    main()
