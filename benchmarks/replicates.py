"""Compare standard errors from fast replicates with those of full decompositions.

    python -m benchmarks.replicates --heads 24

Planted heads of three spectra: a steady fall, nearly flat (many near ties), and one like a model's.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

import numpy as np
from tests.helpers import one_head, tables_of

from qkscope.core.headmoments import HeadMoments
from qkscope.core.planted import Ring, plant

SPECTRA = {
    "falling": np.geomspace(2, 0.3, 64),
    "nearly flat": np.linspace(1.5, 0.5, 64),
    "like a head": np.sqrt(np.concatenate([[34, 4.9, 4.9, 3.5, 3.5], np.geomspace(2.7, 0.05, 59)])),
}
RINGS = [Ring(f, 1.5, 1.5) for f in (0.001, 0.01, 0.1)]


def standard_errors(moments: HeadMoments) -> dict[str, np.ndarray]:
    """Every column X_se of one head."""
    frames = tables_of(moments, "pca", "rotation")
    tables = [frames[name] for name in ("qk", "heads", "rotated")]
    return {c: frame[c].to_numpy() for frame in tables for c in frame.columns if c.endswith("_se")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=24, help="of each spectrum")
    n_heads = parser.parse_args().heads
    for name, sigma in SPECTRA.items():
        worst: dict[str, float] = {}
        for seed in range(n_heads):
            head = plant(64, n=3000, documents=32, sigma=sigma, rings=RINGS, seed=seed)
            moments = one_head(head.q, head.k)
            fast = standard_errors(moments)
            with patch("qkscope.core.eigenupdate.NEAR_LIMIT", -1.0):
                full = standard_errors(moments)
            for column, values in fast.items():
                apart = np.abs(values / full[column] - 1)
                worst[column] = max(worst.get(column, 0.0), float(np.nanmax(apart, initial=0.0)))
        column = max(worst, key=lambda c: worst[c])
        print(f"{name:<12} {n_heads} heads, {len(worst)} columns: at most {worst[column]:.1e} ({column})", flush=True)


if __name__ == "__main__":
    main()
