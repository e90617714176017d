"""A card of one head, 1200 × 630: its clouds with their drift, its distance curve, its four terms, one sentence."""

from __future__ import annotations

import math
import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing

from qkscope.figures.axes import draw_branches
from qkscope.figures.collages import draw_cloud, draw_drifts
from qkscope.figures.figure import NotApplicable
from qkscope.figures.hero import cloud_of, curves_of
from qkscope.figures.scoreterms import TERM_COLOURS
from qkscope.figures.style import K, Q, canvas, grid, shortened
from qkscope.heads import TERMS
from qkscope.results.study import Study

CARD_DPI = 100
_SIZE = (12.0, 6.3)


def prepare_card(study: Study, head: tuple[int, int]) -> pd.DataFrame:
    """Points, curve and shares of a head of a study of one run, in the column ``part``, and a sentence about it."""
    label = study.labels[0]
    candidates = (cloud_of(study, label, *head), curves_of(study, [label], *head), _terms(study, head))
    parts = [part for part in candidates if len(part)]
    if not parts:
        raise NotApplicable(f"nothing is known about head l{head[0]:02d}h{head[1]:02d} of {label}")
    data = pd.concat(parts, ignore_index=True)
    return data.assign(model=label, layer=head[0], head=head[1], window=study.runs[0].window, sentence=say(study, head))


def say(study: Study, head: tuple[int, int]) -> str:
    """Sentences on the parts of a head's scores and on their change with distance, as far as the intervals allow."""
    sentences = [text for text in (_made_of(study, head), _with_distance(study, head)) if text]
    if not sentences:
        row = _row(study, "rotated", head)
        if row is not None and not math.isnan(row["r_q_a"]):
            sentences = [f"Along the axis of drift its queries follow position with r = {row['r_q_a']:.2f}, its keys "
                         f"with {row['r_k_a']:.2f}."]  # fmt: skip
    return " ".join(sentences)


def _made_of(study: Study, head: tuple[int, int]) -> str:
    row = _row(study, "scores", head)
    if row is None or math.isnan(row.get("part_position", math.nan)):
        return ""
    first, second = sorted(TERMS, key=lambda term: -row[f"part_{term}"])[:2]
    shares = [row[f"part_{term}"] for term in (first, second)]
    low, high = row.get(f"part_{first}_low", math.nan), row.get(f"part_{second}_high", math.nan)
    if not math.isnan(low) and not math.isnan(high) and low > high:
        share_in_words = "Most" if low > 0.5 else "The largest part"
        return f"{share_in_words} of what varies in its scores is {first} ({shares[0]:.0%}; {second} {shares[1]:.0%})."
    return f"What varies in its scores is {first} ({shares[0]:.0%}) and {second} ({shares[1]:.0%}) about as much."


def _with_distance(study: Study, head: tuple[int, int]) -> str:
    row = _row(study, "position", head)
    if row is None or math.isnan(row["decay"]):
        return ""
    low, high = (row.get(f"decay_{end}", math.nan) for end in ("low", "high"))
    if low > 0 or high < 0:
        course = "falls" if low > 0 else "rises"
        return f"Its mean score {course} by {abs(row['decay']):.2g} logits with every doubling of the distance."
    return "Its mean score does not change with distance beyond its interval."


