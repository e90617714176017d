"""Convert one shard's sums of a layer into moments: computed on the device of the sums, then copied to the host."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.tokens import Plan
from qkscope.capture.sums.undone import UndoneQueries
from qkscope.core.bucketspread import StoredSpread
from qkscope.core.headmoments import BucketMeans
from qkscope.core.keypairs import SampledKeys
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments

_MOMENTS, _CELLS, _SPREAD = ("n", "mean", "scatter"), ("n", "mean_x", "mean_t"), ("along_pairs", "along_axes")


def layer_moments(sums: LayerSums, sampled: SampledKeys | None = None) -> LayerMoments:
    """Return the moments; with ``sampled`` keys, queries by bucket only as their spread along pairs of these."""
    q, k = sums.exact()
    assert q.by_bucket is not None
    q_shift, k_shift = (_with_time(kind.shift, sums.plan) for kind in (q, k))
    groups, buckets = _centred(q.by_group, q_shift), _centred(q.by_bucket, q_shift)
    sizes_q, sizes_k = sums.sizes.exact()
    parts: dict[str, torch.Tensor | None] = {
        "unrotated_q": q.unrotated,
        "unrotated_k": k.unrotated,
        "temperature": q.by_group.new_zeros(2, 0) if sums.temperature is None else sums.temperature,
        "sizes_q": sizes_q,
        "sizes_k": sizes_k,
        "reach": None if sums.reach is None else sums.reach.exact(),
        "entropy": None if sums.reach is None else sums.reach.entropy,
        "max_logit": None if sums.reach is None else sums.reach.largest,
        "repeats": sums.repeats,
        **_named("q", _MOMENTS, groups),
        **_named("k", _MOMENTS, _centred(k.by_group, k_shift)),
        **_named("q_cells", _CELLS, _cells(q.by_cell, q_shift)),
        **_named("k_cells", _CELLS, _cells(k.by_cell, k_shift)),
    }
    if sums.undone is not None:
        parts |= _named("undone", _MOMENTS, _undone(sums.undone, sums.plan))
    if sampled is None:
        parts |= _named("q_buckets", _MOMENTS, buckets)
    else:
        parts |= _named("spread", _SPREAD, spread_of(buckets, groups, sampled))
    arrays = _on_host({name: part for name, part in parts.items() if part is not None})

    def take(name: str, fields: tuple[str, ...]) -> list[np.ndarray]:
        return [arrays.pop(f"{name}.{field}") for field in fields]

    return LayerMoments(
        q=Moments(*take("q", _MOMENTS)),
        k=Moments(*take("k", _MOMENTS)),
        q_buckets=Moments(*take("q_buckets", _MOMENTS)) if sampled is None else None,
        q_cells=BucketMeans(*take("q_cells", _CELLS)),
        k_cells=BucketMeans(*take("k_cells", _CELLS)),
        spread=None if sampled is None else StoredSpread(sampled.pairs, *take("spread", _SPREAD)),
        undone=None if sums.undone is None else Moments(*take("undone", _MOMENTS)),
        **arrays,
    )


def _named(name: str, fields: tuple[str, ...], values: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.{field}": value for field, value in zip(fields, values, strict=True)}


def _on_host(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return tensors of one type as arrays on the host; from a GPU in one transfer."""
    values = list(tensors.values())
    if not values[0].is_cuda:
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    flat = torch.cat([tensor.reshape(-1) for tensor in values])
    pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    pinned.copy_(flat, non_blocking=True)
    torch.cuda.current_stream(flat.device).synchronize()
    parts = np.split(pinned.numpy().copy(), np.cumsum([tensor.numel() for tensor in values])[:-1])
    return {name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def _with_time(shift: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The shift of (x, t) in the sums."""
    return torch.nn.functional.pad(shift, (0, 1), value=plan.window / 2)


def _cells(sums: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count, mean vector and mean position of each cell."""
    n, mean = _mean(sums)
    mean = torch.where(n[..., None] > 0, mean + shift[:, None, None], 0.0)
    return n, mean[..., :-1], mean[..., -1]


def _centred(sums: torch.Tensor, shift: torch.Tensor) -> Centred:
    """Count, mean and scatter."""
    n, mean = _mean(sums[..., -1, :])
    scatter = sums[..., :-1, :-1] - n[..., None, None] * mean[..., :, None] * mean[..., None, :]
    return n, torch.where(n[..., None] > 0, mean + shift[:, None], 0.0), scatter


def _undone(sums: UndoneQueries, plan: Plan) -> list[torch.Tensor]:
    """Count, mean and scatter of the queries with their rotation undone."""
    assert sums.total is not None
    assert sums.shift is not None
    centred = _centred(sums.total[:, None], _with_time(sums.shift.double(), plan))
    return [part[:, 0] for part in centred]


def _mean(last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = last[..., -1]
    return n, last[..., :-1] / n.clamp_min(1.0)[..., None]


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
