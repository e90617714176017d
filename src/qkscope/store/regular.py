"""Files that are files: a pipe or a device in place of one would be read without end."""

from __future__ import annotations

from pathlib import Path

MOST_TEXT = 2**30
"""Bytes beyond which a file of text is none of ours."""


def check_regular(path: Path) -> None:
    """Raise an ``OSError`` unless there is a regular file, or a link to one."""
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")


def read_text(path: Path) -> str:
    """The text of a regular file; an ``OSError`` or a ``ValueError`` says why there is none."""
    check_regular(path)
    if path.stat().st_size > MOST_TEXT:
        raise ValueError("it is larger than any of ours")
    return path.read_text(encoding="utf-8")
