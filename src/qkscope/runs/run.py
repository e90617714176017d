"""A Run: one model measured on one corpus; and a Head: one of its heads."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, cached_property
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float

from qkscope.analyses.analysis import ENDS
from qkscope.analyses.components import TAXONOMY, Components, components, taxonomy
from qkscope.analyses.rotationmodel import Rotation, rotation_model
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.analyses.uncertainty import constant
from qkscope.core.headmoments import HeadMoments
from qkscope.core.sample import Sample
from qkscope.errors import ConfigError, DatasetError, HeadError
from qkscope.files.checksums import CHECKSUMS
from qkscope.files.dataset import Dataset
from qkscope.files.hub import locate
from qkscope.files.pushed import find_pushed
from qkscope.files.runfolder import MANIFEST, MOMENTS, PROGRESS, UNFINISHED, RunFolder, at_window
from qkscope.headids import TERMS, HeadId, Kind
from qkscope.options import head_pair
from qkscope.runs.captured import CapturedSource
from qkscope.runs.dataset import DatasetSource
from qkscope.runs.source import WHOLE, LoadSpec, Source

_NONE, _CELL, _MARGIN, _WIDEST = "#ffffff", 14, 34, 900


def head_map(classes: Mapping[HeadId, tuple[str, str]]) -> str:
    """An SVG map of the heads with a legend; ``classes`` has the class and a description of each head."""
    layers = sorted({head.layer for head in classes})
    columns = 1 + max(head.head for head in classes)
    cell = max(3.0, min(_CELL, (_WIDEST - _MARGIN) / columns))
    cells = "".join(
        f'<rect x="{_MARGIN + head.head * cell:g}" y="{layers.index(head.layer) * cell:g}" width="{cell - 1:g}" '
        f'height="{cell - 1:g}" fill="{HEAD_CLASSES.get(kind, _NONE)}" stroke="#8888" stroke-width="0.5">'
        f"<title>layer {head.layer}, head {head.head}: {escape(description)}</title></rect>"
        for head, (kind, description) in classes.items()
    )
    label_step = max(1, round(12 / cell))
    labels = "".join(
        f'<text x="{_MARGIN - 4}" y="{(row + 0.5) * cell:g}" font-size="9" fill="currentColor" text-anchor="end" '
        f'dominant-baseline="central">{layer}</text>'
        for row, layer in enumerate(layers)
        if row % label_step == 0
    )
    width, height = _MARGIN + columns * cell, len(layers) * cell
    picture = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="Map of heads by class">{labels}{cells}</svg>'
    )
    return f"<div>{picture}</div><div>{_legend(Counter(kind for kind, _ in classes.values()))}</div>"


def _legend(counts: Counter[str]) -> str:
    square = '<span style="display:inline-block;width:0.8em;height:0.8em;background:{}"></span> {} {}'
    entries = [square.format(HEAD_CLASSES[kind], counts[kind], kind) for kind in HEAD_CLASSES if counts[kind]]
    unknown = sum(count for kind, count in counts.items() if kind not in HEAD_CLASSES)
    return " &nbsp; ".join(entries + ([f"{unknown} without a class"] if unknown else []))


MOST_SHOWN = 2048
"""Largest number of heads in the map of a notebook; more would take too long."""


@dataclass(frozen=True)
class Run:
    """One model (or checkpoint) measured on one corpus: heads, moments, samples."""

    source: Source
    model: str
    family: str = ""
    reading: LoadSpec = WHOLE

    @property
    def heads(self) -> list[HeadId]:
        """All query heads, by (layer, head)."""
        return self.source.query_heads

    def moments(self, head: HeadId) -> HeadMoments:
        """Sufficient statistics of a query head and its key head; a ``HeadError`` if they cannot be loaded."""
        loaded, failed = self.source.load([head], self.reading)
        if failed:
            raise failed[0]
        return loaded[0].moments

    def sample(self, head: HeadId, size: int = 8000, seed: int = 0) -> Sample:
        """A seeded sample of a query or key head's vectors; the same tokens in every head."""
        return Sample.from_rows(self.source.rows(head, self.reading), size, seed)

    def head(self, layer: int | str, head: int | None = None) -> Head:
        """One query head with the key head it reads, by its numbers or its name: ``(5, 13)`` or ``"l05h13"``."""
        head_id = HeadId(*head_pair(layer if head is None else (layer, head)), "q")
        if head_id not in self.heads:
            raise HeadError(head_id, f"{self.model} has no such head; see run.heads")
        return Head(self, head_id)

    def at(self, window: int) -> Run:
        """Return this captured run at a shorter window that the capture also measured (``compare_at``)."""
        if self.source.window == window:
            return self
        if not isinstance(self.source, CapturedSource):
            raise ConfigError(f"{self.model} is a dataset of vectors; only a captured run can be at several windows")
        folder = Path(at_window(str(self.source.run.folder), window))
        if not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"{self.model} was captured at a window of {self.source.window}, not at {window}: {folder} is not a "
                f"run; capture it with --compare-at {window}"
            )
        source = CapturedSource(RunFolder.open(folder), whole=self.source)
        self.source.run.check_same_weights(source.run)
        return replace(self, source=source)

    def top(self, by: str = "part_position", n: int = 10, *, lowest: bool = False, workers: int = 1) -> pd.DataFrame:
        """The heads with the highest (or lowest) values of a column: ``qkscope.top`` of this run."""
        from qkscope.results.runtables import top

        return top(self, by, n, lowest=lowest, workers=workers)

    def __repr__(self) -> str:
        return f"Run({self.model!r}, {len(self.heads)} query heads in {len(self._layers)} layers)"

    def _repr_html_(self) -> str:
        rows = {
            "family": self.family or "—",
            "query heads": f"{len(self.heads)} in {len(self._layers)} layers",
            "query heads per key head": str(self.source.q_per_kv),
            "window": str(self.source.window or "each head's last position + 1"),
            "source": str(self.source),
        }
        return _html(f"Run {self.model}", rows) + self._map

    @cached_property
    def _map(self) -> str:
        """The map of heads of a captured run; for a dataset, reading all vectors would take too long."""
        if not isinstance(self.source, CapturedSource) or not 0 < len(self.heads) <= MOST_SHOWN:
            return ""
        try:
            rows = score_rows(self, self.heads)
            classes = {
                head: (str(rows[head]["head_class"]), _in_words(rows[head])) for head in self.heads if head in rows
            }
            return head_map(
                {head: classes.get(head, ("", "no class: its rotation is not known")) for head in self.heads}
            )
        except (DatasetError, HeadError) as error:
            return f"<div>{escape(str(error))}</div>"

    @property
    def _layers(self) -> set[int]:
        return {head.layer for head in self.heads}


