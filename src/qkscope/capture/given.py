"""Models and texts as Python callers pass them: checked, with messages that name the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from qkscope.capture.images import has_images
from qkscope.capture.watch import backbone, plain_model
from qkscope.errors import CaptureError, ConfigError

TEXT, IDS = "text", "input_ids"
"""The field of a document that holds its text, and the one that holds its token ids."""


def check_model(model: Any, call: str) -> None:
    """Raise an error unless this is a loaded model with weights; ``call`` is how the function is called."""
    if not isinstance(model, nn.Module) and not callable(getattr(model, "get_base_model", None)):
        advice = "; load it first, as with AutoModelForCausalLM.from_pretrained" if isinstance(model, str) else ""
        raise ConfigError(f"{call}: expected model to be a loaded transformers model, got {described(model)}{advice}")
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    is_offloaded = any(hasattr(module, "_hf_hook") for module in modules)  # accelerate loads weights when needed
    if not is_offloaded and any(weight.is_meta for module in modules for weight in module.parameters(recurse=False)):
        raise ConfigError(
            f"{call}: model is on the meta device, so it has no weights; load it with from_pretrained, without "
            "device_map='meta' or torch.device('meta')"
        )


def read_texts(texts: Any, tokenizer: Any) -> list[Any]:
    """Return the documents of ``texts``: strings, token ids, or a processor's output for one document.

    A document may also be a dict with a field ``text`` or ``input_ids``, and all of them a dataset of such dicts, or a
    tokenizer's output for several texts.
    """
    if tokenizer is not None and not callable(tokenizer):
        advice = "; load it first, as with AutoTokenizer.from_pretrained" if isinstance(tokenizer, str) else ""
        raise ConfigError(f"expected tokenizer to be a tokenizer, got {described(tokenizer)}{advice}")
    documents = [_document(number, item) for number, item in enumerate(_items(texts))]
    if not documents:
        raise ConfigError("expected a list of texts, each a string or token ids, got none: texts is empty")
    if tokenizer is None and any(isinstance(document, str) for document in documents):
        raise ConfigError("texts as strings need a tokenizer; give one, or token ids")
    return documents


def check_vocabulary(ids: Sequence[np.ndarray], model: Any, tokenizer: Any) -> None:
    """Raise an error that names the first text with a token that is not in the model's vocabulary."""
    embedding: Any = backbone(plain_model(model)).get_input_embeddings()
    size = int(embedding.weight.shape[0])
    for number, tokens in enumerate(ids):
        foreign = tokens[(tokens < 0) | (tokens >= size)]
        if len(foreign):
            advice = "give token ids of the model's own tokenizer" if tokenizer is None else "give its own tokenizer"
            raise CaptureError(
                f"text {number} has token {foreign[0]}, but the model has tokens 0 to {size - 1}; {advice}"
            )


def described(value: Any) -> str:
    """Return what a value is, in a few words."""
    name = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, nn.Module):
        return f"a model ({name})"
    if isinstance(value, PreTrainedTokenizerBase):
        return f"a tokenizer ({name})"
    if isinstance(value, Mapping):
        return f"a dict with the keys {', '.join(map(str, list(value)[:8]))}" if len(value) else "an empty dict"
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def _items(texts: Any) -> Iterable[Any]:
    expected = "expected a list of texts, each a string or token ids"
    if isinstance(texts, Mapping):
        if IDS in texts:
            return [texts] if has_images(texts) else _rows(texts)
        if TEXT in texts:
            return [texts] if isinstance(texts[TEXT], str) else texts[TEXT]
        advice = f"; give one of its values, as texts[{next(iter(texts))!r}]" if len(texts) else ""
        raise ConfigError(f"{expected}, got {described(texts)}{advice}")
    if isinstance(texts, nn.Module | PreTrainedTokenizerBase):
        raise ConfigError(f"{expected}, got {described(texts)} as texts; the order is model, texts, tokenizer")
    if isinstance(texts, str):
        raise ConfigError(f"{expected}, got a string as texts; put it into a list")
    if not isinstance(texts, Sized) or not isinstance(texts, Iterable):
        advice = "; give list(texts)" if isinstance(texts, Iterable) else ""
        raise ConfigError(f"{expected}, got {described(texts)} as texts{advice}")
    return texts


def _rows(encoding: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of each row of a tokenizer's output, without padding."""
    ids = encoding[IDS]
    if not len(ids) or np.ndim(ids[0]) == 0:
        return [encoding]
    mask = encoding.get("attention_mask")
    if mask is None:
        return list(ids)
    return [np.asarray(row)[np.asarray(used, dtype=bool)] for row, used in zip(ids, mask, strict=True)]


def _document(number: int, item: Any) -> Any:
    """Return a string, token ids or a processor's output, of an item of ``texts``."""
    if not isinstance(item, Mapping):
        return item
    if isinstance(item.get(TEXT), str):
        return item[TEXT]
    if IDS not in item:
        raise ConfigError(f"expected text {number} to have a field '{TEXT}' or '{IDS}', got {described(item)}")
    return item
