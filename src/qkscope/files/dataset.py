"""A dataset of query and key vectors: its heads, their files, and which key head each query head reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np
import pandas as pd

from qkscope.core.rope import Layout, Rope
from qkscope.core.rows import Rows
from qkscope.errors import DatasetError, HeadError
from qkscope.files.atomic import write_together
from qkscope.files.hub import Files, Located, locate
from qkscope.files.readers import read_text
from qkscope.files.vectors import DATA_FILE, no_token_texts, read_rows, read_token_texts, write_rows
from qkscope.headids import HeadId

_KEYS = ("theta", "dims", "frequencies", "layout", "start", "sign")


@dataclass(frozen=True)
class RopeCard:
    """The rotary encoding of each layer, if known."""

    everywhere: Mapping[str, Any] | None = None
    """Description for all layers."""
    layers: Mapping[int, Mapping[str, Any] | None] = field(default_factory=dict)
    """Descriptions of single layers; None: no rotary encoding."""

    @property
    def known(self) -> bool:
        """True if any layer is described."""
        return self.everywhere is not None or bool(self.layers)

    def nope(self, layer: int) -> bool | None:
        """True if a layer has no rotary encoding; None if the layer is not described."""
        if layer in self.layers:
            return self.layers[layer] is None
        return None if self.everywhere is None else False

    def of(self, layer: int, d: int) -> Rope | None:
        """The encoding of a layer whose vectors have length d; None if it has none or is not described."""
        description = self.layers.get(layer, self.everywhere) if layer in self.layers else self.everywhere
        if description is None:
            return None
        dims = int(description.get("dims") or d)
        given_frequencies = description.get("frequencies")
        planes = dims // 2 if given_frequencies is None else len(given_frequencies)
        start = int(description.get("start", 0))
        if start + 2 * planes > d:
            raise DatasetError(
                f"the rotary encoding of layer {layer} rotates coordinates {start} to {start + 2 * planes - 1}, but "
                f"its vectors have length {d}; correct rope in dataset.json, or --rope-theta"
            )
        if given_frequencies is None:
            frequencies = float(description["theta"]) ** (-2.0 * np.arange(planes) / dims)
        else:
            frequencies = np.array(given_frequencies, dtype=float)
        return Rope(frequencies, description.get("layout", "half"), start, int(description.get("sign", 1)))


def parse_rotary(description: Any, where: str) -> RopeCard:
    """Check a description; ``where`` names its location in messages."""
    if description is None:
        return RopeCard()
    if not isinstance(description, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(description).__name__}")
    layers = description.get("layers")
    if layers is None:
        return RopeCard(_checked(description, where))
    if not isinstance(layers, dict) or not all(str(key).isdecimal() and len(str(key)) < 6 for key in layers):
        raise DatasetError(f"{where}: expected rope.layers to be an object with layer numbers as keys")
    rest = {key: value for key, value in description.items() if key != "layers"}
    by_layer = {
        int(key): None if entry is None else _checked(entry, f"{where}, layer {key}") for key, entry in layers.items()
    }
    return RopeCard(_checked(rest, where) if rest else None, by_layer)


def _checked(description: Any, where: str) -> dict[str, Any]:
    if not isinstance(description, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(description).__name__}")
    unknown = [key for key in description if key not in _KEYS]
    if unknown:
        raise DatasetError(f"{where}: unknown key rope.{unknown[0]}; valid keys are {', '.join(_KEYS)}, layers")
    if ("theta" in description) == ("frequencies" in description):
        raise DatasetError(f"{where}: expected rope to have exactly one of theta and frequencies")
    numbers = description.get("frequencies", [description.get("theta")])
    if not isinstance(numbers, list) or not 0 < len(numbers) <= 4096 or not all(map(_finite, numbers)):
        raise DatasetError(f"{where}: expected rope.theta, or each of rope.frequencies, to be a finite number")
    if "theta" in description and description["theta"] <= 1:
        raise DatasetError(f"{where}: expected rope.theta above 1, got {description['theta']}")
    for key, lowest in (("dims", 2), ("start", 0)):
        value = description.get(key, lowest)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= 65536:
            raise DatasetError(f"{where}: expected rope.{key} to be an integer of at least {lowest}, got {value!r}")
    if description.get("layout", "half") not in get_args(Layout) or description.get("sign", 1) not in (1, -1):
        raise DatasetError(f"{where}: expected rope.layout to be {' or '.join(get_args(Layout))}, rope.sign 1 or -1")
    return dict(description)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12


CARD = "dataset.json"
"""File that describes a dataset; all keys are optional: q_per_kv, window, scaling, rope."""
_CARD_KEYS = {"q_per_kv": int, "window": int, "scaling": float}


@dataclass(frozen=True)
class Dataset:
    """The heads of one dataset and how to read them; contains no vectors."""

    files: Files
    heads: Mapping[HeadId, str]
    """File name of every query and key head."""
    q_per_kv: int
    """Query heads per key head."""
    window: int | None = None
    """Context length of the capture, if the dataset states it."""
    scaling: float | None = None
    """Factor on q·k before the softmax, if the dataset states it; otherwise d^−½."""
    rotary: RopeCard = field(default_factory=RopeCard)
    """Rotary encoding, if the dataset states it."""

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        revision: str | None = None,
        *,
        q_per_kv: int | None = None,
        window: int | None = None,
        rope: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Open a local folder, a Hub id or an ``hf://`` URL; arguments override the dataset's own description."""
        return cls.at(locate(location, revision), os.fspath(location), q_per_kv=q_per_kv, window=window, rope=rope)

    @classmethod
    def at(
        cls,
        located: Located,
        location: str,
        *,
        q_per_kv: int | None = None,
        window: int | None = None,
        rope: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """As ``open``, for files that are already located; ``location`` is the name to use in messages."""
        names = located.files.names()
        prefix, heads = _find_heads(names, located, location)
        card = _read_card(located.files, names, prefix)
        for name, value in (("q_per_kv", q_per_kv), ("window", window)):
            if value is not None and not 0 < value < 2**31:
                raise DatasetError(f"expected {name} to be a positive 32-bit integer, got {value}")
        ratio = q_per_kv or card.get("q_per_kv") or derive_q_per_kv(heads)
        if rope is None:
            rotary = parse_rotary(card.get("rope"), f"{location}: {CARD}")
        else:
            rotary = parse_rotary(dict(rope), "rope")
        return cls(located.files, heads, ratio, window or card.get("window"), card.get("scaling"), rotary)

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""
        return sorted(head for head in self.heads if head.kind == "q")

    def path(self, head: HeadId) -> Path:
        """A local path of this head's file, downloaded from the Hub if necessary."""
        if head not in self.heads:
            raise HeadError(head, "the dataset has no file for this head")
        return self.files.path(self.heads[head])

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if the dataset does not contain it."""
        key = head.key_head(self.q_per_kv)
        if key not in self.heads:
            reason = (
                f"its key head {key} is missing (with {self.q_per_kv} query heads per key head; "
                "set data.q_per_kv or --q-per-kv if that is wrong)"
            )
            raise HeadError(head, reason, self.heads.get(head))
        return key

    def read(self, head: HeadId) -> Rows:
        """The rows of one head, in the order of its file."""
        return read_rows(self.path(head), head)

    def token_texts(self) -> pd.DataFrame:
        """Tokens as text, from the file of the first query head; empty if it has none or cannot be read."""
        try:
            return read_token_texts(self.path(self.query_heads[0]))
        except (DatasetError, HeadError):
            return no_token_texts()


def write_dataset(
    folder: str | os.PathLike[str],
    heads: Iterable[tuple[HeadId, Rows]],
    *,
    q_per_kv: int,
    window: int | None = None,
    scaling: float | None = None,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """Write heads in the dataset layout, with a dataset.json for the properties that their files do not contain."""
    target = Path(folder)
    for head, rows in heads:
        write_rows(target / str(head) / DATA_FILE, rows)
    write_card(target, q_per_kv=q_per_kv, window=window, scaling=scaling, rope=rope)
    return target


def write_card(
    target: Path,
    *,
    q_per_kv: int,
    window: int | None = None,
    scaling: float | None = None,
    rope: Mapping[str, Any] | None = None,
) -> None:
    """Write the dataset.json of a dataset."""
    if not (isinstance(q_per_kv, int) and q_per_kv > 0):
        raise ValueError(f"expected q_per_kv to be a positive int, got {q_per_kv!r}")
    parse_rotary(rope, "rope")
    card = {"q_per_kv": q_per_kv, "window": window, "scaling": scaling, "rope": rope}
    text = json.dumps({key: value for key, value in card.items() if value is not None}, indent=2) + "\n"
    write_together(target, {CARD: text.encode()})


def derive_q_per_kv(heads: Iterable[HeadId]) -> int:
    """Query heads per key head, from the highest indices present: (max q + 1) / (max k + 1).

    Raise an error if this is not a whole number, or if key heads are missing that another ratio would not need.

    >>> derive_q_per_kv([HeadId(0, 0, "q"), HeadId(3, 23, "q"), HeadId(0, 0, "k"), HeadId(3, 7, "k")])
    3
    """
    present = set(heads)
    queries = {head for head in present if head.kind == "q"}
    if not queries or len(queries) == len(present):
        absent_kind = "query" if not queries else "key"
        raise DatasetError(f"the dataset contains no {absent_kind} heads; it needs both query and key heads")
    n_q, n_k = (1 + max(head.head for head in kind) for kind in (queries, present - queries))
    fitting = [ratio for ratio in range(1, n_q + 1) if (n_q - 1) // ratio == n_k - 1]
    complete = [ratio for ratio in fitting if all(head.key_head(ratio) in present for head in queries)]
    ratio, remainder = divmod(n_q, n_k)
    hint = f"; {' or '.join(map(str, complete or fitting))} would fit" if complete or fitting else ""
    if remainder or ratio == 0:
        raise DatasetError(
            f"cannot determine the number of query heads per key head: the highest indices give {n_q} query heads and "
            f"{n_k} key heads; set data.q_per_kv or --q-per-kv{hint}"
        )
    if complete and ratio not in complete:
        raise DatasetError(
            f"cannot determine the number of query heads per key head: with {n_q}/{n_k} = {ratio}, key heads are "
            f"missing; set data.q_per_kv or --q-per-kv{hint}"
        )
    return ratio


def _find_heads(names: list[str], located: Located, location: str) -> tuple[str, dict[HeadId, str]]:
    """The heads below one prefix; several prefixes are several datasets, which is an error."""
    prefix = PurePosixPath(located.prefix)
    by_prefix: dict[str, dict[HeadId, str]] = {}
    for name in names:
        path = PurePosixPath(name)
        head = HeadId.match(path.parent.name)
        if path.name != DATA_FILE or head is None or not path.parent.parent.is_relative_to(prefix):
            continue
        heads = by_prefix.setdefault(str(path.parent.parent), {})
        if head in heads:
            raise DatasetError(f"two files for head {head}: {heads[head]} and {name}; remove one")
        heads[head] = name
    if not by_prefix:
        raise DatasetError(f"{location} contains no heads; expected files such as l05h13q/{DATA_FILE}")
    if len(by_prefix) > 1:
        prefixes = ", ".join(sorted(by_prefix)[:5])
        raise DatasetError(f"{location} contains {len(by_prefix)} datasets ({prefixes}); give the path of one of them")
    return next(iter(by_prefix.items()))


def _read_card(files: Files, names: list[str], prefix: str) -> dict[str, Any]:
    name = str(PurePosixPath(prefix) / CARD)
    if name not in names:
        return {}
    path = files.path(name)
    try:
        card = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read as JSON ({error}); correct or remove it") from None
    if not isinstance(card, dict):
        raise DatasetError(f"{path}: expected a JSON object with {', '.join(_CARD_KEYS)}")
    for key, number_type in _CARD_KEYS.items():
        value = card.get(key)
        is_number = isinstance(value, int | float if number_type is float else int) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < 2**31):
            raise DatasetError(f"{path}: expected {key} to be a positive {number_type.__name__}, got {value!r}")
    return card
