"""Files of ``torch.save`` that contain only tensors, numbers and text; no code in them is executed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from qkscope.errors import ConfigError, DatasetError
from qkscope.files.readers import check_regular


def torch_bytes(content: Any) -> bytes:
    """The bytes of a file with dicts and lists of numbers, text and arrays, which become tensors."""
    torch = _torch()
    file = io.BytesIO()  # given a path, torch would name the archive after the temporary file
    torch.save(_converted(content, np.ndarray, torch.from_numpy), file)
    return file.getvalue()


def read_torch(path: Path) -> Any:
    """Read a file, tensors as arrays; a ``DatasetError`` if it is damaged or contains anything else."""
    torch = _torch()
    try:
        check_regular(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises errors of many kinds
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise DatasetError(f"{path} is not a file of tensors ({reason}); export it again") from None
    return _converted(content, torch.Tensor, lambda tensor: tensor.numpy())


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ConfigError("this format needs torch; install it with: pip install torch") from None
    return torch


def _converted(content: Any, kind: type, convert: Any) -> Any:
    if isinstance(content, dict):
        return {name: _converted(value, kind, convert) for name, value in content.items()}
    if isinstance(content, list):
        return [_converted(value, kind, convert) for value in content]
    return convert(content) if isinstance(content, kind) else content
