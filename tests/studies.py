"""Studies of plausible made-up numbers, in the shape of the published ones: for tests of pictures, and for timing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from qkscope.analyses.components import TAXONOMY, taxonomy
from qkscope.config import StudyRunConfig
from qkscope.headids import TERMS
from qkscope.results.side import PASSAGES, POINTS
from qkscope.results.study import Study, build

MODELS = {
    "qwen3-0.6b": ("Qwen3", 28), "qwen3-1.7b": ("Qwen3", 28), "qwen3-4b": ("Qwen3", 36), "qwen3-8b": ("Qwen3", 36),
    "qwen3-14b": ("Qwen3", 40), "llama3.2-1b": ("Llama 3.2", 16), "llama3.2-3b": ("Llama 3.2", 28),
    "llama3.2-11b": ("Llama 3.2", 32), "ministral3-3b": ("Ministral3", 26), "ministral3-8b": ("Ministral3", 34),
    "ministral3-14b": ("Ministral3", 40),
}  # fmt: skip
CHECKPOINTS = [
    ("stage1-step-40000", "stage 1", 4096), ("stage1-step-1200000", "stage 1", 4096),
    ("stage1-step-2400000", "stage 1", 4096), ("stage1-step-3440000", "stage 1", 4096),
    ("stage2-step-4200000", "stage 2", 4096), ("stage3-step-4720000", "stage 3", 4096),
    ("lc-4k-to-32k-step-4000", "LC 4K→32K", 32768), ("lc-4k-to-32k-step-20000", "LC 4K→32K", 32768),
    ("lc-32k-to-64k-step-4000", "LC 32K→64K", 65536), ("lc-32k-to-64k-step-20000", "LC 32K→64K", 65536),
]  # fmt: skip


def write_model(
    folder: Path,
    model: str,
    *,
    family: str = "",
    layers: int = 28,
    heads: int = 300,
    window: int = 4096,
    seed: int = 0,
    nope: bool = False,
    points: int = 0,
) -> Path:
    """Tables of one made-up model; ``points`` heads get vectors."""
    rng = np.random.default_rng([seed, len(model), sum(map(ord, model))])
    per_layer = -(-heads // layers)
    index = pd.DataFrame({"layer": np.arange(heads) // per_layer, "head": np.arange(heads) % per_layer})
    index = index.assign(model=model, family=family, k_head=index["head"] // 2)
    is_nope = index["layer"] % 4 == 3 if nope else pd.Series(False, index.index)
    depth = index["layer"] / max(layers - 1, 1)
    r_q = np.clip(rng.normal(0.8, 0.12, heads), 0, 0.99)
    r_k = np.clip(rng.normal(0.6 - 0.3 * depth, 0.3), -0.95, 0.98)
    share = np.clip(rng.normal(0.34, 0.08, heads), 0.05, 0.9)
    kinds = np.array(TAXONOMY)[taxonomy(r_q, r_k)]
    qk = pd.concat(
        [
            index.assign(
                pc=pc,
                explained_variance=share if pc == 0 else 0.05 * 0.85**pc,
                r_q=r_q if pc == 0 else rng.uniform(0, 0.3, heads),
                r_k=r_k if pc == 0 else rng.uniform(-0.3, 0.3, heads),
                taxonomy_published=kinds,
            )
            for pc in range(10)
        ]
    )
    posvar = share * r_q**2
    notes = {"nope": is_nope.to_numpy(), "sliding_window": np.nan}
    table = index.assign(
        taxonomy_published=kinds, posvar_q_published=posvar, posvar_k_published=share * r_k**2, posvar_q=posvar / 2.5,
        posvar_k=share * r_k**2 / 2, positional_overhead=posvar / 2.5, posvar_q_pc0_share=0.9, posvar_k_pc0_share=0.74,
        amplification=rng.normal(1e-3, 3e-4, heads), amplification_window=rng.normal(4, 1, heads),
        fisher=rng.gamma(4, 10, heads), separation=rng.normal(47, 8, heads),
        lda_accuracy_gaussian=rng.uniform(0.98, 1, heads),
        ap_first20=(first := rng.uniform(0.4, 0.8, heads)), ap_last20=first - 0.1, ap_overall=first - 0.05, ap_drop=0.1,
        active_planes=rng.integers(18, 30, heads), active_share=rng.uniform(0.44, 0.9, heads), **notes,
    )  # fmt: skip
    table = table.assign(ap_fixed_overall=first - 0.2, head_class=np.where(r_q > 0.8, "position", "mixed"))
    separation = np.clip(rng.normal(0.32, 0.08, heads), 0.05, 0.9)
    slope = 16.0 / window
    alpha_k = np.abs(rng.normal(slope, 0.3 * slope, heads)) * np.where(rng.random(heads) < 0.01, -1, 1)
    mu_q_a = rng.normal(4.5, 1.0, heads) * (1 + (separation - 0.32) * (2 if "qwen" in model else -2))
    rotated = index.assign(
        window=window, position_r=0.8, r_q_a=np.clip(rng.normal(0.74, 0.1, heads), -1, 1),
        r_k_a=np.clip(rng.normal(0.87, 0.06, heads), -1, 1), alpha_q=alpha_k / 1.8 * rng.lognormal(0, 0.3, heads),
        alpha_k=alpha_k, mu_q_a=mu_q_a, separation_strength=separation, var_frac_a=rng.uniform(0.05, 0.15, heads),
        var_frac_b=rng.uniform(0.1, 0.4, heads), bias_strength=mu_q_a * alpha_k,
        bias_full=2 * mu_q_a * alpha_k, omega=1e-4, omega_r_squared=0.6, **notes,
    )  # fmt: skip
    rotated = rotated.assign(
        plane_var_fraction=rotated["var_frac_a"] + rotated["var_frac_b"],
        bias_window=rotated["bias_strength"] * window,
        bias_full_window=rotated["bias_full"] * window,
    )
    for name, column in (("qk", "r_q"), ("heads", "posvar_q"), ("rotated", "r_k_a")):
        frame = {"qk": qk, "heads": table, "rotated": rotated}[name]
        frame[f"{column}_low"], frame[f"{column}_high"] = frame[column] - 0.02, frame[column] + 0.02
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    buckets = pd.concat([index.assign(q_bucket=b, q_position=(b + 0.5) * window / 16, bucket_width=window // 16,
                                      n_queries=900, n_pairs=256, ap=table["ap_first20"] - 0.01 * b, ap_se=0.02,
                                      ap_published=0.7, ap_fixed=table["ap_first20"] - 0.15)
                         for b in range(1, 16)])  # fmt: skip
    buckets.to_parquet(folder / "plasticity.parquet", index=False)
    pair_rows(model, family, layers, window).to_parquet(folder / "plasticity_pairs.parquet", index=False)
    if points:
        (folder / "points.parquet").write_bytes(POINTS.content(folder, [make_points(index.head(points), window, rng)]))
        planes(index.head(points), rng).to_parquet(folder / "planes.parquet", index=False)
        (folder / "passage.parquet").write_bytes(PASSAGES.content(folder, [make_passage(index.head(points), rng)]))
    return folder


PASSAGE = ("The", " light", "</script>", " & ", "\n", "<b>", " again", " the", " light", " out", " there", ".")
"""Tokens of a made-up passage, some of them hostile."""


def make_passage(index: pd.DataFrame, rng: np.random.Generator, tokens: Sequence[str] = PASSAGE) -> pd.DataFrame:
    """Scores of every pair of tokens, at random, the position term falling with the distance."""
    query, key = np.tril_indices(len(tokens))
    rows = pd.DataFrame({"q_token": query, "k_token": key, "text": [tokens[i] for i in key], "unit": 0.25})
    frames = []
    for head in index.itertuples():
        terms = {term: rng.integers(-40, 40, len(rows)) for term in ("key", "query", "content")}
        named = {"model": head.model, "layer": head.layer, "head": head.head}
        frames.append(rows.assign(**named, position=np.maximum(60 - 8 * (query - key), -120), **terms))
    return pd.concat(frames, ignore_index=True)


def add_scores(folder: Path, fall: float, seed: int = 0) -> None:
    """Add parts of scores to a made-up model's heads, and distance curves that fall by so much per doubling."""
    rng = np.random.default_rng(seed)
    heads = pd.read_parquet(folder / "heads.parquet")
    parts = rng.dirichlet([2.0, 1.0, 1.0, 2.0], len(heads))
    largest = np.array(TERMS)[parts.argmax(axis=1)]
    falls = fall + 0.05 * rng.standard_normal(len(heads))
    heads = heads.assign(head_class=largest, decay=falls, **{f"part_{t}": parts[:, i] for i, t in enumerate(TERMS)})
    heads.to_parquet(folder / "heads.parquet", index=False)
    low = 2.0 ** np.arange(8)
    curves = [
        pd.DataFrame({"model": row.model, "family": row.family, "layer": row.layer, "head": row.head,
                      "k_head": row.k_head, "distance_low": low, "distance_high": 2 * low, "n_pairs": 10,
                      "measured": -own * np.arange(8) + 0.1, "measured_se": 0.05, "predicted": -own * np.arange(8)})
        for row, own in zip(heads.itertuples(), falls, strict=True)
    ]  # fmt: skip
    pd.concat(curves, ignore_index=True).to_parquet(folder / "distance.parquet", index=False)


