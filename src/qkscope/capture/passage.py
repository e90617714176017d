"""A short bundled text whose queries and keys a run keeps whole, so that single scores can be looked at.

It is read once, by itself, from position 0, and enters no sum. Names and a whole sentence return in it, so that heads
that copy have something to copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from qkscope.capture.bos import Bos, tokenize
from qkscope.capture.texts import Document
from qkscope.capture.tokenids import token_texts

PASSAGE = (
    "In the lighthouse Ann Keller wrote: on Monday three ships, on Tuesday a storm. Years later Ann Keller read it "
    "again: on Monday three ships, on Tuesday a storm. The sea was quiet now, and no ship came to the old lighthouse."
)
PASSAGE_TOKENS = 64


@dataclass(frozen=True)
class Passage:
    """The first tokens of the passage, as ids and as text."""

    ids: np.ndarray
    tokens: tuple[str, ...]

    def cut(self, window: int | None) -> Passage:
        """Its tokens within a window."""
        return Passage(self.ids[:window], self.tokens[:window])


def bundled_passage(tokenizer: PreTrainedTokenizerBase, bos: Bos | None = None) -> Passage:
    """The passage in the tokens of this tokenizer."""
    ids = tokenize([Document("passage", PASSAGE)], tokenizer, bos)[0][:PASSAGE_TOKENS]
    return Passage(ids, tuple(token_texts(ids, tokenizer)))
