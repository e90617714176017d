"""How often 95% intervals hold the truth, on planted heads with random document effects, from strong to weak drift.

python -m benchmarks.coverage --heads 400
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from tests.helpers import head_data, heads_of, one_head, tables_of, with_intervals

from qkscope.analyses.causal import bias_causal
from qkscope.analyses.components import components, head_variance
from qkscope.analyses.distance import distance_curve, score_pairs
from qkscope.analyses.heldout import lda_accuracy
from qkscope.analyses.keypairs import key_pairs
from qkscope.analyses.meanfield import mean_field
from qkscope.analyses.pairplasticity import along, plasticity_over_window, reversible, spread_along
from qkscope.analyses.pca import HEADS_TABLE, QK_TABLE
from qkscope.analyses.plasticity import AP
from qkscope.analyses.rotation import ROTATED_TABLE
from qkscope.analyses.rotationmodel import linearity_r2, rotation_model
from qkscope.analyses.uncertainty import Scale, jackknife, usable_groups
from qkscope.core.headdata import HeadData
from qkscope.core.headmoments import N_BUCKETS, BucketMeans, HeadMoments, bucket_moments, bucket_width, group_moments
from qkscope.core.moments import Moments
from qkscope.core.planted import Law, PlantedHead, Ring, plant
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from qkscope.engine import Place, for_each

WINDOW = 2048
WIDTH = bucket_width(WINDOW)
OF_COMPONENTS = with_intervals(QK_TABLE)
OF_HEADS = with_intervals(HEADS_TABLE, "lda_accuracy")
OF_ROTATION = with_intervals(ROTATED_TABLE, "bias_causal")
DRIFTS = {"strong": 1.0, "moderate": 0.5, "weak": 0.1}


def coverage(n_heads: int, strength: float) -> tuple[dict[str, float], tuple[float, float]]:
    """Share of heads whose interval holds the population value; and mean r_q_a, r_k_a."""
    heads = planted(n_heads, strength)
    q, k = Moments.stack(h.truth.q for h in heads), Moments.stack(h.truth.k for h in heads)
    pcs, model = components(q, k), rotation_model(q, k)
    truths = {name: getattr(pcs, name)[:, 0] for name in OF_COMPONENTS}
    truths |= {name: getattr(head_variance(q, k, pcs), name) for name in OF_HEADS}
    truths |= {name: getattr(model, name) for name in OF_ROTATION if name != "linearity_r2"}
    truths["linearity_r2"] = linearity_r2(_bucket_truth(heads), model.a)
    tables = tables_of(heads_of(*heads, window=WINDOW), "pca", "rotation")
    frames = (tables["qk"].query("pc == 0"), tables["heads"], tables["rotated"])
    held = {}
    for frame, names in zip(frames, (OF_COMPONENTS, OF_HEADS, OF_ROTATION), strict=True):
        held |= {name: _held(frame[f"{name}_low"], truths[name], frame[f"{name}_high"]) for name in names}
    return held, (float(np.mean(model.r_q_a)), float(np.mean(model.r_k_a)))


def coverage_of_scores(n_heads: int, workers: int = 2) -> dict[str, float]:
    """The same, at strong drift, for columns that come from vectors: the causal bias, plasticity, the Q/K line."""
    chunks = [range(first, min(first + 20, n_heads)) for first in range(0, n_heads, 20)]
    ranges: dict[str, list[tuple[float, float, float]]] = {}
    for _, found in for_each(_ranges, chunks, Place(workers)):
        for name, rows in found.items():
            ranges.setdefault(name, []).extend(rows)
    return {name: _held(*(np.array(part) for part in zip(*rows, strict=True))) for name, rows in ranges.items()}


def _ranges(seeds: range) -> dict[str, list[tuple[float, float, float]]]:
    """(low, truth, high) of every column, head by head."""
    ranges: dict[str, list[tuple[float, float, float]]] = {}
    for head in planted(seeds.stop, 1.0, seeds.start):
        pair, moments = Pair(head.q, head.k), one_head(head.q, head.k, WINDOW)
        axes = components(head.truth.q, head.truth.k, 2).axes
        line = lda_accuracy(group_moments(head.q), group_moments(head.k), pair, axes)
        found = {
            "bias_causal": (_interval(moments, bias_causal(pair), Scale.LINEAR), _causal_truth(head)),
            "lda_accuracy": (_interval(moments, line, Scale.PROPORTION), _line_truth(head, axes)),
        }
        row = tables_of(head_data(moments, vectors=pair), "plasticity")["plasticity"].iloc[0]
        found |= {name: ((row[f"{name}_low"], row[f"{name}_high"]), value) for name, value in _ap_truth(head).items()}
        for name, ((low, high), value) in found.items():
            ranges.setdefault(name, []).append((low, value, high))
    return ranges | {"position_share_of_score": [_share_range(seed) for seed in seeds]}


def _interval(moments: HeadMoments, found: tuple[float, np.ndarray], scale: Scale) -> tuple[float, float]:
    """The interval of a value, from what it is with each document group left out."""
    interval = jackknife(np.array([found[0]]), found[1][None], usable_groups(moments)[None], scale)
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


def _bucket_truth(heads: list[PlantedHead]) -> BucketMeans:
    parts = [bucket_moments(_everywhere(head.truth.law_k), WINDOW) for head in heads]
    return BucketMeans.stack([BucketMeans(m.n, m.mean_x, m.mean_t) for m in parts])


def _causal_truth(head: PlantedHead) -> float:
    """Noise and document effects of queries and keys are independent, so the slope is that of the means."""
    return bias_causal(Pair(_everywhere(head.truth.law_q), _everywhere(head.truth.law_k)))[0]


def _ap_truth(head: PlantedHead) -> dict[str, float]:
    """Population moments of the queries of each bucket, and very many pairs of keys."""
    law, rng = head.truth.law_q, np.random.default_rng(7)
    means = bucket_moments(_everywhere(law), WINDOW)
    cov = means.cov_x + np.diag(law.frame.sigma**2 + law.frame.sigma_document**2)
    keys = key_pairs(head.truth.law_k.draw(200 * 64, 200, rng), WINDOW, N_BUCKETS, most=3000)
    pp = reversible(along(keys.delta, means.mean_x), spread_along(keys.delta, cov))
    ap = np.where(keys.n > 0, (pp * keys.weight).sum(-1) / np.maximum(keys.n, 1), np.nan)
    found = plasticity_over_window(ap, means.n, WINDOW)
    return {column.name: float(getattr(found, column.name)) for column in AP}


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


def _share_range(seed: int) -> tuple[float, float, float]:
    """The interval of position_share_of_score of a mean-field head with document effects, and the share itself."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((2, 8))

    def rows(documents: int) -> Pair:
        position = np.concatenate([np.sort(rng.choice(WINDOW, 40, replace=False)) for _ in range(documents)])
        document = np.repeat(np.arange(documents), 40)
        parts = []
        for mean in means:
            x = mean + rng.standard_normal((len(document), 8)) + 0.4 * rng.standard_normal((documents, 8))[document]
            z = ROPE.planes_of(x) * np.exp(1j * position[:, None] * ROPE.frequencies)
            parts.append(Rows(np.concatenate([z.real, z.imag], -1), position, document))
        return Pair(*parts)

    def head(pair: Pair) -> HeadData:
        unrotated = (ROPE.unrotated(part.x, part.position).mean(0) for part in (pair.q, pair.k))
        moments = replace(one_head(pair.q, pair.k, WINDOW), scaling=np.asarray(1.0))
        return head_data(moments, vectors=pair, rotary=HeadRotary(ROPE, *unrotated))

    row = tables_of(head(rows(32)), "distance")["distance"].iloc[0]
    many = head(rows(800))
    assert many.vectors is not None
    assert many.rotary is not None
    field = mean_field(many.rotary, many.moments.total_q, many.moments.total_k, 1.0)
    truth = distance_curve(score_pairs(many.vectors, 1.0), field, WINDOW).position_share_of_score
    return row["position_share_of_score_low"], truth, row["position_share_of_score_high"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=400)
    n_heads = parser.parse_args().heads
    results = {name: coverage(n_heads, strength) for name, strength in DRIFTS.items()}
    titles = [f"{name} drift (r_q_a {r[0]:.2f}, r_k_a {r[1]:.2f})" for name, (_, r) in results.items()]
    print("| column | " + " | ".join(titles) + " |")
    print("|---|" + "---|" * len(results))
    for column in next(iter(results.values()))[0]:
        print(f"| `{column}` | " + " | ".join(f"{held[column]:.1%}" for held, _ in results.values()) + " |")
    print("\n| column | strong drift |\n|---|---|")
    for column, held in coverage_of_scores(n_heads).items():
        print(f"| `{column}` | {held:.1%} |")


if __name__ == "__main__":
    main()
