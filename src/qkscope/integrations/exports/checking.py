"""Comparison of somebody's TriAttention calibration with a run: the model, its rotary encoding, and every head.

Both files have the same numbers, E[q] and E|q| of each plane before RoPE, so they differ little on other texts. The
usual mistakes leave traces: without a norm on queries lengths are off, with the wrong sign centres are mirrored, and
queries averaged after the rotation have the right lengths and short centres.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qkscope.core.rope import base_of
from qkscope.errors import DatasetError
from qkscope.files.runfolder import RunFolder
from qkscope.headids import head_name
from qkscope.integrations.exports.about import OnLayers
from qkscope.integrations.exports.beforerope import layers_before_rope
from qkscope.integrations.exports.triattention import FLAT_KEYS, HeadCentre, flat_centres

_NAME = re.compile(r"layer(\d+)_head(\d+)")
_CLOSE, _FAR = 0.9, 0.25
"""Least cosine of centres, and largest relative difference of lengths, of heads that agree."""
_SAME_FREQUENCY = 1e-3
_SHOWN = 3


@dataclass(frozen=True)
class Comparison:
    """The differences between a calibration and a run, and the agreement of each head."""

    problems: list[str]
    heads: pd.DataFrame
    """By head: cosine of the centres (``mirrored``: with one conjugated), ratio of their sizes (``centre_ratio``) and
    of the mean lengths (``length_ratio``), and relative difference of the lengths (``length_error``)."""

    @property
    def summary(self) -> str:
        """The agreement in one line."""
        agreeing = int(_agree(self.heads).sum())
        cosine, ratio = self.heads["cosine"].median(), self.heads["length_ratio"].median()
        return (
            f"{agreeing} of {len(self.heads)} heads agree; median cosine of centres {cosine:.3f}, median ratio of "
            f"lengths {ratio:.3f} (file / run)"
        )


def compare_calibration(path: Path, run: RunFolder, on_done: OnLayers | None = None) -> Comparison:
    """Compare a file of TriAttention's statistics, in either form and of any tool, with a run."""
    centres, metadata = _read(path)
    problems = _about_model(metadata, run)
    differing = _about_frequencies(metadata, run)
    problems += [differing] if differing else []
    rows: list[dict[str, Any]] = []
    missing: list[tuple[int, int]] = []
    for layer in layers_before_rope(run, on_done):
        if layer.rope is None:
            continue
        means, lengths = layer.planes_q, layer.lengths("q")
        for head, mean, length in zip(layer.entry.query_heads, means, lengths, strict=True):
            theirs = centres.pop((layer.layer, head), None)
            if theirs is None:
                missing.append((layer.layer, head))
                continue
            if np.shape(theirs.mean) != mean.shape:
                raise DatasetError(
                    f"{path} is of another model: it has {len(theirs.mean)} planes in layer {layer.layer}, head "
                    f"{head}, and {run.folder} has {len(mean)}"
                )
            rows.append({"layer": layer.layer, "head": head} | _agreement(theirs, HeadCentre(mean, length)))
    if not rows:
        raise DatasetError(f"{path} has no head of {run.folder}; is it of this model?")
    for heads, where in ((missing, "not in the file"), (sorted(centres), f"in the file and not in {run.folder}")):
        if heads:
            problems.append(f"heads {where}: {_named(heads)}")
    table = pd.DataFrame(rows)
    return Comparison(problems + _about_heads(table), table)


def _read(path: Path) -> tuple[dict[tuple[int, int], HeadCentre], dict[str, Any]]:
    """Return the centres of a file, and what it says of its model."""
    from qkscope.integrations.exports.torchfiles import read_torch

    content = read_torch(path)
    try:
        if set(content) >= FLAT_KEYS:
            return flat_centres(content), {"inv_freq": content["omega"]}
        names = {name: _NAME.fullmatch(name) for name in content["stats"]}
        centres = {
            (int(match[1]), int(match[2])): HeadCentre(
                np.asarray(content["stats"][name]["q_mean_real"])
                + 1j * np.asarray(content["stats"][name]["q_mean_imag"]),
                np.asarray(content["stats"][name]["q_abs_mean"]),
            )
            for name, match in names.items()
            if match is not None
        }
        return centres, dict(content.get("metadata") or {})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DatasetError(
            f"{path} is not a calibration of TriAttention ({error}); expected metadata and stats, or the flat form"
        ) from None


