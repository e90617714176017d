"""Arrays by name in a safetensors file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError
from safetensors.numpy import save_file

from qkscope.files.atomic import atomic_path


def write_tensors(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
    """Write arrays, atomically."""
    with atomic_path(path) as temporary:
        try:
            save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, temporary)
        except SafetensorError as error:
            # A disk that is full is not an error of the format; the library says so in words alone.
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code), str(path)) from None
