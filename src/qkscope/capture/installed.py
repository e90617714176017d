"""Whether what captures need is installed; a plain ``pip install qkscope`` leaves it out."""

from __future__ import annotations

from qkscope.errors import CaptureError


def need_torch(instead: str = "") -> None:
    """Say what to install where there is no torch or transformers, and what can be done without, if anything can."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        way_out = f"install it with: pip install torch, then pip install 'qkscope[capture]'{instead}"
        raise CaptureError(f"capturing needs {error.name}; {way_out}") from None