def _about_model(metadata: dict[str, Any], run: RunFolder) -> list[str]:
    """Return what the file says of its model and the run contradicts."""
    model, entry, problems = run.manifest.model, run.manifest.layers[0], []
    weights = metadata.get("weights")
    if weights is not None and weights != model.weights:
        problems.append(
            f"weights: {weights} ({metadata.get('model')}) in the file, {model.weights} ({model.id}) in the run"
        )
    facts = {
        "head_dim": (("head_dim",), entry.d),
        "layers": (("num_layers", "num_hidden_layers"), model.layers),
        "query heads": (("num_attention_heads",), None if run.manifest.options.heads else len(entry.query_heads)),
        "rope_style": (("rope_style",), None if entry.rope is None else entry.rope.layout),
    }
    for name, (keys, expected) in facts.items():
        stated = next((metadata[key] for key in keys if metadata.get(key) is not None), None)
        if stated is not None and expected is not None and stated != expected:
            problems.append(f"{name}: {stated} in the file, {expected} in the run")
    return problems


def _about_frequencies(metadata: dict[str, Any], run: RunFolder) -> str | None:
    """Return the difference of the rotary frequencies, or of their base; None if there is none or nothing is stated."""
    ropes = [entry.rope for entry in run.manifest.layers if entry.rope is not None]
    frequencies = [np.abs(rope.frequencies) for rope in ropes]
    theta, stated = metadata.get("rope_theta"), metadata.get("inv_freq")
    if (stated is None and theta is None) or any(len(other) != len(frequencies[0]) for other in frequencies):
        return None
    planes = len(frequencies[0])
    if stated is None:
        if not isinstance(theta, int | float):  # one for each layer
            return None
        stated = float(theta) ** (-np.arange(planes) / planes)
    values = np.asarray(stated, dtype=float).ravel()
    if any(values.shape == other.shape and np.allclose(values, other, rtol=_SAME_FREQUENCY) for other in frequencies):
        return None
    for factor, unit in ((2 * np.pi, "turns"), (1 / (2 * np.pi), "radians · 2π")):
        if len(values) == planes and np.allclose(values * factor, frequencies[0], rtol=_SAME_FREQUENCY):
            return f"rotary frequencies are in {unit} per token, expected radians"
    got, expected = (base_of(part.tolist()) for part in (values, frequencies[0]))
    if got and expected:
        return f"rotary base: {got:g} in the file, {expected:g} in the run"
    return f"rotary frequencies differ: {values[:3]} … in the file, {frequencies[0][:3]} … in the run"


def _agreement(theirs: HeadCentre, ours: HeadCentre) -> dict[str, float]:
    """Return how a head's centre and lengths in a file agree with those of a run."""
    a, b = np.asarray(theirs.mean, dtype=complex), np.asarray(ours.mean, dtype=complex)
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    their_lengths, our_lengths = (np.asarray(part.length, dtype=float) for part in (theirs, ours))
    length = float(np.linalg.norm(our_lengths))
    return {
        "cosine": _ratio(float((a * b.conj()).real.sum()), size_a * size_b),
        "mirrored": _ratio(float((a * b).real.sum()), size_a * size_b),
        "centre_ratio": _ratio(size_a, size_b),
        "length_ratio": _ratio(float(np.linalg.norm(their_lengths)), length),
        "length_error": _ratio(float(np.linalg.norm(their_lengths - our_lengths)), length),
    }


def _ratio(value: float, of: float) -> float:
    return value / of if of > 0 else float("nan")


def _agree(heads: pd.DataFrame) -> pd.Series:
    return (heads["cosine"] >= _CLOSE) & (heads["length_error"] <= _FAR)


def _about_heads(heads: pd.DataFrame) -> list[str]:
    """Return which heads disagree, and the likely reason where most do."""
    off = heads[~_agree(heads)]
    if off.empty:
        return []
    worst = off.assign(score=off["cosine"] - off["length_error"]).sort_values("score").head(_SHOWN)
    rows = ", ".join(
        f"{head_name(row.layer, row.head)} (cosine {row.cosine:.2f}, lengths × {row.length_ratio:.2f})"
        for row in worst.itertuples()
    )
    problems = [f"{len(off)} of {len(heads)} heads disagree, most {rows}"]
    median, many = heads.median(numeric_only=True), len(off) > len(heads) / 2
    if many and median["mirrored"] >= _CLOSE > median["cosine"]:
        problems.append("centres are mirrored: the imaginary parts have the other sign")
    elif many and median["length_error"] <= _FAR and median["centre_ratio"] < _CLOSE:
        problems.append("lengths agree and centres are short: the mean was probably taken after the rotation")
    elif many and median["length_error"] > _FAR:
        problems.append(
            "lengths differ in most heads: a norm on queries, or the encoding's factor, was probably left out"
        )
    return problems


def _named(heads: list[tuple[int, int]]) -> str:
    shown = ", ".join(head_name(*head) for head in heads[:_SHOWN])
    return f"{len(heads)}, such as {shown}"
