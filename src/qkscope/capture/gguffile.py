"""A GGUF file, parsed once: tokenizer, config, weights and BOS each ask for it, and that takes seconds every time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any


@contextmanager
def parsed_once() -> Iterator[None]:
    """While it holds, ``gguf.GGUFReader`` returns the file that was parsed last, if it is asked for that one again."""
    try:
        import gguf
    except ImportError:  # needed for GGUF files only
        yield
        return
    plain: Any = gguf.GGUFReader

    def reader(path: os.PathLike[str] | str, mode: str = "r") -> Any:
        if mode != "r":
            return plain(path, mode)
        status = Path(path).stat()
        return _parsed(plain, str(Path(path).resolve()), status.st_mtime_ns, status.st_size)

    gguf.GGUFReader = reader  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        gguf.GGUFReader = plain  # type: ignore[misc]


def forget_parsed() -> None:
    """Let go of the file that was parsed last."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(plain: Any, path: str, *_: int) -> Any:
    return plain(path)
