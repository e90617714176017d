"""A card of one head, 1200 × 630: clouds with their drift, distance curve, four terms, a text, and a sentence."""

from __future__ import annotations

import math
import re
import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from qkscope.analyses.scores import FLAT
from qkscope.figures.axes import draw_branches
from qkscope.figures.collagedata import drift
from qkscope.figures.collages import draw_cloud, draw_drifts
from qkscope.figures.figure import NotApplicable
from qkscope.figures.scoreterms import TERM_COLOURS, share_in_words
from qkscope.figures.style import INK, K, Q, canvas, grid, plain, shortened
from qkscope.headids import TERMS, head_name
from qkscope.results.study import Study

CARD_DPI = 100
_SIZE = (12.0, 6.3)


def prepare_card(study: Study, head: tuple[int, int]) -> pd.DataFrame:
    """Points, curve and shares of a head of a study of one run, in the column ``part``, and a sentence about it."""
    label = study.labels[0]
    candidates = (
        cloud_of(study, label, *head), curves_of(study, [label], *head), _terms(study, head), _text(study, label, head),
    )  # fmt: skip
    parts = [part for part in candidates if len(part)]
    if not parts:
        raise NotApplicable(f"nothing is known about head {head_name(*head)} of {label}")
    data = pd.concat(parts, ignore_index=True)
    return data.assign(model=label, layer=head[0], head=head[1], window=study.runs[0].window, sentence=say(study, head))


def cloud_of(study: Study, label: str, layer: int, head: int) -> pd.DataFrame:
    """Points of a head on a and b, and the drift of their means; empty if there are none."""
    points = study.table("points", "a", "b")
    if points is None:
        return pd.DataFrame()
    of_head = points[(points["model"] == label) & (points["layer"] == layer) & (points["head"] == head)]
    cloud = (
        of_head[["model", "layer", "head", "kind", "position"]]
        .assign(x=of_head["a"], y=of_head["b"])
        .dropna(subset=["x"])
    )
    return pd.concat([cloud, *(drift(cloud[cloud["kind"] == kind], kind) for kind in "qk")]).assign(part="cloud")


def curves_of(study: Study, labels: list[str], layer: int, head: int) -> pd.DataFrame:
    """Distance curves of a head in these runs; empty if there are none."""
    curves = study.table("distance", "distance_low", "distance_high", "measured", "predicted")
    if curves is None:
        return pd.DataFrame()
    of_head = curves[curves["model"].isin(labels) & (curves["layer"] == layer) & (curves["head"] == head)]
    return of_head[["model", "layer", "head", "distance_low", "distance_high", "measured", "predicted"]].assign(
        part="curve"
    )


def say(study: Study, head: tuple[int, int]) -> str:
    """Sentences on the parts of a head's scores and on their change with distance, as far as the intervals allow."""
    sentences = [text for text in (_made_of(study, head), _with_distance(study, head), _role(study, head)) if text]
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
    if row.get("head_class") == "flat":
        spread = row.get("logit_sd", math.nan)
        size = f"{spread:.2g} logits, " if spread >= 0 else ""
        return (
            f"It is flat: its scores vary by {size}less than {FLAT}, so it attends almost evenly, whatever they hold."
        )
    first, second = sorted(TERMS, key=lambda term: -row[f"part_{term}"])[:2]
    shares = [share_in_words(row[f"part_{term}"]) for term in (first, second)]
    low, high = row.get(f"part_{first}_low", math.nan), row.get(f"part_{second}_high", math.nan)
    if not math.isnan(low) and not math.isnan(high) and low > high:
        most = "Most" if low > 0.5 else "The largest part"
        return f"{most} of what varies in its scores is {first} ({shares[0]}; {second} {shares[1]})."
    return f"What varies in its scores is {first} ({shares[0]}) and {second} ({shares[1]}) about as much."


