"""Token ids of a text, and the text of token ids; a tokenizer that breaks is an error in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from qkscope.errors import CaptureError

LONGEST_TOKEN = 40
"""Characters of a token that are kept."""


def token_ids(text: str, tokenizer: Any) -> np.ndarray:
    """The ids as the tokenizer gives them, special tokens included."""
    with tokenizer_errors():
        return np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)


def chat_ids(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> np.ndarray:
    """The ids of a conversation, as the tokenizer's chat template writes it."""
    if not getattr(tokenizer, "chat_template", None):
        raise CaptureError("the texts are conversations, but the tokenizer has no chat template; give plain texts")
    with tokenizer_errors():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def token_texts(ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Each token as text, as far as a single token is."""
    distinct, places = np.unique(ids, return_inverse=True)
    with tokenizer_errors():
        decoded = [str(tokenizer.decode([token]))[:LONGEST_TOKEN] for token in distinct.tolist()]
    texts = [text.encode("utf-8", "replace").decode() for text in decoded]
    return [texts[place] for place in places.tolist()]


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