@dataclass(frozen=True)
class Head:
    """One query head: its moments, axes and projections, computed on first use.

    Every column of the table ``heads`` is an attribute and an item: ``head.decay``, ``head["decay"]``.
    """

    run: Run
    id: HeadId

    @cached_property
    def moments(self) -> HeadMoments:
        """Moments of the queries and keys by document group."""
        return self.run.moments(self.id)

    @cached_property
    def pca(self) -> Components:
        """Principal components of the pooled queries and keys."""
        return components(self.moments.total_q, self.moments.total_k)

    @cached_property
    def rotation(self) -> Rotation:
        """Axes a and b and the measurements along them."""
        return rotation_model(self.moments.total_q, self.moments.total_k)

    @property
    def a(self) -> Float[np.ndarray, "d"]:
        """Drift axis."""
        return self.rotation.a

    @property
    def b(self) -> Float[np.ndarray, "d"]:
        """Separation axis."""
        return self.rotation.b

    @cached_property
    def parts(self) -> dict[str, float]:
        """The parts of the terms in the variance of its scores, which sum to 1; empty if its rotation is not known."""
        return {} if self._scores is None else {term: float(self._scores[f"part_{term}"]) for term in TERMS}

    @property
    def head_class(self) -> str:
        """position, key, query, content, mixed or flat; empty if its rotation is not known."""
        return "" if self._scores is None else str(self._scores["head_class"] or "")

    @cached_property
    def _scores(self) -> pd.Series | None:
        return score_rows(self.run, [self.id]).get(self.id)

    @property
    def taxonomy(self) -> str:
        """Published class of the head by its PC0; empty if all queries or all keys are equal."""
        if constant(self.moments.total_q) or constant(self.moments.total_k):
            return ""
        return TAXONOMY[int(taxonomy(self.pca.r_q[:1], self.pca.r_k[:1])[0])]

    @property
    def summary(self) -> str:
        """The class and the parts of the scores in a few words, and the window that they depend on."""
        if self._scores is None:
            return "no class: its rotation is not known"
        window = self.run.source.window
        return f"{_in_words(self._scores)}{f', window {window:,}' if window else ''}"

    @cached_property
    def _row(self) -> pd.Series:
        from qkscope.results.runtables import head_row

        return head_row(self.run, self.id)

    def __getitem__(self, column: str) -> Any:
        if column not in _head_columns():
            raise KeyError(f"heads have no column {column!r}{_nearest(str(column))}")
        value = self._row[column]
        return value.item() if isinstance(value, np.generic) else value

    def __getattr__(self, name: str) -> Any:
        # Only for names that are nothing else; those with _ are asked for by copy, pickle and notebooks.
        if name.startswith("_") or name not in _head_columns():
            raise AttributeError(f"a head has no {name!r}{_nearest(name)}")
        return self[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_head_columns()})

    def projections(self, kind: Literal["q", "k"], size: int = 8000, seed: int = 0) -> pd.DataFrame:
        """Projections of sampled queries or keys on pc0, pc1, a and b (not centred), with document, position, token."""
        if kind not in ("q", "k"):
            raise ValueError(f"expected kind to be 'q' or 'k', got {kind!r}")
        rows = self.run.sample(self._of(kind), size, seed).rows
        axes = np.concatenate([self.pca.axes[:2], self.a[None], self.b[None]])
        frame = pd.DataFrame(rows.x @ axes.T, columns=["pc0", "pc1", "a", "b"])
        frame = frame.assign(kind=kind, example_id=rows.example_id, position=rows.position)
        return with_token_texts(frame, self.run.source)

    def __repr__(self) -> str:
        quick = isinstance(self.run.source, CapturedSource)  # a dataset would be read for it
        return f"Head({self.run.model!r}, {self.id}, reads {self._of('k')}{f', {self.summary}' if quick else ''})"

    def _repr_html_(self) -> str:
        model = self.rotation
        rows = {
            "reads": str(self._of("k")),
            "class": self.summary,
            "axis a": f"r_q_a {model.r_q_a:+.3f}, r_k_a {model.r_k_a:+.3f}, alpha_k {model.alpha_k:.3g} per token",
            "bias": f"{model.bias_strength:.3g} per token on a, {model.bias_full:.3g} in all",
            "variance in the plane": f"{model.plane_var_fraction:.3f}",
        }
        return _html(f"{self.run.model} {self.id}", rows)

    def _of(self, kind: Kind) -> HeadId:
        return self.id if kind == "q" else self.run.source.key_head(self.id)


