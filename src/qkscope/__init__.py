"""qkscope: how much of a head's query–key geometry is position, how much is content.

>>> import qkscope
>>> run = qkscope.open("runs/my-model")           # doctest: +SKIP
>>> qkscope.pca(run), qkscope.rotation(run)       # doctest: +SKIP
>>> run.head(5, 7).rotation.bias_strength         # doctest: +SKIP
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qkscope._version import __version__

if TYPE_CHECKING:
    from qkscope import plot
    from qkscope.capture import intervene
    from qkscope.errors import QkscopeError
    from qkscope.extras.cutting import cut_costs
    from qkscope.extras.cutting import cut_heads as cut
    from qkscope.extras.effects import effects
    from qkscope.extras.exports.formats import export_run, read_export
    from qkscope.extras.inmemory import capture_model, write_report
    from qkscope.extras.pull import pull
    from qkscope.extras.push import push
    from qkscope.extras.pushoptions import PushOptions
    from qkscope.pipeline.python import analyze_runs as analyze
    from qkscope.pipeline.python import (
        distance,
        head_table,
        pca,
        planes,
        plasticity,
        position,
        reach,
        rotation,
        scores,
        tables,
    )
    from qkscope.runs.run import Head, Run
    from qkscope.runs.run import open_run as open  # noqa: A004

__all__ = [
    "Head",
    "PushOptions",
    "QkscopeError",
    "Run",
    "__version__",
    "analyze",
    "capture_model",
    "cut",
    "cut_costs",
    "distance",
    "effects",
    "export_run",
    "head_table",
    "intervene",
    "open",
    "pca",
    "planes",
    "plasticity",
    "plot",
    "position",
    "pull",
    "push",
    "reach",
    "read_export",
    "rotation",
    "scores",
    "tables",
    "write_report",
]

# Looked up on first use, so that ``import qkscope`` stays fast.
_WHERE = {
    "Head": ("qkscope.runs.run", "Head"),
    "PushOptions": ("qkscope.extras.pushoptions", "PushOptions"),
    "QkscopeError": ("qkscope.errors", "QkscopeError"),
    "Run": ("qkscope.runs.run", "Run"),
    "analyze": ("qkscope.pipeline.python", "analyze_runs"),
    "cut": ("qkscope.extras.cutting", "cut_heads"),
    "cut_costs": ("qkscope.extras.cutting", "cut_costs"),
    "capture_model": ("qkscope.extras.inmemory", "capture_model"),
    "distance": ("qkscope.pipeline.python", "distance"),
    "effects": ("qkscope.extras.effects", "effects"),
    "export_run": ("qkscope.extras.exports.formats", "export_run"),
    "intervene": ("qkscope.capture.intervene", ""),
    "head_table": ("qkscope.pipeline.python", "head_table"),
    "open": ("qkscope.runs.run", "open_run"),
    "pca": ("qkscope.pipeline.python", "pca"),
    "planes": ("qkscope.pipeline.python", "planes"),
    "plasticity": ("qkscope.pipeline.python", "plasticity"),
    "plot": ("qkscope.plot", ""),
    "position": ("qkscope.pipeline.python", "position"),
    "pull": ("qkscope.extras.pull", "pull"),
    "push": ("qkscope.extras.push", "push"),
    "reach": ("qkscope.pipeline.python", "reach"),
    "read_export": ("qkscope.extras.exports.formats", "read_export"),
    "scores": ("qkscope.pipeline.python", "scores"),
    "rotation": ("qkscope.pipeline.python", "rotation"),
    "tables": ("qkscope.pipeline.python", "tables"),
    "write_report": ("qkscope.extras.inmemory", "write_report"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        hint = f"; did you mean {' or '.join(close)}?" if (close := get_close_matches(name, __all__, 2)) else ""
        raise AttributeError(f"module 'qkscope' has no attribute {name!r}{hint}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute) if attribute else import_module(module)


def __dir__() -> list[str]:
    return __all__
