"""Names for shapes that recur: one number, or one truth value, per head of a batch.

Without a batch axis NumPy hands out a scalar instead of an array; both are meant.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

PerHead = Float[np.ndarray, "*batch"] | np.float64
TruthPerHead = Bool[np.ndarray, "*batch"] | np.bool_
