"""What a figure is: a name, a description, functions that prepare and draw its data, and sentences about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure as Drawing

from qkscope.errors import QkscopeError
from qkscope.study.study import Study


class NotApplicable(QkscopeError):
    """A figure that does not apply to this study; the text gives the reason."""


@dataclass(frozen=True)
class Figure:
    """One figure of the catalogue."""

    name: str
    """Folder below ``figures/``, such as ``qk-pca/01_pc_roles``."""
    title: str
    shows: str
    """What is drawn, in a sentence or two."""
    prepare: Callable[[Study], pd.DataFrame]
    """Returns exactly the numbers that are drawn; raises ``NotApplicable`` if there are none."""
    draw: Callable[[pd.DataFrame], Drawing]
    says: Callable[[pd.DataFrame], list[str]]
    """What it shows in this data, in sentences whose numbers come from the prepared data."""


def needed(frame: pd.DataFrame | None, what: str) -> pd.DataFrame:
    """The table, or the reason why there is no figure."""
    if frame is None or frame.empty:
        raise NotApplicable(f"there is no table with {what}")
    return frame
