"""The input of analyses: a head's moments and, if available, its vectors and its rotary encoding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from qkscope.core.bucketspread import BucketSpread
from qkscope.core.headmoments import HeadMoments
from qkscope.core.keypairs import TokenPairs
from qkscope.core.moments import Moments
from qkscope.core.reach import HeadReach
from qkscope.core.rope import HeadRotary
from qkscope.core.rows import Pair
from qkscope.headids import HeadId


class PassageVectors(NamedTuple):
    """Queries and keys of every token of a short text, which begins at position 0."""

    tokens: tuple[str, ...]
    q: Float[np.ndarray, "tokens d"]
    k: Float[np.ndarray, "tokens d"]


class HeadData(NamedTuple):
    """The data of one query head and the key head it reads."""

    head: HeadId
    key_head: HeadId
    moments: HeadMoments
    vectors: Pair | None = None
    """A sample of the queries and keys."""
    rotary: HeadRotary | None = None
    """The rotary encoding, and the means of queries and keys with the rotation undone."""
    sliding_window: int | None = None
    """A query sees keys less than this far away; None: all."""
    both: bool = False
    """True if its queries also see later keys, as in encoders."""
    nope: bool | None = None
    """True if its layer has no rotary encoding; None: unknown."""
    reach: HeadReach | None = None
    """Attention weights of some queries by distance."""
    q_buckets: Moments | BucketSpread | None = None
    """The queries by position bucket: their moments, or the spread that a captured run stores."""
    pairs: TokenPairs | None = None
    """The pairs of keys that the stored spread belongs to."""
    passage: PassageVectors | None = None
    """Vectors of every token of a short text, if requested."""