def pair_rows(model: str, family: str, layers: int, window: int) -> pd.DataFrame:
    """Plasticity of pairs by octaves of distance."""
    octaves = [2**i for i in range(4, int(np.log2(window)))]
    cells = [(a, b) for a in octaves for b in octaves]
    return pd.DataFrame(
        [
            {"model": model, "family": family, "layer": layer, "inter_key": a, "key_to_query": b, "n_pairs": 10,
             "ap": 0.9 - 0.03 * np.log2(a), "ap_published": 0.8}
            for layer in range(layers)
            for a, b in cells
        ]
    )  # fmt: skip


def make_points(index: pd.DataFrame, window: int, rng: np.random.Generator, rows: int = 400) -> pd.DataFrame:
    """Two drifting clouds and 30 rings."""
    parts = []
    for _, head in index.iterrows():
        for kind, side in (("q", 4.0), ("k", -4.0)):
            t = np.sort(rng.integers(0, window, rows))
            drift = 8 * t / window
            columns = {
                "pc0": side + drift + rng.normal(0, 1, rows),
                "pc1": rng.normal(0, 2, rows),
                "a": drift + rng.normal(0, 1, rows),
                "b": side + rng.normal(0, 1, rows),
            }
            for plane in range(30):
                angle = t * 10000 ** (-plane / 30) + rng.normal(0, 0.3, rows)
                radius = 3 * 0.95**plane + rng.normal(0, 0.3, rows)
                columns |= {f"svd_{2 * plane}": radius * np.cos(angle), f"svd_{2 * plane + 1}": radius * np.sin(angle)}
            frame = pd.DataFrame(columns).astype(np.float32)
            where = {name: head[name] for name in ("model", "layer", "head")}
            parts.append(frame.assign(**where, kind=kind, example_id=0, position=t))
    return pd.concat(parts, ignore_index=True)


def planes(index: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    parts = [
        index.assign(view="svd", plane=plane, var_share=0.06 * 0.95**plane, angle_r=rng.uniform(0.3, 1, len(index)),
                     frequency=10000 ** (-plane / 30), active=plane < 25, ring=0.2, qk_accuracy=0.5)
        for plane in range(30)
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def published_shape(folder: Path, heads: int = 300, points: int = 4) -> Study:
    """11 models and 10 checkpoints, as published."""
    entries = []
    for i, (model, (family, layers)) in enumerate(MODELS.items()):
        write_model(
            folder / model, model, family=family, layers=layers, heads=heads, window=131072, seed=i, points=points
        )
        entries.append(StudyRunConfig(path=folder / model))
    for i, (name, phase, window) in enumerate(CHECKPOINTS):
        write_model(
            folder / name, name, family="SmolLM3", layers=36, heads=heads, window=window, seed=100 + i, nope=True
        )
        entries.append(StudyRunConfig(path=folder / name, phase=phase, step=float(name.split("-")[-1]), window=window))
    return build(entries, "The published study's shape")
