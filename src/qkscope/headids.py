"""Names of heads: ``HeadId`` ↔ ``"l05h13q"``, which key head a query head reads, and the published choice of heads."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

TERMS = ("position", "key", "query", "content")
"""The terms of a head's score, which is exactly their sum."""
Kind = Literal["q", "k"]

_NAME = re.compile(r"l(\d{1,4})h(\d{1,4})([qk])", re.ASCII)


class HeadId(NamedTuple):
    """A query or key head of one layer; sorts by layer, then head.

    >>> str(HeadId(5, 13, "q"))
    'l05h13q'
    >>> HeadId.parse("l101h07k")
    HeadId(layer=101, head=7, kind='k')
    """

    layer: int
    head: int
    kind: Kind

    def __str__(self) -> str:
        return head_name(self.layer, self.head) + self.kind

    @classmethod
    def parse(cls, name: str) -> HeadId:
        """Parse a head's name; raise ``ValueError`` if it is not valid."""
        head = cls.match(name)
        if head is None:
            raise ValueError(f"expected a head name such as 'l05h13q', got {name!r}")
        return head

    @classmethod
    def match(cls, name: str) -> HeadId | None:
        """The head with this name, or None if ``name`` is not the name of a head.

        >>> HeadId.match("README.md") is None
        True
        """
        parsed = _NAME.fullmatch(name)
        if parsed is None:
            return None
        layer, head, kind = parsed.groups()
        return cls(int(layer), int(head), "q" if kind == "q" else "k")

    def key_head(self, q_per_kv: int) -> HeadId:
        """The key head this query head reads: ``h // q_per_kv`` of the same layer.

        >>> str(HeadId(5, 13, "q").key_head(4))
        'l05h03k'
        """
        return HeadId(self.layer, self.head // q_per_kv, "k")


def head_name(layer: Any, head: Any) -> str:
    """The name of a query head of a layer, as commands, pages and their addresses have it.

    >>> head_name(5, 13)
    'l05h13'
    """
    return f"l{int(layer):02d}h{int(head):02d}"


SEED = 42
"""The published collages show four heads drawn with this seed."""
N_SHOWN = 4


def choose_heads(heads: Sequence[tuple[int, int]], seed: int = SEED, count: int = N_SHOWN) -> list[tuple[int, int]]:
    """The published choice: ``random.Random(seed).sample`` over heads sorted by (layer, head).

    >>> choose_heads([(0, 0), (0, 1)])
    [(0, 0), (0, 1)]
    """
    ordered = sorted(heads)
    return ordered if len(ordered) <= count else random.Random(seed).sample(ordered, count)


def read_by(query_heads: Sequence[int], key_heads: Sequence[int], q_per_kv: int) -> list[int]:
    """Return, for each query head of a layer, the index of the key head that it reads.

    >>> read_by([0, 1, 5], [0, 2], 2)
    [0, 0, 1]
    """
    return [key_heads.index(head // q_per_kv) for head in query_heads]