@cache
def _head_columns() -> tuple[str, ...]:
    """Names of the columns of the table ``heads``."""
    from qkscope.analyses.catalogue import table_columns

    return tuple(column.name for column in table_columns("heads"))


def _nearest(name: str) -> str:
    """The end of a message about a name that a head does not have: the nearest ones."""
    names = [known for known in (*vars(Head), *_head_columns()) if not known.startswith("_")]
    near = get_close_matches(name, [known for known in names if not known.endswith(ENDS)] or names, 3)
    return f"; did you mean {' or '.join(near)}?" if near else "; dir(head) lists all names"


def score_rows(run: Run, heads: Sequence[HeadId]) -> dict[HeadId, pd.Series]:
    """The row of the table ``scores`` of each of these heads that has one."""
    from qkscope.analyses.complement import PLANE_ROWS
    from qkscope.analyses.options import AnalysisOptions
    from qkscope.analyses.scores import SCORES
    from qkscope.analyses.tabulate import batch_of, tabulate

    spec, rows = replace(run.reading, sample=PLANE_ROWS, rotary=True), {}
    for _, group in groupby(heads, run.source.key_head):
        loaded, failed = run.source.load(list(group), spec)
        if failed:
            raise failed[0]
        batch = batch_of(run.model, run.family, loaded, (SCORES,), AnalysisOptions())
        frame = tabulate(batch, (SCORES,))[0].frames.get("scores")
        for _, row in (frame if frame is not None else pd.DataFrame()).iterrows():
            rows[HeadId(int(row["layer"]), int(row["head"]), "q")] = row
    return rows


