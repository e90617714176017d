"""The study of the bundled family in docs/tinyrope.md: its numbers, printed as they stand there, and its pictures.

python -m tools.tinyrope --output tinyrope-study            # captures, tables, report, two captures more; 6 minutes
python -m tools.tinyrope --output tinyrope-study --pictures # also write docs/images/tinyrope and the README's pictures
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from qkscope.config import StudyRunConfig
from qkscope.data.family import CHECKPOINTS, data, nope_variant, some_texts, tokenizer
from qkscope.figures.style import PHASES, grid, house_style
from qkscope.report.values import Value, frames_of, mean_of, rotated, with_derived
from qkscope.results.study import Study, build, with_most_windows

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
ROWS = {
    "PC0 share": ("qk", "explained_variance"), "r_q": ("qk", "r_q"), "r_k": ("qk", "r_k"), "abs r_k": ("qk", "abs_r_k"),
    "position-dominated": ("qk", "position-dominated"), "content-focused": ("qk", "content-focused"),
    "r_q_a": ("rotated", "r_q_a"), "r_k_a": ("rotated", "r_k_a"), "mu_q_a": ("rotated", "mu_q_a"),
    "position's share of queries": ("heads", "position_share_q"),
    "position's share of keys": ("heads", "position_share_k"),
    "decay": ("heads", "decay"), "decay, measured": ("heads", "decay_measured"),
    "alpha_k per token": ("rotated", "alpha_k"), "alpha_k per window": ("rotated", "alpha_k_window"),
    "bias per token": ("rotated", "bias_strength"),
    "bias per window": ("rotated", "bias_window"), "bias per window, all dimensions": ("rotated", "bias_full_window"),
    "positive bias": ("rotated", "positive"), "plane_var_fraction": ("rotated", "plane_var_fraction"),
    "separation_strength": ("rotated", "separation_strength"), "posvar_q, exact": ("heads", "posvar_q"),
    "posvar_q, published": ("heads", "posvar_q_published"), "posvar_k, exact": ("heads", "posvar_k"),
    "posvar_k, published": ("heads", "posvar_k_published"), "active planes": ("heads", "active_planes"),
    "of them strong": ("heads", "strong_planes"), "variance that turns": ("heads", "turning_share"),
    "distance_r2": ("heads", "distance_r2"), "largest error (logits)": ("heads", "distance_worst"),
    "content_offset": ("heads", "content_offset"), "position's share of score": ("heads", "position_share_of_score"),
}  # fmt: skip
SHOWN = (
    "pretrain-step-0001",
    "pretrain-step-0020",
    "pretrain-step-0400",
    "pretrain-step-3000",
    "extend-4k-step-0500",
    "extend-8k-step-0300",
)
RANGE = 512
"""Distances of decay that all captures have: half of the smallest window."""
DOCUMENTS = 8
"""The same texts as in the demo."""
PICTURES = (
    "qk-pca/07_position_signal", "qk-pca/08_taxonomy_evolution", "qk-pca/09_explained_variance_over_training",
    "qk-pca/10_checkpoint_heatmap_rq", "qk-pca/11_checkpoint_heatmap_rk", "qk-pca/12_phase_portraits",
    "qk-rotation/09_training_trajectory", "qk-rotation/10_bias_decomposition", "rope/01_plane_spectrum",
    "distance/01_distance_curves", "audit/02_same_weights", "plasticity/01_profile", "plasticity/05_over_training",
)  # fmt: skip


def main() -> None:
    """Capture what is missing, print the tables, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("tinyrope-study"))
    parser.add_argument("--pictures", action="store_true")
    options = parser.parse_args()
    output: Path = options.output
    if not (output / "report" / "report.html").exists():
        qkscope("demo", "-o", output)
    study = family_study(output / "results")
    print("## The extension, four ways\n\n" + extension(study))
    print("\n## The same weights at three windows\n\n" + windows(study))
    print("\n## Checkpoints, each at its own window\n\n" + table(study, SHOWN))
    print("\n## From the end of pre-training to the end, both at a window of 1,024\n\n" + changes(study.compared))
    past = extra(output, "pretrain-step-3000-at-4096", CHECKPOINTS[5].folder, 4096)
    nope = extra(output, "nope-variant", nope_variant(), 8192)
    print(
        "\n## Past the window, and without rotary encoding\n\n"
        + table(build([StudyRunConfig(path=past), StudyRunConfig(path=nope)]))
    )
    print("\n" + by_layer(build([StudyRunConfig(path=nope)])))
    record = json.loads((data() / "record.json").read_text())
    print("\n## Held-out loss (nats per token)\n\n" + losses(record))
    if options.pictures:
        pictures(output, record)


