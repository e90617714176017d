"""Combined QK PCA: queries and keys pooled, their principal components, and what each has to do with position.

For a component u: r = uᵀc / √(uᵀΣu · var t) with c = Cov(x, t), within queries (r_q) and within keys (r_k).
Signs are canonical: r_q ≥ 0, or r_k ≥ 0 where |r_q| < 0.05.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from qkscope.core.linalg import (
    Eigen,
    canonical_signs,
    eigh_descending,
    eigh_leading,
    eigh_near,
    ratio,
    sign_is_anchored_on_k,
)
from qkscope.core.moments import Moments
from qkscope.core.shapes import PerHead

DEGENERATE_GAP = 0.02
"""Below this relative eigengap a component can turn freely within its eigenspace."""


@dataclass(frozen=True)
class Components:
    """Principal components of pooled queries and keys; arrays end in the component axis c."""

    axes: Float[np.ndarray, "*batch c d"]
    basis: Eigen | None
    """All eigenpairs of the pooled covariance, where they were computed."""
    explained_variance: Float[np.ndarray, "*batch c"]
    eigengap: Float[np.ndarray, "*batch c"]
    r_q: Float[np.ndarray, "*batch c"]
    r_k: Float[np.ndarray, "*batch c"]
    mu_q: Float[np.ndarray, "*batch c"]
    mu_k: Float[np.ndarray, "*batch c"]
    slope_q: Float[np.ndarray, "*batch c"]
    slope_k: Float[np.ndarray, "*batch c"]
    var_q: Float[np.ndarray, "*batch c"]
    var_k: Float[np.ndarray, "*batch c"]

    @property
    def separation(self) -> Float[np.ndarray, "*batch c"]:
        """|mu_q − mu_k|."""
        return np.abs(self.mu_q - self.mu_k)

    @property
    def fisher(self) -> Float[np.ndarray, "*batch c"]:
        """(mu_q − mu_k)² / (var_q + var_k); 0 where nothing varies."""
        return ratio(self.separation**2, self.var_q + self.var_k)

    @property
    def concordant(self) -> Bool[np.ndarray, "*batch c"]:
        """Whether queries and keys drift the same way; meaningless where ``sign_anchored_on_k``."""
        return self.r_k > 0

    @property
    def sign_anchored_on_k(self) -> Bool[np.ndarray, "*batch c"]:
        """Where r_q is too weak to orient the component."""
        return sign_is_anchored_on_k(self.r_q)

    @property
    def degenerate(self) -> Bool[np.ndarray, "*batch c"]:
        """Where a neighbouring eigenvalue is so close that this component's r means nothing by itself."""
        return self.eigengap < DEGENERATE_GAP


def components(
    q: Moments,
    k: Moments,
    n_components: int = 10,
    near: Components | None = None,
    pooled: Moments | None = None,
    *,
    whole_basis: bool = True,
) -> Components:
    """The leading components of queries and keys pooled, oriented by the sign rule.

    With ``near``, q and k have one more batch axis, the groups left out one at a time; the search then starts from
    the components of the whole, and their orientation is kept. ``pooled``, q and k together, spares merging them.
    Without ``whole_basis`` only the components asked for are computed; nothing can start from them then.
    """
    pooled = pooled or q.merge(k)
    n_components = min(n_components, pooled.d)
    if near is None or near.basis is None:
        found = eigh_descending(pooled.cov_x) if whole_basis else eigh_leading(pooled.cov_x, n_components + 1)
        basis = found if whole_basis else None
        values, axes = found.values, found.axes[..., :n_components, :]
        signs = canonical_signs(q.corr_along(axes), k.corr_along(axes))
    else:
        basis = None
        values, axes = eigh_near(pooled.cov_x, near.basis, n_components)
        signs = np.where((axes * near.axes[..., None, :, :]).sum(-1) < 0, -1.0, 1.0)
    axes = axes * signs[..., None]
    return Components(
        axes=axes,
        basis=basis,
        explained_variance=ratio(values[..., :n_components], pooled.total_variance[..., None]),
        eigengap=_eigengap(values)[..., :n_components],
        r_q=q.corr_along(axes),
        r_k=k.corr_along(axes),
        mu_q=q.mean_along(axes),
        mu_k=k.mean_along(axes),
        slope_q=q.slope_along(axes),
        slope_k=k.slope_along(axes),
        var_q=q.var_along(axes),
        var_k=k.var_along(axes),
    )


TAXONOMY = ("position-dominated", "q-positional", "k-positional", "content-focused", "mixed")


def taxonomy(r_q: PerHead, r_k: PerHead, high: float = 0.7, low: float = 0.3) -> Int[np.ndarray, "*batch"]:
    """Index into TAXONOMY of each head, from its PC0; all comparisons are strict.

    >>> [TAXONOMY[i] for i in taxonomy(np.array([0.9, 0.9, 0.1, 0.1, 0.5]), np.array([-0.8, 0.1, 0.8, -0.2, 0.9]))]
    ['position-dominated', 'q-positional', 'k-positional', 'content-focused', 'mixed']
    """
    strong_q, weak_q = r_q > high, r_q < low
    strong_k, weak_k = np.abs(r_k) > high, np.abs(r_k) < low
    classes = [strong_q & strong_k, strong_q & weak_k, weak_q & strong_k, weak_q & weak_k]
    return np.select(classes, range(4), default=4)


def _eigengap(values: Float[np.ndarray, "*batch d"]) -> Float[np.ndarray, "*batch d"]:
    """Relative distance of each eigenvalue to the nearer of its neighbours."""
    steps = values[..., :-1] - values[..., 1:]
    edge = np.full((*values.shape[:-1], 1), np.inf)
    gaps = np.minimum(np.concatenate([edge, steps], -1), np.concatenate([steps, edge], -1))
    return ratio(gaps, values)
