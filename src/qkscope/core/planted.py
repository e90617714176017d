"""Synthetic heads whose axes, slopes and rings are known: ground truth for tests, docs and the demo.

A planted head draws, for class Q (and for K with its own numbers), at position t of document D

    x = μ^a a + μ^b b + α (t − t̄) a + Σ_rings r (cos(ωt + φ) u + sin(ωt + φ) v) + σ_doc ε_D + σ ε

with t uniform on 0 … window − 1 and t̄ its mean. The truth has the population moments of that law, so every
moment-based column has an exact expected value: the analysis of the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from qkscope.core.moments import Moments
from qkscope.core.rows import Rows


@dataclass(frozen=True)
class Ring:
    """A circle with a given frequency (radians per token) in its own plane, as RoPE produces."""

    frequency: float
    radius_q: float
    radius_k: float
    phase_q: float = 0.0
    phase_k: float = 0.0


@dataclass(frozen=True)
class Frame:
    """The parameters that queries and keys of a head share: axes, planes, noise and window."""

    a: Float[np.ndarray, "d"]
    b: Float[np.ndarray, "d"]
    planes: Float[np.ndarray, "rings 2 d"]
    sigma: Float[np.ndarray, "d"]
    sigma_document: float
    window: int


@dataclass(frozen=True)
class Law:
    """The distribution of one class."""

    frame: Frame
    mu: tuple[float, float]
    alpha: float
    rings: list[tuple[float, float, float]]

    def mean_at(self, t: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n d"]:
        """E[x | t]."""
        f = self.frame
        drift = self.alpha * (t - (f.window - 1) / 2)
        mean = np.outer(self.mu[0] + drift, f.a) + self.mu[1] * f.b
        for (frequency, radius, phase), (u, v) in zip(self.rings, f.planes, strict=True):
            angle = frequency * t + phase
            mean += radius * (np.outer(np.cos(angle), u) + np.outer(np.sin(angle), v))
        return mean

    def population(self) -> Moments:
        """Population moments of the law, with weight 1: position uniform over the window, noise as planted."""
        t = np.arange(self.frame.window, dtype=float)
        exact = Moments.from_rows(self.mean_at(t), t)
        noise = np.zeros_like(exact.scatter)
        np.fill_diagonal(noise[:-1, :-1], self.frame.sigma**2 + self.frame.sigma_document**2)
        return Moments(np.asarray(1.0), exact.mean, exact.scatter / exact.n + noise)

    def draw(self, n: int, documents: int, rng: np.random.Generator) -> Rows:
        """Draw ``n`` rows at random positions, spread evenly over the documents, in document order."""
        f = self.frame
        if n > documents * f.window:
            raise ValueError(f"expected at most {documents * f.window} rows from {documents} documents, got {n}")
        example_id = np.sort(np.arange(n) % documents)
        tokens = (rng.choice(f.window, size=m, replace=False) for m in np.bincount(example_id, minlength=documents))
        position = np.concatenate([np.sort(chosen) for chosen in tokens])
        effect = f.sigma_document * rng.standard_normal((documents, len(f.a)))
        content = effect[example_id] + f.sigma * rng.standard_normal((n, len(f.a)))
        return Rows(self.mean_at(position.astype(float)) + content, position, example_id)


@dataclass(frozen=True)
class Truth:
    """The planted parameters and their population moments, whose n is a weight, not a count."""

    a: Float[np.ndarray, "d"]
    b: Float[np.ndarray, "d"]
    planes: Float[np.ndarray, "rings 2 d"]
    law_q: Law
    law_k: Law

    @cached_property
    def q(self) -> Moments:
        """Population moments of the queries."""
        return self.law_q.population()

    @cached_property
    def k(self) -> Moments:
        """Population moments of the keys."""
        return self.law_k.population()


@dataclass(frozen=True)
class PlantedHead:
    """Rows of a synthetic query head and key head, and the truth behind them."""

    q: Rows
    k: Rows
    truth: Truth


def plant(
    d: int = 64,
    *,
    a: Float[np.ndarray, "d"] | None = None,
    b: Float[np.ndarray, "d"] | None = None,
    mu_q: tuple[float, float] = (2.0, 3.0),
    mu_k: tuple[float, float] = (-1.0, -3.0),
    alpha_q: float = 1e-3,
    alpha_k: float = 2e-3,
    sigma: float | Float[np.ndarray, "d"] = 1.0,
    sigma_document: float = 0.0,
    rings: Sequence[Ring] = (),
    n: int = 4096,
    documents: int = 32,
    window: int = 4096,
    seed: int = 0,
) -> PlantedHead:
    """Plant one head; ``mu_q`` and ``mu_k`` are the class means on (a, b), α the drift on a per token.

    ``sigma`` is one standard deviation for all coordinates of x, or one for each. Axes that are not given are drawn
    at random. Each class gets n rows, spread over the documents at its own positions.
    """
    rng = np.random.default_rng(seed)
    a, b, planes = _axes(d, a, b, len(rings), rng)
    spread = np.broadcast_to(np.asarray(sigma, dtype=float), (d,))
    frame = Frame(a, b, planes, spread, sigma_document, window)
    law_q = Law(frame, mu_q, alpha_q, [(r.frequency, r.radius_q, r.phase_q) for r in rings])
    law_k = Law(frame, mu_k, alpha_k, [(r.frequency, r.radius_k, r.phase_k) for r in rings])
    truth = Truth(a, b, planes, law_q, law_k)
    return PlantedHead(law_q.draw(n, documents, rng), law_k.draw(n, documents, rng), truth)


def _axes(
    d: int,
    a: Float[np.ndarray, "d"] | None,
    b: Float[np.ndarray, "d"] | None,
    n_rings: int,
    rng: np.random.Generator,
) -> tuple[Float[np.ndarray, "d"], Float[np.ndarray, "d"], Float[np.ndarray, "rings 2 d"]]:
    if d < 2 + 2 * n_rings:
        raise ValueError(f"expected d of at least {2 + 2 * n_rings} for {n_rings} rings, got {d}")
    if a is not None and b is not None and abs(a @ b) > 1e-9 * np.linalg.norm(a) * np.linalg.norm(b):
        raise ValueError("expected orthogonal axes a and b")
    fixed = [axis for axis in (a, b) if axis is not None]
    fill = rng.standard_normal((2 + 2 * n_rings - len(fixed), d))
    q, r = np.linalg.qr(np.concatenate([np.reshape(fixed, (-1, d)), fill]).T)
    axes = (q * np.sign(np.diag(r))).T
    if a is None and b is not None:
        axes[[0, 1]] = axes[[1, 0]]
    return axes[0], axes[1], axes[2:].reshape(n_rings, 2, d)
