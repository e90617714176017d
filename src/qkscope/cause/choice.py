"""Choose the key heads to cut to a window: order them, write a cut, and compare the order with published lists.

Scores are high for key heads that need distant keys. A cut shortens those with the lowest score:

    far       predicted share of attention beyond the window (mean of the query heads that read the key head)
    area      minus the area under the cumulated mean-field softmax
    lock      minus how firmly the queries are locked to their position
    measured  measured share of attention beyond the window
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.stats import rankdata

from qkscope.analyses.options import AnalysisOptions
from qkscope.core.reach import cut_windows
from qkscope.engine import ExecutionTarget
from qkscope.errors import ConfigError
from qkscope.files.atomic import write_together
from qkscope.files.readers import read_text
from qkscope.files.runfolder import RunFolder
from qkscope.headids import head_name
from qkscope.options import is_whole
from qkscope.results.analyze import OnDone, analyze
from qkscope.results.job import Job
from qkscope.runs.captured import CapturedSource
from qkscope.runs.run import Run

ORDERS = {
    "far": ("predicted_beyond", 1.0),
    "area": ("curve_area", -1.0),
    "lock": ("lock_q", -1.0),
    "measured": ("mass_beyond", 1.0),
}
"""The column of each order, and its sign."""
KEY = ["layer", "k_head"]
KeyHead = tuple[int, int]
CUT, GATES, GATES_CONFIG = "cut.json", "full_attention_heads.tsv", "config.json"
_DRAWS = 1000


@dataclass(frozen=True)
class Cut:
    """Key heads that are cut: they keep a window of their keys, and the first few."""

    window: int
    sinks: int
    heads: list[KeyHead]
    order: str = ""
    scores: pd.Series | None = None
    """Score of every key head, by (layer, key head)."""
    by_layer: bool = False
    """True if whole layers were chosen."""

    @property
    def n_units(self) -> int:
        """Number of key heads, or of layers, that are cut."""
        return len({layer for layer, _ in self.heads}) if self.by_layer else len(self.heads)

    @property
    def windows(self) -> dict[KeyHead, int]:
        """The window of each head that is cut."""
        return dict.fromkeys(self.heads, self.window)


@dataclass(frozen=True)
class CutLimits:
    """The limits of a cut: the sinks, sliding windows and shape of a run's model."""

    sinks: int
    """Tokens at the start of a document that every head keeps."""
    sliding: dict[int, int | None]
    """The sliding window of each layer."""
    shape: tuple[int, int]
    """Number of layers and of key heads of the model."""
    model: dict[str, Any]
    """Its class, number of parameters, dtype and digest of weights."""

    @classmethod
    def of(cls, run: RunFolder, window: int | None = None, sinks: int | None = None) -> CutLimits:
        """Read the limits of cuts to a window from the manifest of a run; an error for encoders, which keep no keys.

        ``sinks`` are by default the first tokens that the run leaves out of its means.
        """
        if run.manifest.encoder:
            raise ConfigError(f"{run.folder} is a run of an encoder, which keeps no keys: there is nothing to cut")
        manifest = run.manifest
        if window is not None:
            check_known(window, cut_windows(manifest.window).tolist())
        sliding = {layer.layer: layer.sliding_window for layer in manifest.layers}
        n_layers = max(int(manifest.model.layers or 0), max(sliding) + 1)
        n_key_heads = 1 + max(head for layer in manifest.layers for head in layer.key_heads)
        sinks = manifest.options.skip_first if sinks is None else sinks
        if not is_whole(sinks) or sinks < 0:
            raise ConfigError(f"expected sinks, first tokens that stay, of 0 or more, got {sinks!r}")
        if window is not None and sinks > window:
            raise ConfigError(
                f"a cut to {window} tokens cannot keep the first {sinks}; give --sinks of {window} or less"
            )
        entry = manifest.model
        model = {"class": entry.type, "parameters": entry.parameters, "dtype": entry.dtype, "weights": entry.weights}
        return cls(sinks, sliding, (n_layers, n_key_heads), model)


def check_shares(keep: Any) -> None:
    """Raise an error unless these are shares of key heads that keep their reach."""
    shares = keep if isinstance(keep, list | tuple) else [keep]
    wrong = [share for share in shares if not isinstance(share, Real) or not 0 <= float(share) <= 1]
    if wrong or not shares:
        raise ConfigError(f"expected keep, a share of key heads, from 0 to 1, got {wrong[0] if wrong else keep!r}")