def _in_words(row: pd.Series) -> str:
    """The class of a head and the parts of its scores in a few words."""
    parts = ", ".join(f"{term} {row[f'part_{term}']:.0%}" for term in TERMS)
    return f"{row['head_class'] or 'no class'}: {parts} of the variance of its scores"


def with_token_texts(points: pd.DataFrame, source: Source) -> pd.DataFrame:
    """Add a column ``token``, the text of each token; unchanged if the source has no texts."""
    texts = source.token_texts()
    if not len(texts):
        return points
    return points.merge(texts, on=["example_id", "position"], how="left")


def open_run(
    location: str | os.PathLike[str],
    revision: str | None = None,
    *,
    model: str | None = None,
    family: str = "",
    q_per_kv: int | None = None,
    window: int | None = None,
    rope: Mapping[str, Any] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    skip_first: int = 0,
) -> Run:
    """Open a captured run or a dataset of vectors: a folder, a Hub id, ``hf://datasets/owner/name@revision``.

    A run that was pushed to the Hub is downloaded into huggingface_hub's cache and verified against its checksums.

    ``rope`` describes a dataset's rotary encoding, such as ``{"theta": 500000}``. ``skip_first`` removes the first
    positions of every document of a dataset, the attention sinks.
    """
    source = _source(location, revision, q_per_kv, window, rope, skip_first)
    label = model or revision or Path(location).absolute().name
    label = os.fsencode(label).decode("utf-8", "replace")  # text that is not UTF-8 cannot be written into tables
    return Run(source, label, family, LoadSpec(max_samples, seed, skip_first=skip_first))


def _source(
    location: str | os.PathLike[str],
    revision: str | None,
    q_per_kv: int | None,
    window: int | None,
    rope: Mapping[str, Any] | None,
    skip_first: int,
) -> Source:
    folder = Path(location)
    if (folder / PROGRESS).is_file():
        raise DatasetError(UNFINISHED.format(folder))
    dataset_options: dict[str, Any] = {"q_per_kv": q_per_kv, "window": window, "rope": rope}
    fixed_options = dataset_options | {"skip_first": skip_first or None}  # 0 is the default
    if (folder / MANIFEST).is_file():
        _check_no_options(folder, {"revision": revision} | fixed_options)
        return CapturedSource(RunFolder.open(folder))
    if (folder / MOMENTS).is_dir() or (folder / CHECKSUMS).is_file():
        raise DatasetError(f"{folder} is a captured run without its {MANIFEST}; copy or capture the run again")
    located = locate(location, revision)
    pushed = find_pushed(located)
    if pushed is None:
        return DatasetSource(Dataset.at(located, os.fspath(location), **dataset_options))
    _check_no_options(location, fixed_options)
    return CapturedSource(RunFolder.open(pushed.run_folder()), pushed.files)


def _check_no_options(location: str | os.PathLike[str], options: Mapping[str, object]) -> None:
    """Raise an error if an option is set that was fixed when the run was captured."""
    names = [name for name, value in options.items() if value is not None]
    if names:
        fixed = f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} fixed at capture"
        advice = "remove that option" if len(names) == 1 else "remove these options"
        raise ConfigError(f"{os.fspath(location)} is a captured run, whose {fixed}; {advice}")


def _html(title: str, rows: dict[str, str]) -> str:
    cells = "".join(f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"
