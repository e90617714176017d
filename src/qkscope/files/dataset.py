"""A dataset of query and key vectors: which heads it holds, which key head each query head reads, their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from qkscope.core.rows import Rows
from qkscope.errors import DatasetError, HeadError
from qkscope.files.atomic import write_together
from qkscope.files.hub import Files, Located, locate
from qkscope.files.readers import read_text
from qkscope.files.ropecard import RopeCard, parse_rotary
from qkscope.files.vectors import DATA_FILE, read_rows, write_rows
from qkscope.heads import HeadId

CARD = "dataset.json"
"""What a dataset may say of itself, beside its heads: q_per_kv, window, scaling, rope."""
_CARD_KEYS = {"q_per_kv": int, "window": int, "scaling": float}


@dataclass(frozen=True)
class Dataset:
    """The heads of one dataset and how to read them; holds no vectors."""

    files: Files
    heads: Mapping[HeadId, str]
    """File name of every query and key head."""
    q_per_kv: int
    """Query heads per key head."""
    window: int | None = None
    """Context length of the capture, where the dataset says so."""
    scaling: float | None = None
    """Factor on q·k before the softmax, where the dataset says so; else d^−½."""
    rotary: RopeCard = field(default_factory=RopeCard)
    """Rotary encoding, where the dataset says so."""

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
        """Open a local folder, a Hub id or an ``hf://`` URL; what is given here overrides what the dataset says."""
        located = locate(location, revision)
        names = located.files.names()
        prefix, heads = _find_heads(names, located, os.fspath(location))
        said = _read_card(located.files, names, prefix)
        for name, given in (("q_per_kv", q_per_kv), ("window", window)):
            if given is not None and not 0 < given < 2**31:
                raise DatasetError(f"expected {name} to be a positive 32-bit number, got {given}")
        ratio = q_per_kv or said.get("q_per_kv") or derive_q_per_kv(heads)
        if rope is None:
            rotary = parse_rotary(said.get("rope"), f"{os.fspath(location)}: {CARD}")
        else:
            rotary = parse_rotary(dict(rope), "rope")
        return cls(located.files, heads, ratio, window or said.get("window"), said.get("scaling"), rotary)

    @property
    def query_heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""
        return sorted(head for head in self.heads if head.kind == "q")

    def path(self, head: HeadId) -> Path:
        """A local path of this head's file, fetched from the Hub if need be."""
        if head not in self.heads:
            raise HeadError(head, "the dataset has no file for this head")
        return self.files.path(self.heads[head])

    def key_head(self, head: HeadId) -> HeadId:
        """The key head that a query head reads; a ``HeadError`` if the dataset lacks it."""
        key = head.key_head(self.q_per_kv)
        if key not in self.heads:
            reason = f"its key head {key} is missing (with {self.q_per_kv} query heads per key head; "
            raise HeadError(head, reason + "set data.q_per_kv or --q-per-kv if that is wrong)", self.heads.get(head))
        return key

    def read(self, head: HeadId) -> Rows:
        """The rows of one head, as they stand in its file."""
        return read_rows(self.path(head), head)


def write_dataset(
    folder: str | os.PathLike[str],
    heads: Iterable[tuple[HeadId, Rows]],
    *,
    q_per_kv: int,
    window: int | None = None,
    scaling: float | None = None,
    rope: Mapping[str, Any] | None = None,
) -> Path:
    """Write heads in the dataset layout, and a card that says what their files cannot."""
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
    """Write what a dataset says of itself."""
    if not (isinstance(q_per_kv, int) and q_per_kv > 0):
        raise ValueError(f"expected q_per_kv to be a positive int, got {q_per_kv!r}")
    parse_rotary(rope, "rope")
    card = {"q_per_kv": q_per_kv, "window": window, "scaling": scaling, "rope": rope}
    text = json.dumps({key: value for key, value in card.items() if value is not None}, indent=2) + "\n"
    write_together(target, {CARD: text.encode()})


def derive_q_per_kv(heads: Iterable[HeadId]) -> int:
    """Query heads per key head, from the highest indices present: (max q + 1) / (max k + 1).

    Refused where that is not a whole number, or where it leaves key heads missing that another ratio would not.

    >>> derive_q_per_kv([HeadId(0, 0, "q"), HeadId(3, 23, "q"), HeadId(0, 0, "k"), HeadId(3, 7, "k")])
    3
    """
    present = set(heads)
    queries = {head for head in present if head.kind == "q"}
    if not queries or len(queries) == len(present):
        lacking = "query" if not queries else "key"
        raise DatasetError(f"the dataset holds no {lacking} heads; both kinds are needed")
    n_q, n_k = (1 + max(head.head for head in part) for part in (queries, present - queries))
    fitting = [ratio for ratio in range(1, n_q + 1) if (n_q - 1) // ratio == n_k - 1]
    complete = [ratio for ratio in fitting if all(head.key_head(ratio) in present for head in queries)]
    ratio, rest = divmod(n_q, n_k)
    hint = f"; {' or '.join(map(str, complete or fitting))} would fit" if complete or fitting else ""
    if rest or ratio == 0:
        raise DatasetError(
            f"cannot tell how many query heads read one key head: {n_q} query and {n_k} key heads by their highest "
            f"indices; set data.q_per_kv or --q-per-kv{hint}"
        )
    if complete and ratio not in complete:
        raise DatasetError(
            f"cannot tell how many query heads read one key head: {n_q}/{n_k} = {ratio} leaves key heads missing; "
            f"set data.q_per_kv or --q-per-kv{hint}"
        )
    return ratio


def _find_heads(names: list[str], located: Located, location: str) -> tuple[str, dict[HeadId, str]]:
    """Heads below one prefix; several prefixes are several datasets, and the caller has to choose."""
    wanted = PurePosixPath(located.prefix)
    by_prefix: dict[str, dict[HeadId, str]] = {}
    for name in names:
        path = PurePosixPath(name)
        head = HeadId.match(path.parent.name)
        if path.name != DATA_FILE or head is None or not path.parent.parent.is_relative_to(wanted):
            continue
        found = by_prefix.setdefault(str(path.parent.parent), {})
        if head in found:
            raise DatasetError(f"two files claim the head {head}: {found[head]} and {name}; remove one")
        found[head] = name
    if not by_prefix:
        raise DatasetError(f"{location} holds no heads; expected files such as l05h13q/{DATA_FILE}")
    if len(by_prefix) > 1:
        some = ", ".join(sorted(by_prefix)[:5])
        raise DatasetError(f"{location} holds {len(by_prefix)} datasets ({some}); name one of them")
    return next(iter(by_prefix.items()))


def _read_card(files: Files, names: list[str], prefix: str) -> dict[str, Any]:
    name = str(PurePosixPath(prefix) / CARD)
    if name not in names:
        return {}
    path = files.path(name)
    try:
        said = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path} cannot be read as JSON ({error}); correct or remove it") from None
    if not isinstance(said, dict):
        raise DatasetError(f"{path}: expected a JSON object with {', '.join(_CARD_KEYS)}")
    for key, kind in _CARD_KEYS.items():
        value = said.get(key)
        number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 2**31):
            raise DatasetError(f"{path}: expected {key} to be a positive {kind.__name__}, got {value!r}")
    return said