def check_order(by: str) -> None:
    """Raise an error unless it is one of the orders."""
    if by not in ORDERS:
        raise ConfigError(f"unknown order {by!r}; choose from {', '.join(ORDERS)}")


def check_known(window: int, widths: list[int]) -> None:
    """Raise an error unless reach is known for this window."""
    if window not in widths:
        raise ConfigError(f"reach is known for windows of {', '.join(map(str, widths))}; got {window!r}")


def middle_window(tables: dict[str, pd.DataFrame]) -> int:
    """Return the middle one of the windows in the table ``reach``."""
    widths = sorted(tables["reach"]["w"].unique().tolist())
    return int(widths[len(widths) // 2])


def query_head_table(tables: dict[str, pd.DataFrame], window: int) -> pd.DataFrame:
    """Return one row per query head: the columns of the orders, at this window."""
    reach = tables["reach"]
    widths = sorted(reach["w"].unique().tolist())
    check_known(window, widths)
    heads = reach[reach["w"] == window][["layer", "head", "k_head", "predicted_beyond", "mass_beyond", "curve_area"]]
    position = tables["position"][["layer", "head", "lock_q", "curve_range"]]
    return heads.merge(position, on=["layer", "head"], how="left")


def farthest_in_a_line(heads: pd.DataFrame, window: int, n: int = 3) -> str:
    """Return the heads with most and with least attention beyond a window, measured or else predicted, in words."""
    column = "mass_beyond" if heads["mass_beyond"].notna().any() else "predicted_beyond"
    ordered = heads.dropna(subset=[column]).sort_values(column, ascending=False, kind="stable")
    ends = [
        ", ".join(f"{head_name(row.layer, row.head)} ({getattr(row, column):.0%})" for row in rows.itertuples())
        for rows in (ordered.head(n), ordered.tail(n)[::-1])
    ]
    how = "" if column == "mass_beyond" else ", as predicted from means"
    return f"attention beyond {window:,} tokens{how}: most in {ends[0]}; least in {ends[1]}"


def key_head_scores(heads: pd.DataFrame, order: str, *, by_layer: bool = False) -> pd.Series:
    """Return the score of every key head: the mean over the query heads that read it, or over those of its layer."""
    column, sign = ORDERS[order]
    scores: pd.Series = sign * heads.groupby(KEY)[column].mean()
    if by_layer:
        scores = scores.groupby("layer").transform("mean")
    if scores.isna().any():
        layer, head = scores[scores.isna()].index[0]
        needs = "a run with --reach-queries" if order == "measured" else "a rotary encoding that is known"
        raise ConfigError(f"key head {head} of layer {layer} has no {column}: --by {order} needs {needs}")
    return scores


def choose(heads: pd.DataFrame, order: str, keep: float, window: int, sinks: int, *, by_layer: bool = False) -> Cut:
    """Cut the key heads with the lowest scores, all but a share ``keep``; or the layers, all of their key heads."""
    scores = key_head_scores(heads, order, by_layer=by_layer)
    units = _units(scores, by_layer=by_layer)
    count = len(units) - round(keep * len(units))
    lowest = [head for unit in units[:count] for head in unit]
    return Cut(window, sinks, sorted(lowest), order, scores, by_layer)


def _units(scores: pd.Series, *, by_layer: bool) -> list[list[KeyHead]]:
    """Return what is cut as one, key heads or layers, from the lowest score to the highest."""
    ordered = [(int(layer), int(head)) for layer, head in scores.sort_values(kind="stable").index]
    if not by_layer:
        return [[head] for head in ordered]
    layers: dict[int, list[KeyHead]] = {}
    for layer, head in ordered:
        layers.setdefault(layer, []).append((layer, head))
    return list(layers.values())


def every_cut(
    heads: pd.DataFrame,
    by: str,
    shares: list[float],
    window: int,
    sinks: int,
    draws: int,
    seed: int,
    *,
    by_layer: bool = False,
) -> list[Cut]:
    """Return cuts of no head and of all; and, for each share kept, by every known order, reversed, and at random.

    For the first share there are ``draws`` random choices, for the others a quarter as many.
    """
    known_orders = [order for order, (column, _) in ORDERS.items() if heads[column].notna().all()]
    cuts = [choose(heads, by, share, window, sinks) for share in (1.0, 0.0)]
    cuts = [replace(cut, order=name) for cut, name in zip(cuts, ("none", "all"), strict=True)]
    for number, share in enumerate(shares):
        chosen = choose(heads, by, share, window, sinks, by_layer=by_layer)
        cuts += [choose(heads, order, share, window, sinks, by_layer=by_layer) for order in known_orders]
        cuts += [_reversed(chosen), *_random(chosen, draws if number == 0 else draws // 4, seed + number)]
    return cuts


def _reversed(cut: Cut) -> Cut:
    """Return a cut of the same size from the other end of the order."""
    assert cut.scores is not None
    units = _units(cut.scores, by_layer=cut.by_layer)
    highest = units[len(units) - cut.n_units :]
    return replace(cut, heads=sorted(head for unit in highest for head in unit), order="reversed", scores=None)


def _random(cut: Cut, draws: int, seed: int) -> list[Cut]:
    """Return random cuts of the same size."""
    assert cut.scores is not None
    units = sorted(_units(cut.scores, by_layer=cut.by_layer))
    rng = np.random.default_rng(seed)
    choices = [rng.choice(len(units), cut.n_units, replace=False) for _ in range(draws)]
    heads = [sorted(head for i in chosen for head in units[i]) for chosen in choices]
    return [replace(cut, heads=some, order="random", scores=None) for some in heads]


def longer_than(heads: pd.DataFrame, sliding: dict[int, int | None], window: int) -> pd.DataFrame:
    """Return the heads of layers that see beyond the window: cutting the others would change nothing."""
    wider = heads["layer"].map(lambda layer: (sliding[layer] or np.inf) > window)
    if not wider.any():
        raise ConfigError(f"every layer has a sliding window of {window} tokens or less; choose a smaller one")
    return heads[wider]


def write_cut(folder: Path, cut: Cut, model: str, keep: float, limits: CutLimits) -> list[Path]:
    """Write cut.json, and ranks of scores as a table of layers × key heads; rank 1 keeps its reach.

    cut.json records the model and a digest of its weights: a cut of another model is refused.
    """
    assert cut.scores is not None
    content = {"model": model, **limits.model, "by": cut.order, "keep": keep, "by_layer": cut.by_layer}
    content |= {"window": cut.window, "sinks": cut.sinks}
    files = {
        CUT: json.dumps(content | {"heads": [list(head) for head in cut.heads]}, indent=1),
        GATES: gates_text(rank_gates(cut.scores, limits.shape)),
        GATES_CONFIG: json.dumps({"sink_size": cut.sinks, "recent_size": cut.window}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_together(folder, {name: f"{text}\n".encode() for name, text in files.items()})
    return [folder / name for name in files]


def rank_gates(scores: pd.Series, shape: tuple[int, int]) -> Float[np.ndarray, "layers hkv"]:
    """Return ranks of scores, from 0 for the lowest to 1; key heads without a score get 1 and keep their reach."""
    ranks = pd.Series((rankdata(scores) - 1) / max(len(scores) - 1, 1), index=scores.index)
    return ranks.unstack().reindex(index=range(shape[0]), columns=range(shape[1])).fillna(1.0).to_numpy(float)


def gates_text(gates: Float[np.ndarray, "layers hkv"]) -> str:
    """Return gates as lines of tab-separated numbers."""
    return "\n".join("\t".join(f"{value:.4f}" for value in row) for row in gates)


def heads_to_cut(
    run: Run, window: int, by: str, workers: int, sinks: int | None = None
) -> tuple[pd.DataFrame, CutLimits]:
    """Return the table of query heads that a cut can change, and the limits of cuts."""
    check_order(by)
    if not isinstance(run.source, CapturedSource):
        raise ConfigError(f"{run.model} is a dataset of vectors; key heads are cut by what a captured run says of them")
    limits = CutLimits.of(run.source.run, window, sinks)
    return longer_than(query_head_table(reach_tables(run, workers), window), limits.sliding, window), limits


def reach_tables(run: Run, workers: int | None = 1, on_done: OnDone | None = None) -> dict[str, pd.DataFrame]:
    """Return the tables ``position`` and ``reach``, without intervals; a head that cannot be analysed raises."""
    (result,) = analyze(
        [Job(run, options=AnalysisOptions(intervals=False))],
        ["position", "reach"],
        target=ExecutionTarget(workers),
        strict=True,
        on_done=on_done,
    )
    frames = result.tables.frames
    if frames["reach"].empty:
        raise ConfigError(f"nothing is known about the reach of {run.source}: no layer has a rotary encoding")
    return {name: frames[name] for name in ("position", "reach")}


# ---- published lists of heads -----------------------------------------------------------------------


def read_list(path: Path) -> tuple[pd.Series, str]:
    """Read scores by (layer, head), and the column of the heads: query heads (``head``) or key heads (``k_head``).

    Either JSON, {"layer-head": score or list of scores}, for query heads, or a table of layers × key heads.
    """
    try:
        text = read_text(path)
        if text.lstrip().startswith("{"):
            scores = {
                tuple(map(int, name.split("-"))): float(np.mean(values)) for name, values in json.loads(text).items()
            }
            if any(len(key) != 2 for key in scores):
                raise ValueError("expected names such as 3-12")
            return _series(scores), "head"
        rows = [[float(cell) for cell in line.replace(",", "\t").split()] for line in text.splitlines() if line.strip()]
        cells = {(layer, head): value for layer, row in enumerate(rows) for head, value in enumerate(row)}
        if not cells:
            raise ValueError("it is empty")
        return _series(cells), "k_head"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} is not a list of heads ({error}); expected {{"layer-head": score}} or a table layers × key heads'
        ) from None


def _series(scores: dict[Any, float]) -> pd.Series:
    return pd.Series(list(scores.values()), index=pd.MultiIndex.from_tuples(list(scores)), dtype=float)


AGAINST = {"curve_range": -1.0, "lock_q": -1.0, "curve_area": -1.0, "predicted_beyond": 1.0, "mass_beyond": 1.0}
"""Columns that are compared with a list, and the expected sign of their agreement."""


def agreement_with(heads: pd.DataFrame, listed: pd.Series, level: str) -> pd.DataFrame:
    """Compare each column's ranking with a list: Spearman's ρ, its interval over layers, AUC of the top tenth."""
    means = heads.groupby(["layer", level])[list(AGAINST)].mean()
    common = means.join(listed.rename("listed").rename_axis(["layer", level]), how="inner").dropna(subset=["listed"])
    if len(common) < 3:
        raise ConfigError(f"the list and the run have {len(common)} heads in common; is it of the same model?")
    rows = []
    for column, sign in AGAINST.items():
        complete = common.dropna(subset=[column])
        if len(complete) < 3:
            continue
        rng, layers = np.random.default_rng(0), complete.index.get_level_values(0)
        rows_by_layer = {layer: np.flatnonzero(layers == layer) for layer in layers.unique()}
        scores, list_scores = sign * complete[column].to_numpy(float), complete["listed"].to_numpy(float)
        draws = [rng.choice(layers.unique(), layers.nunique()) for _ in range(_DRAWS)]
        picks = [np.concatenate([rows_by_layer[layer] for layer in draw]) for draw in draws]
        rhos = np.array([_rho(scores[pick], list_scores[pick]) for pick in picks])
        has_interval = np.isfinite(rhos).any()  # one layer whose heads score alike has none
        low, high = np.nanquantile(rhos, [0.025, 0.975]) if has_interval else (np.nan, np.nan)
        rows.append(
            {"column": ("−" if sign < 0 else "") + column, "n_heads": len(complete), "rho": _rho(scores, list_scores)}
            | {"rho_low": low, "rho_high": high, "auc": auc(scores, list_scores)}
        )
    return pd.DataFrame(rows)


def auc(scores: np.ndarray, listed: np.ndarray, top: float = 0.1) -> float:
    """Return the chance that a head of the list's top tenth scores higher than one of the others.

    >>> auc(np.arange(20.0), np.arange(20.0))
    1.0
    """
    best = rankdata(-listed, method="ordinal") <= max(1, round(top * len(listed)))
    ranks, n = rankdata(scores), int(best.sum())
    return float((ranks[best].sum() - n * (n + 1) / 2) / (n * (len(scores) - n)))


def _rho(x: np.ndarray, y: np.ndarray) -> float:
    a, b = rankdata(x), rankdata(y)
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else float("nan")
