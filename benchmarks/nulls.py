"""How often noise without drift passes for drift: three ways to draw positions that do not depend on content.

python -m benchmarks.nulls --heads 200
"""

from __future__ import annotations

import argparse

import numpy as np
from tests.analyses.test_nulls import like_text, null_of, position_r, undrifted

from qkscope.analyses.nulls import DRAWS, QUANTILE
from qkscope.core.planted import plant
from qkscope.core.rows import Pair, Rows

LIKENESS = (0.0, 0.9, 0.95, 0.98, 0.995)


def shifted(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """T → (t + s) mod length, with an s for each document."""
    length = np.bincount(rows.example_id, minlength=1) * 0
    np.maximum.at(length, rows.example_id, rows.position + 1)
    by = (rng.random(len(length)) * length).astype(int)
    return (rows.position + by[rows.example_id]) % length[rows.example_id]


def shuffled(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Positions of all rows in any order."""
    return rng.permutation(rows.position)


def limit(pair: Pair, draw) -> float:
    """The 95th percentile of position_r over drawn positions."""
    rows, rng, found = pair.q.concat(pair.k), np.random.default_rng(0), []
    x = rows.x - rows.x.mean(0)
    cov = x.T @ x / len(x)
    for _ in range(DRAWS):
        t = draw(rows, rng)
        c = (t - t.mean()) @ x / len(x)
        found.append(c @ c / np.sqrt(c @ cov @ c * t.var()))
    return float(np.quantile(found, QUANTILE))


def main() -> None:
    """Print the table of docs/method.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=200)
    n_heads = parser.parse_args().heads
    print("| correlation of neighbours | read backwards | shifted round | shuffled |\n|---|---|---|---|")
    for likeness in LIKENESS:
        rng, passed = np.random.default_rng(int(1000 * likeness)), np.zeros(3)
        for _ in range(n_heads):
            pair = Pair(like_text(rng, likeness), like_text(rng, likeness))
            limits = null_of(pair), limit(pair, shifted), limit(pair, shuffled)
            passed += position_r(pair) > np.array(limits)
        print(f"| {likeness} | " + " | ".join(f"{share:.1%}" for share in passed / n_heads) + " |", flush=True)
    ratios = []
    for seed in range(n_heads):
        head = plant(16, alpha_q=4e-3, alpha_k=4e-3, n=2000, documents=32, sigma_document=0.5, seed=seed)
        pair = Pair(head.q, head.k)
        ratios.append(null_of(pair) / null_of(undrifted(pair)))
    low, middle, high = np.quantile(ratios, [0, 0.5, 1])
    print(f"\nnull_r95 of a strongly drifting head over that of the same head without its drift: {middle:.3f} in the ")
    print(f"median, {low:.3f} to {high:.3f} over {n_heads} heads")


if __name__ == "__main__":
    main()