def draw_card(data: pd.DataFrame) -> Drawing:
    """Title and sentence above, the available parts below."""
    figure = canvas(*_SIZE)
    figure.set_layout_engine("constrained", rect=(0.012, 0.05, 0.976, 0.72), w_pad=0.18)
    first = data.iloc[0]
    window = "" if pd.isna(first["window"]) else f"   window {int(first['window']):,}"
    figure.text(0.025, 0.925, f"layer {int(first['layer'])}, head {int(first['head'])}", fontsize=25, weight="bold")
    name = f"{shortened(str(first['model']), 48)}{window}"
    figure.text(0.975, 0.925, name, fontsize=13, ha="right", color="#555")
    figure.text(0.025, 0.885, textwrap.fill(str(first["sentence"]), 104), fontsize=14, va="top")
    figure.text(0.975, 0.018, "qkscope", fontsize=11, ha="right", color="#888")
    draw_part = {"cloud": _draw_cloud, "curve": _draw_curve, "terms": _draw_terms}
    parts = [part for part in draw_part if (data["part"] == part).any()]
    cells = figure.subplots(1, len(parts), squeeze=False, width_ratios=[1.15 if p == "cloud" else 1 for p in parts])[0]
    for part, cell in zip(parts, cells, strict=True):
        draw_part[part](cell, data[data["part"] == part])
        cell.set_title(cell.get_title("left"), fontsize=13)
        cell.tick_params(labelsize=10)
        for axis in (cell.xaxis, cell.yaxis):
            axis.label.set_fontsize(11)
    return figure


def _draw_cloud(axes: Axes, cloud: pd.DataFrame) -> None:
    draw_cloud(axes, cloud, Normalize(0, max(float(cloud["position"].max()), 1.0)), 9.0)
    draw_drifts(axes, cloud)
    axes.set(xticks=[], yticks=[], xlabel="axis of drift", ylabel="axis of separation")
    axes.set_title("queries and keys, early (pale) to late")
    for kind, colour, name in (("q", Q, "queries"), ("k", K, "keys")):
        of_kind = cloud[cloud["kind"] == kind]
        above = float(of_kind["y"].mean()) > float(cloud.loc[cloud["kind"].isin(["q", "k"]), "y"].mean())
        edge = of_kind["y"].quantile(0.06 if above else 0.94)  # distant single points must not move the name
        axes.annotate(name, (of_kind["x"].mean(), edge), (0, -20 if above else 20), textcoords="offset points",
                      fontsize=12, color=colour, weight="bold", ha="center",
                      va="top" if above else "bottom")  # fmt: skip


def _draw_curve(axes: Axes, curve: pd.DataFrame) -> None:
    draw_branches(axes, curve, 4.5, 2.0, "#222")
    axes.set(xlabel="distance to the key (tokens)", ylabel="mean score (logits)")
    axes.set_title("score by distance")
    axes.legend(fontsize=10)
    grid(axes)


def _draw_terms(axes: Axes, terms: pd.DataFrame) -> None:
    """A bar for each term, with its interval."""
    shares = terms.set_index("term").reindex(TERMS)
    heights = np.arange(len(TERMS))[::-1]
    axes.barh(heights, shares["share"], color=[TERM_COLOURS[term] for term in TERMS], height=0.62)
    ends = np.clip([shares["share"] - shares["low"], shares["high"] - shares["share"]], 0, None)
    axes.errorbar(shares["share"], heights, xerr=ends, fmt="none", color="#222", linewidth=1.4)
    largest = float(np.nanmax([shares["share"], shares["high"]]))
    for y, share, end in zip(heights, shares["share"], shares["high"].fillna(shares["share"]), strict=True):
        axes.text(max(share, end) + 0.02 * largest, y, f"{share:.0%}", va="center", fontsize=12)
    axes.set_yticks(heights, list(TERMS), fontsize=12)
    axes.set_xlim(min(0, float(shares["share"].min())), 1.22 * largest)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title("what varies in its scores")


def _row(study: Study, table: str, head: tuple[int, int]) -> pd.Series | None:
    frame = study.tables.get(table)
    of_head = None if frame is None else frame[(frame["layer"] == head[0]) & (frame["head"] == head[1])]
    return None if of_head is None or of_head.empty else of_head.iloc[0]


def _terms(study: Study, head: tuple[int, int]) -> pd.DataFrame:
    row = _row(study, "scores", head)
    if row is None or math.isnan(row.get("part_position", math.nan)):
        return pd.DataFrame()
    rows = [
        {"term": term, "share": row[f"part_{term}"]}
        | {end: row.get(f"part_{term}_{end}", math.nan) for end in ("low", "high")}
        for term in TERMS
    ]
    return pd.DataFrame(rows).assign(part="terms")
