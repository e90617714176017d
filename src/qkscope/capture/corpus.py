"""Corpus: documents as token ids, as every command and function reads them.

A model trained with a beginning-of-sequence (BOS) token behaves differently without it: its loss rises and heads change
sign. The files that state whether there is one do not always agree, and a tokenizer converted from another format may
drop it. So this module decides, from the model's own files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from qkscope.capture.given import check_vocabulary, read_texts
from qkscope.capture.images import ImageInputs, has_images, image_inputs, inputs_text, tensors
from qkscope.capture.model import check_tokens, is_panic, load_tokenizer, parsed_once
from qkscope.capture.options import ModelOptions, TextOptions
from qkscope.capture.repeats import RepeatedTokens
from qkscope.capture.sampling import TextSpans
from qkscope.capture.shardsums import ModelReport
from qkscope.capture.texts import Document, read_documents
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.runfolder import PASSAGE
from qkscope.options import is_whole
from qkscope.progress import plural

LONGEST_TOKEN = 40
"""Characters of a token's text that are stored, at most."""
SHORTEST = 16
"""Smallest length of a document whose predictions are measured, in tokens."""


def token_ids(text: str, tokenizer: Any) -> np.ndarray:
    """Return the tokenizer's ids of a text, special tokens included."""
    with tokenizer_errors():
        return np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)


def chat_ids(messages: Sequence[Mapping[str, str]], tokenizer: Any) -> np.ndarray:
    """Return the ids of a conversation, formatted by the tokenizer's chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise CaptureError("the texts are conversations, but the tokenizer has no chat template; give plain texts")
    with tokenizer_errors():
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def token_texts(ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Return each token as text, decoded by itself."""
    distinct, inverse = np.unique(ids, return_inverse=True)
    with tokenizer_errors():
        decoded = [str(tokenizer.decode([token]))[:LONGEST_TOKEN] for token in distinct.tolist()]
    texts = [text.encode("utf-8", "replace").decode() for text in decoded]
    return [texts[index] for index in inverse.tolist()]


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


_log = logging.getLogger("qkscope")
ASKED, GGUF, TOKENIZER_FILE, TOKENIZER = "asked for", "GGUF metadata", "add_bos_token", "the tokenizer"


@dataclass(frozen=True)
class Bos:
    """The token that documents begin with, or None, and the source that decided it."""

    token: int | None
    source: str = TOKENIZER

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of run.json."""
        return {"token": self.token, "source": self.source}


@dataclass(frozen=True)
class _Statements:
    """The statement of each source: True, False, or none (None)."""

    gguf: bool | None
    tokenizer_file: bool | None
    tokenizer: bool

    def decided(self) -> tuple[bool, str]:
        """Return the decision and its source: a GGUF file decides alone; otherwise one source in favour is enough."""
        if self.gguf is not None:
            return self.gguf, GGUF
        if self.tokenizer_file and not self.tokenizer:
            return True, TOKENIZER_FILE
        return self.tokenizer, TOKENIZER

    def disagreement(self) -> str | None:
        """Return the statements in words if they differ; None if all agree."""
        by_source = {GGUF: self.gguf, TOKENIZER_FILE: self.tokenizer_file, TOKENIZER: self.tokenizer}
        statements = {name: value for name, value in by_source.items() if value is not None}
        if len(set(statements.values())) < 2:
            return None
        return ", ".join(f"{name} says {'yes' if value else 'no'}" for name, value in statements.items())


def find_bos(
    files: ModelOptions, tokenizer: PreTrainedTokenizerBase, requested: bool | None = None, model: Any = None
) -> Bos:
    """Return the token that documents begin with; warn if sources disagree.

    ``files`` states where model and tokenizer come from. For a loaded ``model``, nothing is downloaded.
    """
    token, gguf = _token(files, tokenizer, model), _gguf_metadata(files)
    if requested is False:
        return Bos(None, ASKED)
    if gguf.get("bos_token_id") is not None:
        token = int(gguf["bos_token_id"])
    if requested:
        if token is None:
            raise CaptureError("neither the tokenizer nor the model names a BOS token; leave out --bos (bos=True)")
        return Bos(token, ASKED)
    statements = _Statements(
        gguf.get("add_bos_token"),
        _stated(files, downloads=model is None),
        token is not None and _first_of("a", tokenizer) == token,
    )
    begins, source = statements.decided()
    disagreement = statements.disagreement()
    if disagreement is not None:
        verdict = "begin" if begins else "do not begin"
        _log.warning(
            "whether texts begin with a BOS token: %s; documents %s with it (decide with --bos or --no-bos, "
            "from Python with bos=True or bos=False)",
            disagreement, verdict,
        )  # fmt: skip
    if begins and token is None:
        raise CaptureError(
            f"{source} asks for a BOS token, but no file names it; use --no-bos (bos=False), or give another tokenizer"
        )
    return Bos(token if begins else None, source)


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerBase, bos: Bos | None = None) -> list[np.ndarray]:
    """Return token ids of each whole document, before they are cut; without ``bos``, as the tokenizer adds it.

    A conversation begins as its template does.
    """
    return [
        _tokens(document.text, tokenizer, bos) if document.chat is None else chat_ids(document.chat, tokenizer)
        for document in documents
    ]


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase, bos: Bos | None) -> np.ndarray:
    ids = token_ids(text, tokenizer)
    if bos is None:
        return ids
    tokenizer_bos = tokenizer.bos_token_id
    begins = len(ids) > 0 and ids[0] in {bos.token, tokenizer_bos} - {None}
    ids_without_bos = ids[1:] if begins else ids
    return ids_without_bos if bos.token is None else np.append(np.int64(bos.token), ids_without_bos)


def _first_of(text: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    ids = token_ids(text, tokenizer)
    return int(ids[0]) if len(ids) else None


def _token(files: ModelOptions, tokenizer: PreTrainedTokenizerBase, model: Any) -> int | None:
    """Return the BOS token of the tokenizer, or else of the model's generation config."""
    token = tokenizer.bos_token_id
    config = _generation_config(files) if model is None else getattr(model, "generation_config", None)
    generation = getattr(config, "bos_token_id", None)
    if not isinstance(generation, int):
        return token
    if token is not None and generation != token:
        _log.warning("the tokenizer's BOS token is %d, that of the generation config %d", token, generation)
    return generation if token is None else int(token)


