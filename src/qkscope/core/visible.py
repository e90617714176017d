"""The keys that a query sees: earlier ones, in encoders also later ones, within the layer's window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int


@dataclass(frozen=True)
class VisibleKeys:
    """The keys less than ``reach`` away, before the query or on both sides; not the query's own."""

    reach: int
    both: bool = False

    def sees(self, distance: Int[np.ndarray, "*pairs"]) -> Bool[np.ndarray, "*pairs"]:
        """True where a query sees the key at distance Δ = i − j.

        >>> VisibleKeys(3).sees(np.array([-1, 0, 1, 2, 3])).tolist()
        [False, False, True, True, False]
        >>> VisibleKeys(3, both=True).sees(np.array([-2, -1, 0, 1])).tolist()
        [True, True, False, True]
        """
        steps = np.abs(distance) if self.both else distance
        return (steps > 0) & (steps < self.reach)