def _with_distance(study: Study, head: tuple[int, int]) -> str:
    row = _row(study, "position", head)
    if row is None or math.isnan(row["decay"]):
        return ""
    low, high = (row.get(f"decay_{end}", math.nan) for end in ("low", "high"))
    if low > 0 or high < 0:
        course, far = "falls" if low > 0 else "rises", row.get("decay_range", math.nan)
        up_to = "" if math.isnan(far) else f", up to {far:,.0f} tokens"
        return f"Its mean score {course} by {abs(row['decay']):.2g} logits with every doubling of the distance{up_to}."
    return "Its mean score does not change with distance beyond its interval."


def _role(study: Study, head: tuple[int, int]) -> str:
    row = _row(study, "roles", head)
    if row is None or row["role"] not in _DOES:
        return ""
    share = row["echo"] + row["induction"] if row["role"] == "induction" else row[row["role"]]
    return _DOES[row["role"]].format(share_in_words(share))


_DOES = {
    "induction": "Of random tokens that come twice it gives the earlier copy {} of its attention (induction).",
    "previous": "It gives the token before {} of its attention.",
    "sink": "It rests on the first tokens with {} of its attention.",
}


def draw_card(data: pd.DataFrame) -> Drawing:
    """Title and sentence above, the available parts below, and at the bottom a text as two of its queries see it."""
    figure = canvas(*_SIZE)
    text = data[data["part"] == "text"]
    bottom = 0.05 if text.empty else 0.2
    figure.set_layout_engine("constrained", rect=(0.012, bottom, 0.976, 0.77 - bottom), w_pad=0.18)
    first = data.iloc[0]
    window = "" if pd.isna(first["window"]) else f"   window {int(first['window']):,}"
    figure.text(0.025, 0.925, f"layer {int(first['layer'])}, head {int(first['head'])}", fontsize=25, weight="bold")
    name = f"{shortened(str(first['model']), 48)}{window}"
    figure.text(0.975, 0.925, name, fontsize=13, ha="right", color="#555")
    figure.text(0.025, 0.885, textwrap.fill(str(first["sentence"]), 104), fontsize=14, va="top")
    figure.text(0.975, 0.018, "qkscope", fontsize=11, ha="right", color="#888")
    draw_part = {"cloud": _draw_cloud, "curve": _draw_curve, "terms": _draw_terms}
    parts = [part for part in draw_part if (data["part"] == part).any()]
    widths = [1.15 if p == "cloud" else 1 for p in parts]
    cells = figure.subplots(1, len(parts), squeeze=False, width_ratios=widths)[0] if parts else ()
    for part, cell in zip(parts, cells, strict=True):
        draw_part[part](cell, data[data["part"] == part])
        cell.set_title(cell.get_title("left"), fontsize=13)
        cell.tick_params(labelsize=10)
        for axis in (cell.xaxis, cell.yaxis):
            axis.label.set_fontsize(11)
    if len(text):
        _draw_text(figure, text)
    return figure


def _draw_cloud(axes: Axes, cloud: pd.DataFrame) -> None:
    draw_cloud(axes, cloud, Normalize(0, max(float(cloud["position"].max()), 1.0)), 9.0)
    draw_drifts(axes, cloud)
    axes.set(xticks=[], yticks=[], xlabel="axis of drift", ylabel="axis of separation")
    place: Axes | Text = axes  # names stand above the frame, where no point can be
    for text, colour, weight in (("queries", Q, "bold"), (" and ", INK, "normal"), ("keys", K, "bold"),
                                 (", pale early, strong late", INK, "normal")):  # fmt: skip
        at, where = ((0, 1.0), "axes fraction") if place is axes else ((1, 0), place)
        place = axes.annotate(text, at, (0, 6 if place is axes else 0), xycoords=where, textcoords="offset points",
                              fontsize=13, color=colour, weight=weight, va="bottom")  # fmt: skip


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
    window = terms["window"].iloc[0]
    axes.set_xlabel("share of their variance" + ("" if pd.isna(window) else f", window {int(window):,}"))
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


# ---- a text as two queries see it ---------------------------------------------------------------------

_LINE, _LEAST, _APART = 118, 12, 8
"""Characters of a line; keys before a query that is shown, at least; tokens between the two queries, at least."""
ABOVE, BELOW = "#e08214", "#8073ac"
"""Keys that score above the query's average key, and below it."""


