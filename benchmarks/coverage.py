"""How often 95% intervals hold the truth, on planted heads with random document effects, from strong to weak drift.

python -m benchmarks.coverage --heads 400
"""

from __future__ import annotations

import argparse

import numpy as np
from tests.helpers import index_of, moments_of

from qkscope.analyses.headvariance import head_variance
from qkscope.analyses.pca import components
from qkscope.analyses.rotation import rotation
from qkscope.analyses.tabulate import HEAD_INTERVALS, PC_INTERVALS, ROTATION_INTERVALS, pca_tables, rotation_tables
from qkscope.core.moments import Moments
from qkscope.core.planted import Ring, plant

WINDOW = 2048
DRIFTS = {"strong": 1.0, "moderate": 0.5, "weak": 0.1}


def coverage(n_heads: int, strength: float) -> tuple[dict[str, float], tuple[float, float]]:
    """Share of heads whose interval holds the population value; and mean r_q_a, r_k_a."""
    rng = np.random.default_rng(1)
    heads = [
        plant(
            16,
            n=4096,
            documents=32,
            window=WINDOW,
            rings=[Ring(0.02, 1.0, 1.0)],
            sigma=np.linspace(0.5, 1.5, 16),
            sigma_document=0.4,
            mu_q=(rng.normal(2, 1), 3.0),
            mu_k=(rng.normal(0, 1), -3.0),
            alpha_q=5e-4 * strength,
            alpha_k=1e-3 * strength,
            seed=seed,
        )
        for seed in range(n_heads)
    ]
    moments = moments_of(*heads, window=WINDOW)
    q, k = Moments.stack(h.truth.q for h in heads), Moments.stack(h.truth.k for h in heads)
    pcs, model = components(q, k), rotation(q, k)
    truths = ((pcs, PC_INTERVALS), (head_variance(q, k, pcs), HEAD_INTERVALS), (model, ROTATION_INTERVALS))
    tables = pca_tables(index_of(n_heads), moments).frames | rotation_tables(index_of(n_heads), moments).frames
    frames = (tables["qk"].query("pc == 0"), tables["heads"], tables["rotated"])
    held = {}
    for frame, (truth, names) in zip(frames, truths, strict=True):
        for name in names:
            value = getattr(truth, name)
            value = value[:, 0] if value.ndim == 2 else value
            held[name] = float(((frame[f"{name}_low"] <= value) & (value <= frame[f"{name}_high"])).mean())
    return held, (float(np.mean(model.r_q_a)), float(np.mean(model.r_k_a)))


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


if __name__ == "__main__":
    main()