def family_study(results: Path) -> Study:
    """The ten checkpoints at their own windows, and what was captured at other windows."""
    points = {point.name: point for point in CHECKPOINTS}
    own, others = [], []
    for folder in sorted(results.iterdir()):
        name, _, window = folder.name[3:].partition("-at-")
        entry = StudyRunConfig(path=folder, label=name, phase=points[name].phase, step=float(points[name].step))
        (others if window else own).append(entry)
    return build(own, other_windows=[build([entry]) for entry in others])


ENDS = ("pretrain-step-3000", "extend-4k-step-0500", "extend-8k-step-0300")


def extension(study: Study) -> str:
    """The recency bias at the end of each phase: by lines, at a fixed window, and per doubling of the distance."""
    lines = ["| mean over 32 heads | " + " | ".join(ENDS) + " | change |", "|---|---|---|---|---|"]
    rows = (
        ("bias per token, own window", study, "bias per token"),
        ("bias per window, own window", study, "bias per window"),
        ("bias per window, all at 1,024", study.compared, "bias per window"),
        ("decay, all at 1,024: logits per doubling", study.compared, "decay"),
        ("decay, own window", study, "decay"),
        ("decay measured, all at 1,024", study.compared, "decay, measured"),
    )
    for title, where, name in rows:
        values = [_value(where, label, name) for label in ENDS]
        known = [value for value in values if value is not None]
        change = f"{known[-1].value / known[0].value - 1:+.0%}"
        lines.append(f"| {title} | " + " | ".join(value.text() for value in known) + f" | {change} |")
    return "\n".join(lines)


def windows(study: Study) -> str:
    """The last checkpoint at every window it was captured at."""
    label, known = with_most_windows(study)
    lines = [f"| {label} | " + " | ".join(f"window {w:,}" for w in known) + " |", "|---|" + "---|" * len(known)]
    for name in ("bias per token", "bias per window", "r_q", "r_k", "position-dominated", "r_q_a",
                 "separation_strength",
                 "position's share of queries", "position's share of keys", "decay"):  # fmt: skip
        values = [_value(study.at[window], label, name) for window in known]
        cells = ["–" if value is None else value.text(_is_share(name)) for value in values]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def qkscope(*arguments: object) -> None:
    """The command, in this Python."""
    subprocess.run([sys.executable, "-m", "qkscope", *map(str, arguments)], check=True)


def extra(output: Path, name: str, model: Path, window: int) -> Path:
    """Tables of one more capture."""
    results = output / "extra" / name / "results"
    if not results.exists():
        run = output / "extra" / name / "run"
        chosen = [option for path in some_texts(DOCUMENTS) for option in ("--texts", path)]
        qkscope(
            "capture", model, "--tokenizer", tokenizer(), *chosen, "--window", window, "--dtype", "float32", "-o", run
        )
        qkscope("analyze", run, "-o", results, "--model", name, "--decay-range", RANGE)
    return results


