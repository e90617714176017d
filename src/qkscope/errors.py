"""Errors; their messages name the head, the file and what to do."""

from __future__ import annotations

from os import PathLike

from qkscope.headids import HeadId


class QkscopeError(Exception):
    """Base of every error that qkscope raises on purpose; its text is one line for the user."""


class ConfigError(QkscopeError):
    """A configuration or an option that cannot be used."""


class DatasetError(QkscopeError):
    """A dataset or a captured run that cannot be opened, so none of its heads can be analysed."""


class CaptureError(QkscopeError):
    """A model or a text that cannot be captured."""


class NotNestedError(CaptureError):
    """A model that cannot be measured at several windows in one pass."""


class HubError(QkscopeError):
    """A repository or file that cannot be sent to the Hub, or fetched from it."""


class HeldError(QkscopeError):
    """A folder that another process holds."""


class TableError(QkscopeError):
    """A table that cannot be read, written or merged."""


class HeadError(QkscopeError):
    """One head that cannot be analysed; the others can.

    >>> str(HeadError(HeadId(5, 13, "q"), "the file has no rows", "data/l05h13q/data.parquet"))
    'l05h13q: the file has no rows [data/l05h13q/data.parquet]'
    """

    def __init__(self, head: HeadId, reason: str, file: str | PathLike[str] | None = None) -> None:
        self.head, self.reason, self.file = head, reason, None if file is None else str(file)
        super().__init__(f"{head}: {reason}" + (f" [{self.file}]" if self.file else ""))

    def __reduce__(self) -> tuple[type[HeadError], tuple[HeadId, str, str | None]]:
        return HeadError, (self.head, self.reason, self.file)
