"""Queries and keys of one layer, as they pass, into sums on the layer's own device.

Each vector becomes a row z = (x − shift, t − bucket centre, 1), zero where the token does not count; one product
zᵀz per document and position bucket then holds counts, sums and squares at once. Products are float32 over rows that
were shifted first; everything beyond one document and bucket is added in float64. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch

from qkscope.capture.attention import Attention
from qkscope.capture.rope import LayerRope, temperature
from qkscope.capture.sums.gramsums import GramSums, trusted
from qkscope.capture.sums.halfsums import HalfSums, HostSums, far_means, takes
from qkscope.capture.sums.rowsums import RowSums
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.sums.undonerotation import UndoneRotation
from qkscope.core.headmoments import N_GROUPS, BucketMeans
from qkscope.core.layermoments import LayerMoments
from qkscope.core.moments import Moments

Waves = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines by token and coordinate."""


@dataclass
class KindSums:
    """Sums of z zᵀ for the query heads or the key heads of one layer; D = d + 2."""

    shift: torch.Tensor
    """Subtracted from every vector (H, d)."""
    by_group: torch.Tensor
    """(H, 8, D, D), float64."""
    by_cell: torch.Tensor
    """(H, 8, buckets, D), counts and sums only; float64."""
    by_bucket: torch.Tensor | None
    """(H, buckets, D, D), float64; queries only."""
    unrotated: torch.Tensor | None = None
    """Σ of the vectors with their rotation undone (H, 8, planes, 2), float64."""

    def add(self, x: torch.Tensor, tokens: BatchTokens, plan: Plan) -> None:
        """Add the vectors x (B, H, T, d) of one forward pass."""
        products, first = _products(x, self.shift, tokens, plan)
        groups = torch.from_numpy(tokens.groups).to(x.device, non_blocking=True)
        self.by_group.index_add_(1, groups, products.sum(2).transpose(0, 1))
        span = slice(first, first + products.shape[2])
        self.by_cell[:, :, span].index_add_(1, groups, products[..., -1, :].transpose(0, 1))
        if self.by_bucket is not None:
            self.by_bucket[:, span] += products.sum(0)

    def add_unrotated(self, x: torch.Tensor, tokens: BatchTokens, rope: LayerRope, waves: Waves) -> None:
        """Add the rotated coordinates of x with their rotation undone."""
        assert self.unrotated is not None
        first, second = rope.coordinates
        product = _scratch(tuple(x.shape), x.device)
        on_cos, on_sin = (torch.mul(x.float(), wave[:, None], out=product).sum(2).double() for wave in waves)
        undone = [on_cos[..., first] + on_sin[..., second], on_cos[..., second] - on_sin[..., first]]
        groups = torch.from_numpy(tokens.groups).to(x.device, non_blocking=True)
        self.unrotated.index_add_(1, groups, torch.stack(undone, -1).transpose(0, 1))

    def host(self) -> HostSums:
        """The same on the host."""
        unrotated = np.zeros((len(self.by_group), N_GROUPS, 0, 2))
        return HostSums(
            self.shift.double().cpu().numpy(),
            self.by_group.cpu().numpy(),
            self.by_cell.cpu().numpy(),
            None if self.by_bucket is None else self.by_bucket.cpu().numpy(),
            unrotated if self.unrotated is None else self.unrotated.cpu().numpy(),
        )


