"""Named arrays in a safetensors file."""

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
        write_new_tensors(temporary, tensors)


def write_new_tensors(path: Path, tensors: Mapping[str, Shaped[np.ndarray, "..."]]) -> None:
    """Write arrays to a file of which nothing is read until the whole folder is complete and on disk."""
    try:
        save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)
    except SafetensorError as error:
        # safetensors reports a full disk only in the text of its error.
        os_error = re.search(r"os error (\d+)", str(error))
        if os_error is None:
            raise
        code = int(os_error[1])
        raise OSError(code, os.strerror(code), str(path)) from None