def _generation_config(files: ModelOptions) -> GenerationConfig | None:
    if files.model.endswith(".gguf"):
        return None
    try:
        return GenerationConfig.from_pretrained(files.model, revision=files.revision or "main")
    except (OSError, ValueError):
        return None


def _stated(files: ModelOptions, *, downloads: bool) -> bool | None:
    """Return ``add_bos_token`` of tokenizer_config.json, which transformers does not keep for every tokenizer."""
    source = files.tokenizer or files.model
    if not source or source.endswith(".gguf"):
        return None
    try:
        revision = None if files.tokenizer else files.revision
        file = cached_file(source, "tokenizer_config.json", revision=revision, local_files_only=not downloads)
        value = json.loads(Path(str(file)).read_text(encoding="utf-8")).get("add_bos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return value if isinstance(value, bool) else None


def _gguf_metadata(files: ModelOptions) -> dict[str, Any]:
    """``add_bos_token`` and ``bos_token_id`` of a GGUF file, if the tokenizer comes from it."""
    if not files.model.endswith(".gguf") or files.tokenizer:
        return {}
    import gguf

    with parsed_once():
        fields = gguf.GGUFReader(Path(files.model)).fields
    entries = {name: fields.get(f"tokenizer.ggml.{name}") for name in ("add_bos_token", "bos_token_id")}
    return {name: entry.contents() for name, entry in entries.items() if entry is not None}


@dataclass(frozen=True)
class DocumentTokens:
    """Token ids of a document, and their positions."""

    ids: np.ndarray
    images: ImageInputs | None = None
    """The inputs of the model, if the document has images."""

    @classmethod
    def of(cls, ids_or_images: np.ndarray | ImageInputs) -> DocumentTokens:
        """Return the tokens of a text's ids, or of a document with images."""
        return cls(ids_or_images.ids, ids_or_images) if isinstance(ids_or_images, ImageInputs) else cls(ids_or_images)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> TextSpans:
        """Positions of the tokens: from 0 on, unless there are images between them."""
        return ((0, len(self.ids)),) if self.images is None else self.images.positions

    @property
    def extent(self) -> int:
        """The position after the last token."""
        return self.positions[-1][1] if self.positions else 0

    def cut(self, window: int | None) -> DocumentTokens:
        """Return the tokens at positions within a window; None: all."""
        if window is None:
            return self
        return DocumentTokens.of(self.ids[:window] if self.images is None else self.images.cut(window))

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids at some positions."""
        if self.images is None:
            return self.ids[positions]
        positions_of_ids = np.concatenate([np.arange(*span) for span in self.positions])
        return self.ids[np.searchsorted(positions_of_ids, positions)]

    def n_after(self, skip_first: int) -> int:
        """Return the number of tokens after the first positions."""
        return sum(max(0, end - max(first, skip_first)) for first, end in self.positions)

    def as_dict(self) -> dict[str, Any]:
        """Return the document's entry in the manifest."""
        if self.images is None:
            return {"tokens": len(self)}
        positions = [list(span) for span in self.positions]
        return {"tokens": len(self), "image_tokens": self.images.image_tokens, "positions": positions}


def check_documents(names: list[str], documents: list[DocumentTokens], report: ModelReport) -> None:
    """Raise an error for a text with image tokens, and for images whose positions a layer counts in another way."""
    for name, document in zip(names, documents, strict=True):
        foreign = document.ids[np.isin(document.ids, report.placeholders)] if report.placeholders else document.ids[:0]
        if document.images is None and len(foreign):
            raise CaptureError(
                f"{name} contains token {foreign[0]}, a placeholder for an image, video or sound, but has none; pass "
                "qkscope.capture_model the output of the model's processor, or leave the document out"
            )
        if document.images is not None:
            _check_layers(name, document.images, report)


def _check_layers(name: str, images: ImageInputs, report: ModelReport) -> None:
    for layer in report.layers:
        rope, number = layer["rope"], layer["layer"]
        if rope is not None and rope["depends_on_length"]:
            raise CaptureError(
                f"{name} has images, but the frequencies of layer {number} depend on the length of the document "
                "(dynamic or longrope); leave it out"
            )
        if layer["sliding_window"] is not None and images.shifted:
            raise CaptureError(
                f"{name} has images, and layer {number} a sliding window that counts their tokens, not positions; "
                "capture with full_attention_only, or choose other layers"
            )


PASSAGE_TOKENS, OWN_TOKENS = 64, 128
"""Tokens of the bundled passage, and of another, at most."""
FEWEST_TOKENS = 3
"""Tokens of a passage, at least: with fewer, no query has two keys before it."""


@dataclass(frozen=True)
class Passage:
    """The first tokens of the passage, as ids and as text."""

    ids: np.ndarray
    tokens: tuple[str, ...]

    def cut(self, window: int | None) -> Passage:
        """Return the tokens within a window."""
        return Passage(self.ids[:window], self.tokens[:window])


def bundled_passage(tokenizer: PreTrainedTokenizerBase, bos: Bos | None = None) -> Passage:
    """Return the passage in the tokens of this tokenizer."""
    ids = tokenize([Document("passage", PASSAGE)], tokenizer, bos)[0][:PASSAGE_TOKENS]
    return Passage(ids, tuple(token_texts(ids, tokenizer)))


def own_passage(text: str, tokenizer: Any, bos: Bos | None = None) -> Passage:
    """Return a passage of the user's own in the tokens of this tokenizer; an error if it has too few."""
    if tokenizer is None:
        raise ConfigError("a passage needs a tokenizer; give one, or leave the passage out")
    ids = tokenize([Document("passage", text)], tokenizer, bos)[0]
    if len(ids) < FEWEST_TOKENS:
        raise CaptureError(f"the passage has {plural(len(ids), 'token')}; give a text of {FEWEST_TOKENS} or more")
    if len(ids) > OWN_TOKENS:
        _log.warning("the passage has %d tokens; the first %d are read", len(ids), OWN_TOKENS)
    return Passage(ids[:OWN_TOKENS], tuple(token_texts(ids[:OWN_TOKENS], tokenizer)))


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, the token they begin with, and the tokenizer."""

    documents: list[Document]
    tokens: list[np.ndarray | ImageInputs]
    """Token ids of each whole document, or the inputs of the model if it has images."""
    bos: Bos | None = None
    """The token that documents begin with; None: every document was given as token ids."""
    passage: Passage | None = None
    """The bundled passage, if there is a tokenizer."""
    tokenizer: Any = None

    @classmethod
    def read(cls, texts: TextOptions, model: ModelOptions) -> Corpus:
        """Read the documents that a command names, with the tokenizer of a model that is yet to be loaded."""
        documents = read_documents(list(texts.texts), texts.field, texts.max_docs)
        _log.info("%s; loading %s", plural(len(documents), "document"), model.model)
        tokenizer = load_tokenizer(model)
        bos = find_bos(model, tokenizer, texts.bos)
        return cls(documents, [*tokenize(documents, tokenizer, bos)], bos, bundled_passage(tokenizer, bos), tokenizer)

    @classmethod
    def of(cls, texts: Sequence[Any], tokenizer: Any, model: Any, bos: bool | None = None) -> Corpus:
        """Read texts for a loaded model: strings, rows of token ids, or others that ``read_texts`` knows.

        Strings begin as the model's own files say, unless ``bos`` is given; token ids are not changed.
        """
        if bos not in (None, True, False):
            raise ConfigError(f"expected bos to be True, False or None, got {bos!r:.60}")
        texts = read_texts(texts, tokenizer)
        begin = None
        if tokenizer is not None:
            begin = find_bos(_files_of(model, tokenizer), tokenizer, bos, model)
        documents, tokens = [], list[np.ndarray | ImageInputs]()
        for number, text in enumerate(texts):
            document = Document(f"text {number}", _identity(text))
            documents.append(document)
            tokens.append(_tokens_of(text, document, tokenizer, model, begin))
        rows = [row.ids if isinstance(row, ImageInputs) else row for row in tokens]
        check_vocabulary(rows, model, tokenizer)
        passage = None if tokenizer is None else bundled_passage(tokenizer, begin)
        has_strings = any(isinstance(text, str) for text in texts)
        return cls(documents, tokens, begin if has_strings else None, passage, tokenizer)

    @property
    def ids(self) -> list[np.ndarray]:
        """Token ids of each document; of one with images, those of its text."""
        return [tokens.ids if isinstance(tokens, ImageInputs) else tokens for tokens in self.tokens]

    def passage_of(self, text: str | None) -> Passage | None:
        """Return the passage with this text; without a text, the bundled one."""
        return self.passage if text is None else own_passage(text, self.tokenizer, self.bos)

    @property
    def words(self) -> Callable[[np.ndarray], list[str]] | None:
        """A function from token ids to each token as text; None without a tokenizer."""
        return None if self.tokenizer is None else partial(token_texts, tokenizer=self.tokenizer)

    @property
    def repeated_tokens(self) -> RepeatedTokens:
        """The rule by which repeated tokens are drawn for this tokenizer; they begin as documents do."""
        bos = None if self.bos is None else self.bos.token
        if self.tokenizer is None:
            return RepeatedTokens(bos)
        special = getattr(self.tokenizer, "all_special_ids", ())
        return RepeatedTokens(bos, tuple(sorted(map(int, special))), len(self.tokenizer))

    def about(self, model: str, revision: str | None = None, overrides: Any = None) -> dict[str, Any]:
        """Return the entries of run.json on where the model comes from and how documents begin."""
        bos = None if self.bos is None else self.bos.as_dict()
        return {"id": model, "revision": revision, "config_overrides": overrides, "bos": bos}

    def cut(self, window: int, model: Any) -> list[torch.Tensor]:
        """Return the documents of 16 tokens or more, cut to a window, as interventions read them."""
        if not is_whole(window) or window < SHORTEST:
            raise ConfigError(f"expected a window of {SHORTEST} tokens or more, got {window!r}")
        documents = [torch.from_numpy(ids[:window]) for ids in self.ids if len(ids) >= SHORTEST]
        if not documents:
            raise CaptureError(f"no document has {SHORTEST} tokens; give longer texts")
        check_tokens(self.ids, int(model.get_input_embeddings().weight.shape[0]))
        _log.info("%s, up to %s each", plural(len(documents), "document"), plural(max(map(len, documents)), "token"))
        return documents


def _tokens_of(text: Any, document: Document, tokenizer: Any, model: Any, bos: Bos | None) -> np.ndarray | ImageInputs:
    if isinstance(text, str):
        return tokenize([document], tokenizer, bos)[0]
    if isinstance(text, Mapping):
        if has_images(text):
            return image_inputs(model, text, document.name)
        return tensors(text)["input_ids"][0].cpu().numpy()
    ids = np.asarray(text)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        got = f"{ids.dtype} of shape {ids.shape}"
        raise ConfigError(f"{document.name}: expected token ids as one row of integers, got {got}")
    return ids.astype(np.int64)


def _identity(text: Any) -> str:
    """Return a string that identifies a text: itself, its tokens or, with images, all its inputs."""
    if isinstance(text, Mapping):
        return inputs_text(text)
    return text if isinstance(text, str) else " ".join(map(str, np.asarray(text).reshape(-1).tolist()))


def _files_of(model: Any, tokenizer: Any) -> ModelOptions:
    """Return where a loaded model and its tokenizer come from, as far as they record it."""
    of_tokenizer = getattr(tokenizer, "init_kwargs", {})
    gguf = next((v for v in of_tokenizer.values() if isinstance(v, str) and v.endswith(".gguf")), None)
    if gguf is not None and Path(gguf).is_file():
        return ModelOptions(gguf)
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    return ModelOptions(name, tokenizer=str(getattr(tokenizer, "name_or_path", "") or "") or None)
