"""The demonstration dataset: 48 planted heads, which cover every class of the taxonomy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qkscope.core.planted import PlantedHead, Ring, plant
from qkscope.core.rows import Rows
from qkscope.files.dataset import write_dataset
from qkscope.headids import HeadId

N_LAYERS, N_QUERY_HEADS, Q_PER_KV = 6, 8, 2
PLANTED_TITLE = "Demonstration: 48 planted heads"
D, WINDOW, _DOCUMENTS, _ROWS = 64, 8192, 32, 3072


def write_demo_dataset(folder: str | os.PathLike[str], seed: int = 0) -> Path:
    """Plant 6 layers of 8 query and 4 key heads; the drift weakens with depth, so that every class occurs."""
    return write_dataset(folder, _heads(seed), q_per_kv=Q_PER_KV, window=WINDOW, scaling=D**-0.5)


def _heads(seed: int) -> Iterator[tuple[HeadId, Rows]]:
    for layer in range(N_LAYERS):
        for key in range(N_QUERY_HEADS // Q_PER_KV):
            rng = np.random.default_rng([seed, layer, key])
            # One seed per key head: its query heads share planes and keys, as in grouped-query attention.
            group = int(rng.integers(2**31))
            drift = 2.0 ** -rng.uniform(0, 1.2 * layer)
            key_drift = drift * rng.choice([1.0, 1.0, 0.15])
            for number in range(Q_PER_KV):
                planted = _plant(rng.normal(2.5, 1.2), drift * rng.uniform(0.7, 1.3), key_drift, group)
                yield HeadId(layer, key * Q_PER_KV + number, "q"), planted.q
            yield HeadId(layer, key, "k"), planted.k


def _plant(mu_q_a: float, drift: float, key_drift: float, group: int) -> PlantedHead:
    rng = np.random.default_rng(group)
    rings = [Ring(float(f), 2.0, 2.0, *rng.uniform(0, 2 * np.pi, 2).tolist()) for f in np.geomspace(0.003, 1.0, 6)]
    return plant(
        D,
        mu_q=(mu_q_a, 4.0),
        mu_k=(float(rng.normal(-1.0, 0.5)), -4.0),
        alpha_q=8.0 * drift / WINDOW,
        alpha_k=14.0 * key_drift / WINDOW,
        sigma=np.linspace(0.6, 1.4, D),
        sigma_document=0.25,
        rings=rings,
        n=_ROWS,
        documents=_DOCUMENTS,
        window=WINDOW,
        seed=group,
    )