@dataclass
class LayerSums:
    """Everything gathered of one layer within one shard of documents."""

    plan: Plan
    rope: LayerRope | None
    q: KindSums | None = None
    k: KindSums | None = None
    temperature: torch.Tensor | None = None
    """Σ of the factor on queries, and count, at each position (2, window), float64, where the layer has one."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(queries, keys) of the kept tokens, (n, H, d) each, in order."""
    half: HalfSums | None = None
    """In place of q and k, where vectors come in half precision on a GPU."""

    def add(self, seen: Attention, tokens: BatchTokens, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Add one attention call; ``angles`` are those of the layer's embedding at the call's positions."""
        self._keep(seen, tokens)
        turned = self.rope is not None and self.rope.temperature
        if takes(seen.q, seen.k) and not turned:
            if self.half is None:
                self.half = _half_sums(seen, tokens, self.plan, self.rope)
            both = None if self.rope is None or angles is None else angles
            turning = None if both is None else tokens.once(("turning", id(both[0])), lambda: UndoneRotation(*both))
            self.half.add(seen.q, seen.k, tokens, turning)
            return
        device = seen.q.device
        weights = tokens.once(("weights", device), lambda: tokens.weights(self.plan, seen.q.shape[2], device))
        if self.q is None or self.k is None:
            planes = None if self.rope is None else self.rope.planes
            self.q = _empty(seen.q, weights, self.plan, planes, full_buckets=True)
            self.k = _empty(seen.k, weights, self.plan, planes, full_buckets=False)
        self.q.add(seen.q, tokens, self.plan)
        self.k.add(seen.k, tokens, self.plan)
        if self.rope is not None and angles is not None:
            factor, d, rope = temperature(seen, self.rope), seen.q.shape[-1], self.rope
            # The angles are kept with what was made of them, so that no others can take their place.
            made = tokens.once(
                ("waves", id(angles[0]), d, *rope.planar), lambda: (angles, waves(angles, weights, rope, d))
            )
            shared = of_queries = made[1]
            if factor is not None:
                self._add_temperature(factor, weights, tokens)
                of_queries = waves(angles, weights / factor, rope, d)
            self.q.add_unrotated(seen.q, tokens, rope, of_queries)
            self.k.add_unrotated(seen.k, tokens, rope, shared)

    def _keep(self, seen: Attention, tokens: BatchTokens) -> None:
        for row, columns in enumerate(tokens.kept):
            if len(columns):
                index = torch.from_numpy(columns).to(seen.q.device, non_blocking=True)
                self.kept.append(tuple(x[row].index_select(1, index).transpose(0, 1) for x in (seen.q, seen.k)))  # type: ignore[arg-type]

    def _add_temperature(self, factor: torch.Tensor, weights: torch.Tensor, tokens: BatchTokens) -> None:
        if self.temperature is None:
            self.temperature = torch.zeros(2, self.plan.window, dtype=torch.float64, device=factor.device)
        span = slice(tokens.first, tokens.first + factor.shape[1])
        self.temperature[:, span] += torch.stack([(factor * weights).sum(0), weights.sum(0)]).double()


def _half_sums(seen: Attention, tokens: BatchTokens, plan: Plan, rope: LayerRope | None) -> HalfSums:
    """Vectors are read where they lie, unless their mean has to be taken off first or the kernel cannot be trusted."""
    shift = far_means(seen.q, seen.k, tokens.counted(plan)[0][0])
    where_they_lie = trusted(seen.q.device, seen.q.dtype, seen.q.shape[-1]) and not bool(shift.any())
    return (GramSums if where_they_lie else RowSums)(seen.q, seen.k, shift, plan, rope)


def layer_moments(sums: LayerSums) -> LayerMoments:
    """Bring one shard's sums of a layer to the host, as moments."""
    q, k = _host_sums(sums)
    assert q.by_bucket is not None
    q_shift, k_shift = (_with_time(kind.shift, sums.plan) for kind in (q, k))
    return LayerMoments(
        _centred(q.by_group, q_shift),
        _centred(k.by_group, k_shift),
        _centred(q.by_bucket, q_shift),
        _cells(q.by_cell, q_shift),
        _cells(k.by_cell, k_shift),
        q.unrotated,
        k.unrotated,
        np.zeros((2, 0)) if sums.temperature is None else sums.temperature.cpu().numpy(),
    )


def _host_sums(sums: LayerSums) -> tuple[HostSums, HostSums]:
    if sums.half is not None:
        return sums.half.host()
    assert sums.q is not None
    assert sums.k is not None
    return sums.q.host(), sums.k.host()


def _empty(x: torch.Tensor, weights: torch.Tensor, plan: Plan, planes: int | None, *, full_buckets: bool) -> KindSums:
    """Sums of nothing; the shift is the mean of the first vectors, which keeps the products small."""
    heads, d = x.shape[1], x.shape[-1]
    total = weights.sum().clamp_min(1.0)
    shift = (x.float() * weights[:, None, :, None]).sum((0, 2)) / total

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=x.device)

    return KindSums(
        shift=shift,
        by_group=zeros(heads, N_GROUPS, d + 2, d + 2),
        by_cell=zeros(heads, N_GROUPS, plan.buckets, d + 2),
        by_bucket=zeros(heads, plan.buckets, d + 2, d + 2) if full_buckets else None,
        unrotated=None if planes is None else zeros(heads, N_GROUPS, planes, 2),
    )


