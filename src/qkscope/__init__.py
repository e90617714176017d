"""qkscope: how much of a head's query–key geometry is position, how much is content.

>>> import qkscope
>>> run = qkscope.open("runs/my-model")           # doctest: +SKIP
>>> qkscope.heads(run), qkscope.rotated(run)      # doctest: +SKIP
>>> run.head(5, 7).rotation.bias_strength         # doctest: +SKIP
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkscope._version import __version__

if TYPE_CHECKING:
    from qkscope import plot
    from qkscope.api import (
        analyze,
        capture_model,
        compare,
        cut,
        cut_costs,
        distance,
        effects,
        head_table,
        heads,
        open,  # noqa: A004
        pca,
        planes,
        plasticity,
        position,
        qk,
        reach,
        rotated,
        rotation,
        scores,
        tables,
        top,
        write_report,
    )
    from qkscope.cause import intervene
    from qkscope.cause.cutcache import cut_cache
    from qkscope.errors import QkscopeError
    from qkscope.integrations.exports.formats import export_run, read_export
    from qkscope.integrations.hub import PushOptions
    from qkscope.integrations.hub.pull import pull
    from qkscope.integrations.hub.push import push
    from qkscope.runs.run import Head, Run

__all__ = [
    "Head",
    "PushOptions",
    "QkscopeError",
    "Run",
    "__version__",
    "analyze",
    "capture_model",
    "compare",
    "cut",
    "cut_cache",
    "cut_costs",
    "distance",
    "effects",
    "export_run",
    "head_table",
    "heads",
    "intervene",
    "open",
    "pca",
    "planes",
    "plasticity",
    "plot",
    "position",
    "pull",
    "push",
    "qk",
    "reach",
    "read_export",
    "roles",
    "rotated",
    "rotation",
    "scores",
    "tables",
    "top",
    "write_report",
]

# Imported on first use, so that ``import qkscope`` stays fast; all other names are functions of qkscope.api.
_ELSEWHERE = {
    "Head": "qkscope.runs.run",
    "PushOptions": "qkscope.integrations.hub",
    "QkscopeError": "qkscope.errors",
    "Run": "qkscope.runs.run",
    "cut_cache": "qkscope.cause.cutcache",
    "export_run": "qkscope.integrations.exports.formats",
    "pull": "qkscope.integrations.hub.pull",
    "push": "qkscope.integrations.hub.push",
    "read_export": "qkscope.integrations.exports.formats",
}
_SHARED = ("export_run", "pull", "push", "read_export")
"""Functions that commands call too, whose errors name options as in Python if they are called from there."""
_MODULES = {"intervene": "qkscope.cause.intervene", "plot": "qkscope.plot"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in __all__:
        hint = f"; did you mean {' or '.join(close)}?" if (close := get_close_matches(name, __all__, 2)) else ""
        raise AttributeError(f"module 'qkscope' has no attribute {name!r}{hint}")
    from qkscope.options import in_python_terms

    found = getattr(import_module(_ELSEWHERE.get(name, "qkscope.api")), name)
    return in_python_terms(found) if name in _SHARED else found


def __dir__() -> list[str]:
    return __all__