def table(study: Study, labels: tuple[str, ...] | None = None) -> str:
    """Means over heads with intervals, one column per run."""
    shown = labels or tuple(study.labels)
    lines = ["| mean over 32 heads | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for name in ROWS:
        values = [_value(study, label, name) for label in shown]
        cells = ["–" if v is None else v.text(_is_share(name)) for v in values]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def changes(study: Study) -> str:
    """Relative change of each mean from the end of pre-training to the last checkpoint."""
    lines = ["| | end of pre-training | end | change |", "|---|---|---|---|"]
    for name in ROWS:
        before, after = (_value(study, label, name) for label in ("pretrain-step-3000", "extend-8k-step-0300"))
        if before is not None and after is not None:
            share = _is_share(name)
            change = after.value / before.value - 1
            lines.append(f"| {name} | {before.text(share)} | {after.text(share)} | {change:+.0%} |")
    return "\n".join(lines)


def by_layer(study: Study) -> str:
    """Layers with and without rotary encoding, side by side."""
    first, frame = with_derived(study), rotated(study)
    assert first is not None
    assert frame is not None
    lines = ["| layer | rotary | r_q | abs r_k | r_k_a | bias per window |", "|---|---|---|---|---|---|"]
    for layer in sorted(first["layer"].unique()):
        pc, ab = first[first["layer"] == layer], frame[frame["layer"] == layer]
        rotary = "no" if layer in study.runs[0].nope_layers else "yes"
        lines.append(
            f"| {layer} | {rotary} | {pc['r_q'].mean():.2f} | {pc['abs_r_k'].mean():.2f} | {ab['r_k_a'].mean():.2f} | "
            f"{ab['bias_window'].mean():.1f} |"
        )
    return "\n".join(lines)


def losses(record: dict) -> str:
    """First and last sixteenth of the window, and the mean."""
    lines = ["| | first 1/16 | last 1/16 | mean |", "|---|---|---|---|"]
    for name, values in record["held_out_loss_by_position"].items():
        lines.append(f"| {name} | {values[0]:.2f} | {values[-1]:.2f} | {np.mean(values):.2f} |")
    return "\n".join([*lines, f"| unigram | | | {record['unigram_loss']:.2f} |"])


def _value(study: Study, label: str, name: str) -> Value | None:
    place, column = ROWS[name]
    return mean_of(study, label, frames_of(study)[place], column)


def _is_share(name: str) -> bool:
    return ROWS[name][1] in (
        "explained_variance",
        "positive",
        "plane_var_fraction",
        "separation_strength",
        "position_share_q",
        "position_share_k",
        "turning_share",
    ) or name.startswith(("posvar", "position-", "content-"))


# ---- pictures ------------------------------------------------------------------------------------


def pictures(output: Path, record: dict) -> None:
    """Figures of the report in a smaller size, the loss curves, and the explorer as a browser shows it."""
    (IMAGES / "tinyrope").mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        small(
            Image.open(output / "report" / "figures" / name / "figure.png"),
            IMAGES / "tinyrope" / f"{Path(name).name}.png",
            1000,
        )
    small(Image.open(io.BytesIO(loss_curves(record))), IMAGES / "tinyrope" / "loss.png", 1000)
    from tests.browser.chromium import launch

    with launch() as browser:
        assert browser is not None, "the explorer's picture needs Chromium"
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.goto((output / "report" / "explorer.html").resolve().as_uri() + "#l04h01;run=extend-8k-step-0300")
        tab.wait_for_timeout(800)
        small(Image.open(io.BytesIO(tab.screenshot())), IMAGES / "explorer.png", 1200)
        tab.goto((output / "report" / "report.html").resolve().as_uri())
        small(Image.open(io.BytesIO(tab.screenshot())), IMAGES / "report.png", 1200)


def small(image: Image.Image, path: Path, width: int) -> None:
    """Scaled down, with 256 colours: a fraction of the bytes."""
    scaled = image.convert("RGB").resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    scaled.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)


def loss_curves(record: dict) -> bytes:
    """Training loss over steps, and held-out loss over the window."""
    logged = pd.read_csv(data() / "loss.csv")
    with house_style():
        figure = Figure(figsize=(7.4, 2.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        start = 0
        for colour, (phase, part) in zip(PHASES, logged.groupby("phase", sort=False), strict=False):
            left.plot(start + part["step"], part["loss"], color=colour)
            middle = len(part) // 2
            up = -16 if start > 3000 else 14
            left.annotate(str(phase), (start + part["step"].iloc[middle], part["loss"].iloc[middle]), xytext=(0, up),
                          textcoords="offset points", color=colour, fontsize=7, ha="center")  # fmt: skip
            start += int(part["step"].max())
        left.set(xlabel="step", ylabel="training loss (nats per token)", ylim=(1.8, 6))
        by_position = {n: v for n, v in record["held_out_loss_by_position"].items() if n != "extend-8k at 4096"}
        for colour, (name, values) in zip(PHASES, by_position.items(), strict=False):
            window = int(name.split()[-1])
            middle = (np.arange(16) + 0.5) * window / 16
            right.plot(middle, values, color=colour)
            right.annotate(name, (middle[-1], values[-1]), xytext=(4, 0), textcoords="offset points", color=colour,
                           fontsize=6.5, va="center")  # fmt: skip
        right.axhline(record["unigram_loss"], color="#999999", linestyle=(0, (3, 3)), linewidth=0.9)
        right.annotate(
            "unigram", (30, record["unigram_loss"]), xytext=(0, -9), textcoords="offset points", fontsize=6.5
        )
        right.set(xlabel="position in the document", ylabel="held-out loss", xscale="log", xlim=(25, 40000))
        for axes in (left, right):
            grid(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=200)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