def _products(x: torch.Tensor, shift: torch.Tensor, tokens: BatchTokens, plan: Plan) -> tuple[torch.Tensor, int]:
    """Z zᵀ summed over the tokens of each bucket (B, H, n, D, D), float64, and the first of the n buckets."""
    batch, heads, columns, d = x.shape
    first = tokens.first // plan.width
    n = -(-columns // plan.width)
    z = _scratch((batch, heads, n * plan.width, d + 2), x.device)
    torch.sub(x.float(), shift[:, None], out=z[:, :, :columns, :d])
    position = torch.arange(columns, device=x.device)
    z[:, :, :columns, d] = (position % plan.width - (plan.width - 1) / 2).to(z.dtype)
    z[:, :, :columns, d + 1] = 1.0
    for row, (begin, end) in enumerate(tokens.counted(plan)):
        z[row, :, :begin] = 0.0
        z[row, :, end:] = 0.0
    flat = z.view(batch * heads * n, plan.width, d + 2)
    products = torch.bmm(flat.transpose(1, 2), flat).view(batch, heads, n, d + 2, d + 2).double()
    # From the bucket's centre to the middle of the window, the same for all buckets.
    centre = (torch.arange(first, first + n, device=x.device) + 0.5) * plan.width - 0.5 - plan.window / 2
    products[..., d, :] += centre.double()[:, None] * products[..., d + 1, :]
    products[..., :, d] += centre.double()[:, None] * products[..., :, d + 1]
    return products, first


def waves(angles: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, rope: LayerRope, d: int) -> Waves:
    """Cosines and sines on both coordinates of their planes, by token (B, T, d); 0 on what is not rotated.

    Weights (B, T) leave tokens out, and may divide by a temperature.
    """
    found = []
    for wave, sign in zip(angles, (1, rope.sign), strict=True):
        table = torch.zeros(*weights.shape, d, device=weights.device)
        for coordinates in rope.coordinates:
            table[..., coordinates] = sign / rope.attention_factor * wave * weights[..., None]
        found.append(table)
    return found[0], found[1]


@lru_cache(maxsize=4)  # queries and keys
def _scratch(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Memory that all layers use in turn; asking for it anew each time costs as much as the product."""
    return torch.empty(shape, device=device)


def _with_time(shift: np.ndarray, plan: Plan) -> np.ndarray:
    """The shift of (x, t) that the sums are about."""
    return np.concatenate([shift, np.full((len(shift), 1), plan.window / 2)], -1)


def _cells(sums: np.ndarray, shift: np.ndarray) -> BucketMeans:
    n, mean = _mean(sums)
    mean = np.where(n[..., None] > 0, mean + shift[:, None, None], 0.0)
    return BucketMeans(n, mean[..., :-1], mean[..., -1])


def _centred(sums: np.ndarray, shift: np.ndarray) -> Moments:
    n, mean = _mean(sums[..., -1, :])
    scatter = sums[..., :-1, :-1] - n[..., None, None] * mean[..., :, None] * mean[..., None, :]
    return Moments(n, np.where(n[..., None] > 0, mean + shift[:, None], 0.0), scatter)


def _mean(last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    n = last[..., -1]
    return n, last[..., :-1] / np.maximum(n, 1.0)[..., None]
