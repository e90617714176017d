"""Sums over the queries and keys of one layer during a forward pass, on the layer's own device.

Each vector becomes a row z = (x − shift, t − bucket centre, 1), zero where the token does not count; one product
zᵀz per document and position bucket then gives counts, sums and squares at once. Products are float32 over shifted
rows; sums over several documents or buckets are float64. Nothing here waits for the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from qkscope.capture.rope import LayerRope, temperature
from qkscope.capture.sums.gramsums import GramSums, PlaneSizes, trusted
from qkscope.capture.sums.halfsums import ExactSums, HalfSums, RowSums, far_means, on_side_stream, supports
from qkscope.capture.sums.reachsums import ReachSums
from qkscope.capture.sums.tokens import BatchTokens, Plan, bucket_products, on_device, scratch
from qkscope.capture.sums.undone import UndoneQueries, UndoneRotation
from qkscope.capture.watch import Attention
from qkscope.core.headmoments import N_GROUPS


@dataclass(frozen=True)
class Waves:
    """Cosines and sines on both coordinates of their planes; 0 on other coordinates and uncounted tokens."""

    tables: tuple[torch.Tensor, torch.Tensor]
    """By token and coordinate (B, T, d), float32."""
    sums: tuple[torch.Tensor, torch.Tensor]
    """Over the tokens of each document (B, d), float64."""


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
        products, occurring, first = bucket_products(x, self.shift, tokens, plan)
        groups = on_device(occurring, x.device)
        self.by_group.index_add_(1, groups, products.sum(2).transpose(0, 1))
        span = slice(first, first + products.shape[2])
        self.by_cell[:, :, span].index_add_(1, groups, products[..., -1, :].transpose(0, 1))
        if self.by_bucket is not None:
            self.by_bucket[:, span] += products.sum(0)

    def add_unrotated(self, x: torch.Tensor, tokens: BatchTokens, rope: LayerRope, waves: Waves) -> None:
        """Add the rotated coordinates of x with their rotation undone; the mean's part is summed in float64."""
        assert self.unrotated is not None
        first, second = rope.coordinates
        product = scratch(tuple(x.shape), x.device)
        on_cos, on_sin = (
            torch.sub(x.float(), self.shift[:, None], out=product).mul_(table[:, None]).sum(2).double()
            + self.shift.double() * total[:, None]
            for table, total in zip(waves.tables, waves.sums, strict=True)
        )
        undone = [on_cos[..., first] + on_sin[..., second], on_cos[..., second] - on_sin[..., first]]
        groups = tokens.once(("groups", x.device), lambda: on_device(tokens.groups, x.device))
        self.unrotated.index_add_(1, groups, torch.stack(undone, -1).transpose(0, 1))

    def exact(self) -> ExactSums:
        """Return the same sums in the form of those of half-precision vectors."""
        unrotated = self.by_group.new_zeros(len(self.by_group), N_GROUPS, 0, 2)
        return ExactSums(
            self.shift.double(),
            self.by_group,
            self.by_cell,
            self.by_bucket,
            unrotated if self.unrotated is None else self.unrotated,
        )


