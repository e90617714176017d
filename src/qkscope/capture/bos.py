"""The token that every document begins with, as the model's own files say.

A model trained with a beginning-of-sequence token reads other texts without it: its loss rises and heads change sign.
The files that say whether there is one do not always agree, and a tokenizer converted from another format may drop it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from qkscope.capture.gguffile import parsed_once
from qkscope.capture.options import ModelOptions
from qkscope.capture.texts import Document
from qkscope.capture.tokenids import chat_ids, token_ids
from qkscope.errors import CaptureError

_log = logging.getLogger("qkscope")
ASKED, GGUF, TOKENIZER_FILE, TOKENIZER = "asked for", "GGUF metadata", "add_bos_token", "the tokenizer"


@dataclass(frozen=True)
class Bos:
    """The token that documents begin with, or None, and who says so."""

    token: int | None
    source: str = TOKENIZER

    def as_dict(self) -> dict[str, Any]:
        """As run.json records it."""
        return {"token": self.token, "source": self.source}


@dataclass(frozen=True)
class _Statements:
    """What each source says: True, False, or nothing (None)."""

    gguf: bool | None
    tokenizer_file: bool | None
    tokenizer: bool

    def decided(self) -> tuple[bool, str]:
        """A GGUF file knows best; otherwise one statement for it is enough."""
        if self.gguf is not None:
            return self.gguf, GGUF
        if self.tokenizer_file and not self.tokenizer:
            return True, TOKENIZER_FILE
        return self.tokenizer, TOKENIZER

    def disagreement(self) -> str | None:
        """The statements that differ, in words; None if all agree."""
        said = {GGUF: self.gguf, TOKENIZER_FILE: self.tokenizer_file, TOKENIZER: self.tokenizer}
        known = {name: value for name, value in said.items() if value is not None}
        if len(set(known.values())) < 2:
            return None
        return ", ".join(f"{name} says {'yes' if value else 'no'}" for name, value in known.items())


def find_bos(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, asked: bool | None = None) -> Bos:
    """The token that documents begin with; sources that disagree are a warning."""
    token, gguf = _token(options, tokenizer), _gguf_metadata(options)
    if asked is False:
        return Bos(None, ASKED)
    if gguf.get("bos_token_id") is not None:
        token = int(gguf["bos_token_id"])
    if asked:
        if token is None:
            raise CaptureError("neither the tokenizer nor the model names a BOS token; leave out --bos")
        return Bos(token, ASKED)
    statements = _Statements(
        gguf.get("add_bos_token"), _stated(options), token is not None and _first_of("a", tokenizer) == token
    )
    wanted, source = statements.decided()
    disagreement = statements.disagreement()
    if disagreement is not None:
        verdict = "begin" if wanted else "do not begin"
        _log.warning(
            "whether texts begin with a BOS token: %s; documents %s with it (decide with --bos or --no-bos)",
            disagreement, verdict,
        )  # fmt: skip
    if wanted and token is None:
        raise CaptureError(f"{source} asks for a BOS token, but no file names it; use --no-bos, or give --tokenizer")
    return Bos(token if wanted else None, source)


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerBase, bos: Bos | None = None) -> list[np.ndarray]:
    """Token ids of each whole document; they are cut to the window later. Without ``bos`` as the tokenizer has it.

    A conversation begins as its template says.
    """
    return [
        _tokens(document.text, tokenizer, bos) if document.chat is None else chat_ids(document.chat, tokenizer)
        for document in documents
    ]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, bos: Bos | None) -> np.ndarray:
    ids = token_ids(text, tokenizer)
    if bos is None:
        return ids
    own = tokenizer.bos_token_id
    begins = len(ids) > 0 and ids[0] in {bos.token, own} - {None}
    rest = ids[1:] if begins else ids
    return rest if bos.token is None else np.append(np.int64(bos.token), rest)


def _first_of(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    ids = token_ids(text, tokenizer)
    return int(ids[0]) if len(ids) else None


def _token(options: ModelOptions, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token of the tokenizer, or else of the model's generation config."""
    token = tokenizer.bos_token_id
    generation = _generation_bos(options)
    if token is None:
        return generation
    if generation is not None and generation != token:
        _log.warning("the tokenizer's BOS token is %d, that of the generation config %d", token, generation)
    return int(token)


def _stated(options: ModelOptions) -> bool | None:
    """``add_bos_token`` of tokenizer_config.json; transformers does not keep it for every kind of tokenizer."""
    place = options.tokenizer or options.model
    if place.endswith(".gguf"):
        return None
    try:
        revision = None if options.tokenizer else options.revision
        file = cached_file(place, "tokenizer_config.json", revision=revision)
        value = json.loads(Path(str(file)).read_text(encoding="utf-8")).get("add_bos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, bool) else None


def _generation_bos(options: ModelOptions) -> int | None:
    if options.model.endswith(".gguf"):
        return None
    try:
        config = GenerationConfig.from_pretrained(options.model, revision=options.revision or "main")
    except (OSError, ValueError):
        return None
    return config.bos_token_id if isinstance(config.bos_token_id, int) else None


def _gguf_metadata(options: ModelOptions) -> dict[str, Any]:
    """``add_bos_token`` and ``bos_token_id`` of a GGUF file, if the tokenizer comes from it."""
    if not options.model.endswith(".gguf") or options.tokenizer:
        return {}
    import gguf

    with parsed_once():
        fields = gguf.GGUFReader(Path(options.model)).fields
    known = {name: fields.get(f"tokenizer.ggml.{name}") for name in ("add_bos_token", "bos_token_id")}
    return {name: entry.contents() for name, entry in known.items() if entry is not None}
