"""Token ids of a text; a tokenizer that breaks on it is an error in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from qkscope.errors import CaptureError


def token_ids(text: str, tokenizer: Any) -> np.ndarray:
    """The ids as the tokenizer gives them, special tokens included."""
    with tokenizer_errors():
        return np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Turn whatever a tokenizer raises into one line; compiled ones panic, which is not even an ``Exception``."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CaptureError(f"the tokenizer fails ({reason}); give another with --tokenizer") from None


def is_panic(error: BaseException) -> bool:
    """Whether compiled code of a library gave up."""
    return type(error).__name__ == "PanicException"
