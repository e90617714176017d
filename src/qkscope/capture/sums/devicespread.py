"""How far queries of each bucket spread along pairs of keys (core/bucketspread.py), on the device of their sums.

Where one shard is the whole run, this saves copying a covariance per head and bucket to the host, which would be most
of what is copied.
"""

from __future__ import annotations

import torch

from qkscope.core.keypairs import SampledKeys

Centred = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Count, mean and scatter of z = (x, t)."""


def spread_of(buckets: Centred, groups: Centred, sampled: SampledKeys) -> tuple[torch.Tensor, torch.Tensor]:
    """Variances along pairs (Hq, buckets, pairs) and along the axes of the drift's basis (Hq, buckets, d)."""
    n, _, scatter = buckets
    cov = scatter[..., :-1, :-1] / torch.where(n > 0, n, 1.0)[..., None, None]
    keys = torch.from_numpy(sampled.keys).to(cov.device).double()
    earlier, later = (torch.from_numpy(rows).to(cov.device) for rows in sampled.rows)
    basis = _drift_basis(*groups)
    along_pairs = torch.empty(*n.shape, earlier.shape[-1], dtype=cov.dtype, device=cov.device)
    along_axes = torch.empty(*n.shape, cov.shape[-1], dtype=cov.dtype, device=cov.device)
    for query, key in enumerate(sampled.read):
        delta = keys[later, key] - keys[earlier, key]
        for vectors, along in ((delta, along_pairs), (basis[query, None], along_axes)):
            along[query] = (vectors @ cov[query] * vectors).sum(-1)
    return along_pairs, along_axes


def _drift_basis(n: torch.Tensor, mean: torch.Tensor, scatter: torch.Tensor) -> torch.Tensor:
    """The reflection that maps the drift of all groups (H, 8) together to +e₁ (H, d, d)."""
    share = n / n.sum(-1, keepdim=True).clamp_min(1.0)
    away = mean - (share[..., None] * mean).sum(-2, keepdim=True)
    drift = (scatter[..., :-1, -1] + n[..., None] * away[..., :-1] * away[..., -1:]).sum(-2)
    size = drift.norm(dim=-1, keepdim=True)
    identity = torch.eye(drift.shape[-1], dtype=drift.dtype, device=drift.device)
    v = drift / torch.where(size > 0, size, 1.0) - identity[0]
    square = (v * v).sum(-1)[..., None, None]
    return identity - 2.0 * v[..., :, None] * v[..., None, :] / torch.where(square > 0, square, 1.0)