def _text(study: Study, label: str, head: tuple[int, int]) -> pd.DataFrame:
    """Scores of the earlier tokens of a passage for two of its tokens: those that prefer one key most."""
    passage = study.tables.get("passage")
    if passage is None:
        return pd.DataFrame()
    of_head = passage[(passage["model"] == label) & (passage["layer"] == head[0]) & (passage["head"] == head[1])]
    before = of_head[of_head["k_token"] < of_head["q_token"]]
    score = before[list(TERMS)].sum(axis=1) * before["unit"]
    before = before.assign(score=score - score.groupby(before["q_token"]).transform("mean"))
    tokens = of_head.drop_duplicates("k_token").set_index("k_token")["text"].astype(str)
    words = [token for token in tokens.index if token >= _LEAST and any(map(str.isalpha, tokens[token]))]
    words = [token for token in words if tokens[token].startswith(" ")] or words
    best = before[before["q_token"].isin(words)].groupby("q_token")["score"].max().sort_values(ascending=False)
    if best.empty:
        return pd.DataFrame()
    first = int(str(best.index[0]))
    others = [int(str(q)) for q in best.index if abs(int(str(q)) - first) >= _APART]
    shown = before[before["q_token"].isin([first, *others[:1]])].sort_values(["q_token", "k_token"])
    columns = shown[["q_token", "k_token", "text", "score"]].assign(text=shown["text"].astype(str), part="text")
    rest = {query: _rest_of_word(tokens, query) for query in columns["q_token"].unique()}
    return columns.assign(q_text=columns["q_token"].map(tokens), rest=columns["q_token"].map(rest))


def _rest_of_word(tokens: pd.Series, query: int) -> str:
    """The text after a token up to the end of its word."""
    rest = ""
    for token in tokens[tokens.index > query].sort_index():
        letters = re.match(r"\w*", token)
        rest += letters[0] if letters else ""
        if letters is None or letters[0] != token:
            break
    return rest


def _draw_text(figure: Drawing, text: pd.DataFrame) -> None:
    """A line for each of the two queries: the text before it, each token on the colour of its score."""
    label = "score above (orange) or below (violet) that of the average earlier key, for the bold token"
    figure.text(0.025, 0.168, label, fontsize=11, color="#555")
    for number, (_, row) in enumerate(text.groupby("q_token", sort=True)):
        y, left = 0.115 - 0.052 * number, 0.025
        largest = float(row["score"].abs().max()) or 1.0
        query, rest = (_shown(str(row[name].iloc[0])) for name in ("q_text", "rest"))
        pieces = [(_shown(token), score) for token, score in zip(row["text"], row["score"], strict=True)]
        room = _LINE - len(query) - len(rest)
        while pieces and (sum(len(token) for token, _ in pieces) > room or not _begins_word(pieces, len(row))):
            pieces = pieces[1:]
        for token, score in [*pieces, (query, math.nan), (rest, math.nan)]:
            width = len(token) * _CHARACTER / _SIZE[0]
            if not math.isnan(score) and abs(score) > 0.04 * largest:
                colour = ABOVE if score > 0 else BELOW
                figure.add_artist(Rectangle((left, y - 0.012), width, 0.042, color=colour, linewidth=0,
                                            alpha=0.85 * abs(score) / largest))  # fmt: skip
            figure.text(left, y, token, fontsize=_TEXT_SIZE, family="monospace",
                        weight="bold" if token is query else "normal",
                        color="#999" if token is rest else INK)  # fmt: skip
            left += width


def _begins_word(pieces: list[tuple[str, float]], n_all: int) -> bool:
    """Return True if these last tokens of a text begin with a word, or are all of it."""
    return len(pieces) == n_all or pieces[0][0].startswith(" ")


_TEXT_SIZE = 11.5
_CHARACTER = 0.602 * _TEXT_SIZE / 72
"""Width of a character of the fixed-width font, in inches."""


def _shown(token: str) -> str:
    """A token on one line."""
    return plain(token.replace("\n", "⏎").replace("\t", " "))