@dataclass
class LayerSums:
    """All sums and kept vectors of one layer within one shard of documents."""

    plan: Plan
    rope: LayerRope | None
    q: KindSums | None = None
    k: KindSums | None = None
    temperature: torch.Tensor | None = None
    """Σ of the temperature factor on queries, and count, at each position (2, window), float64; None without one."""
    device: torch.device | None = None
    """Device of its vectors; None before the first call."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(queries, keys) of the kept tokens, (n, H, d) each, in order."""
    half: HalfSums | None = None
    """Sums instead of q and k if vectors are in half precision on a GPU."""
    reach: ReachSums | None = None
    """Attention weights of some queries by distance."""
    repeats: torch.Tensor | None = None
    """Attention on random tokens that come twice (H, 8, columns), float64; zeros in all shards but the first."""
    undone: UndoneQueries | None = None
    """Moments of the queries with their rotation undone."""
    sizes: PlaneSizes = field(init=False)
    """Lengths in each plane."""

    def __post_init__(self) -> None:
        self.sizes = PlaneSizes(self.rope)

    def add(self, attention: Attention, tokens: BatchTokens, angles: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Add one attention call; ``angles`` are those of the layer's embedding at the call's positions."""
        self._keep(attention, tokens)
        factor = None if self.rope is None else temperature(attention, self.rope)
        in_half = supports(attention.q, attention.k) and factor is None
        with on_side_stream(attention.q) if in_half else nullcontext():
            self.sizes.add(attention.q, attention.k, tokens, self.plan, factor)
            if self.reach is not None:
                self.reach.add(attention, tokens)
        if self.undone is not None and angles is not None:
            self.undone.add(attention.q, tokens, self.plan, angles, factor)
        if in_half:
            if self.half is None:
                self.half = _half_sums(attention, tokens, self.plan, self.rope)
            rope_angles = None if self.rope is None or angles is None else angles
            rotation = None
            if rope_angles is not None:
                # The angles are kept, so that no other tensor gets the same id.
                rotation = tokens.once(
                    ("rotation", id(rope_angles[0])), lambda: (rope_angles, UndoneRotation(*unit_angles(rope_angles)))
                )[1]
            self.half.add(attention.q, attention.k, tokens, rotation)
            return
        device = attention.q.device
        weights = tokens.once(("weights", device), lambda: tokens.weights(self.plan, attention.q.shape[2], device))
        if self.q is None or self.k is None:
            planes = None if self.rope is None else self.rope.planes
            self.q = _empty(attention.q, weights, self.plan, planes, full_buckets=True)
            self.k = _empty(attention.k, weights, self.plan, planes, full_buckets=False)
        self.q.add(attention.q, tokens, self.plan)
        self.k.add(attention.k, tokens, self.plan)
        if self.rope is not None and angles is not None:
            d, rope = attention.q.shape[-1], self.rope
            # The angles are kept with their waves, so that no other tensor gets the same id.
            cached = tokens.once(
                ("waves", id(angles[0]), d, *rope.planar),
                lambda: (angles, waves(unit_angles(angles), weights, rope, d)),
            )
            shared = of_queries = cached[1]
            if factor is not None:
                self._add_temperature(factor, weights, tokens)
                of_queries = waves(unit_angles(angles), weights / factor, rope, d)
            self.q.add_unrotated(attention.q, tokens, rope, of_queries)
            self.k.add_unrotated(attention.k, tokens, rope, shared)

    def exact(self) -> tuple[ExactSums, ExactSums]:
        """The sums of queries and of keys, after all calls."""
        if self.half is not None:
            return self.half.exact()
        assert self.q is not None
        assert self.k is not None
        return self.q.exact(), self.k.exact()

    def _keep(self, attention: Attention, tokens: BatchTokens) -> None:
        self.device = attention.q.device
        if any(map(len, tokens.kept)):
            row, column = tokens.once(("kept", self.device), lambda: _kept_tokens(tokens, attention.q.device))
            q, k = (x.transpose(1, 2)[row, column] for x in (attention.q, attention.k))
            self.kept.append((q, k))

    def _add_temperature(self, factor: torch.Tensor, weights: torch.Tensor, tokens: BatchTokens) -> None:
        if self.temperature is None:
            self.temperature = torch.zeros(2, self.plan.window, dtype=torch.float64, device=factor.device)
        span = slice(tokens.first, tokens.first + factor.shape[1])
        self.temperature[:, span] += torch.stack([(factor * weights).sum(0), weights.sum(0)]).double()


def _kept_tokens(tokens: BatchTokens, device: torch.device) -> torch.Tensor:
    """Row and column of each kept token (2, n)."""
    rows = np.repeat(np.arange(len(tokens.kept)), [len(columns) for columns in tokens.kept])
    return on_device(np.stack([rows, np.concatenate(tokens.kept)]).astype(np.int64), device)


def _half_sums(attention: Attention, tokens: BatchTokens, plan: Plan, rope: LayerRope | None) -> HalfSums:
    """Return sums that do not copy the vectors, unless their mean must be subtracted or the kernel is not trusted."""
    shift = far_means(attention.q, attention.k, tokens.counted(plan)[0][0])
    in_place = trusted(attention.q.device, attention.q.dtype, attention.q.shape[-1]) and not bool(shift.any())
    return (GramSums if in_place else RowSums)(attention.q, attention.k, shift, plan, rope)


def _empty(x: torch.Tensor, weights: torch.Tensor, plan: Plan, planes: int | None, *, full_buckets: bool) -> KindSums:
    """Return empty sums; the shift is the mean of the first vectors, which keeps the products small."""
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


def unit_angles(angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines in float64 with cos² + sin² = 1, which the model's are only to single precision.

    Where a mean is 200 standard deviations, an error of 3e-8 in cos² + sin² would be 1e-3 of the variance.
    """
    cos, sin = (part.double() for part in angles)
    size = torch.hypot(cos, sin)
    return cos / size, sin / size


def waves(angles: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, rope: LayerRope, d: int) -> Waves:
    """Return the cosines and sines of unit angles (T, planes).

    Weights (B, T) are 0 for tokens that do not count, and may be divided by a temperature.
    """
    tables = []
    for wave, sign in zip(angles, (1, rope.sign), strict=True):
        table = torch.zeros(*weights.shape, d, dtype=torch.float64, device=weights.device)
        for coordinates in rope.coordinates:
            table[..., coordinates] = sign * wave * weights[..., None]
        tables.append(table)
    cos, sin = tables
    return Waves((cos.float(), sin.float()), (cos.sum(1), sin.sum(1)))
