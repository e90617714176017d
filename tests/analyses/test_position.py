"""The share of position alone, recomputed from vectors in plain NumPy, and on heads whose share is planted.

Nothing here uses the package's own mathematics: shares, slopes, the null and the jackknife are written out from
docs/method.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

import qkscope
from qkscope.core.headmoments import undone_sums
from qkscope.core.rope import HeadRotary, Rope
from qkscope.core.rows import Pair, Rows
from qkscope.files.dataset import Dataset, write_dataset
from qkscope.headids import HeadId
from tests.analyses.test_nulls import balanced
from tests.helpers import head_data, one_head, tables_of
from tests.test_golden import widen

WINDOW, D = 256, 12
THETA = 50.0 ** (-2.0 * np.arange(4) / 8)
ROPE = Rope(THETA)
"""Four planes, and four coordinates that are not rotated."""


def turned(plain: np.ndarray, position: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Vectors rotated to their positions, by the half-split layout."""
    m = len(theta)
    z = (plain[:, :m] + 1j * plain[:, m : 2 * m]) * np.exp(1j * position[:, None] * theta)
    return np.concatenate([z.real, z.imag, plain[:, 2 * m :]], -1)


def rows_of(mean: np.ndarray, documents: list[int], rng: np.random.Generator, *, each: int = 60) -> Rows:
    position = np.concatenate([np.sort(rng.choice(WINDOW, each, replace=False)) for _ in documents])
    example = np.repeat(documents, each)
    effects = 0.3 * rng.standard_normal((max(documents) + 1, D))
    content = mean + effects[example] + rng.standard_normal((len(position), D)) * np.linspace(0.4, 1.2, D)
    return Rows(turned(content, position, THETA), position, example)


# ---- written out --------------------------------------------------------------------------------


class ByHand:
    """The vectors of one head, and all their quantities written out."""

    def __init__(self, q: Rows, k: Rows, theta: np.ndarray, window: int, scaling: float) -> None:
        self.q, self.k, self.theta, self.window, self.scaling = q, k, theta, window, scaling
        self.groups = sorted(set((q.example_id % 8).tolist()))

    def undone(self, rows: Rows) -> np.ndarray:
        x, m = rows.x.astype(float), len(self.theta)
        z = (x[:, :m] + 1j * x[:, m : 2 * m]) * np.exp(-1j * rows.position[:, None] * self.theta)
        return np.concatenate([z.real, z.imag, x[:, 2 * m :]], -1)

    def share(self, *kinds: Rows, without: int | None = None) -> float:
        """1 − Σ‖x − R μ̃_{−g}‖² / Σ‖x − μ_{−g}‖², over the groups g."""
        content = whole = 0.0
        for rows in kinds:
            kept = np.flatnonzero(rows.example_id % 8 != (-1 if without is None else without))
            group, x, still = rows.example_id[kept] % 8, rows.x[kept].astype(float), self.undone(rows)[kept]
            for g in set(group.tolist()):
                own, others = group == g, group != g
                content += ((still[own] - still[others].mean(0)) ** 2).sum()
                whole += ((x[own] - x[others].mean(0)) ** 2).sum()
        return 1 - content / whole

    def decay(self, without: int | None = None) -> float:
        """− slope of the mean-field score on log₂ Δ, at sixteen distances per octave up to half the window."""
        means = []
        for rows in (self.q, self.k):
            kept = rows.example_id % 8 != (-1 if without is None else without)
            means.append(self.undone(rows)[kept].mean(0))
        m = len(self.theta)
        mu_q, mu_k = (mean[:m] + 1j * mean[m : 2 * m] for mean in means)
        octaves = np.arange(int(16 * np.log2(self.window // 2)) + 1) / 16
        curve = [
            self.scaling
            * ((mu_q * mu_k.conj() * np.exp(1j * self.theta * 2**o)).real.sum() + means[0][2 * m :] @ means[1][2 * m :])
            for o in octaves
        ]
        return float(-np.polyfit(octaves, curve, 1)[0])

    def null(self) -> float:
        """Each class without its drift, half of the documents read backwards, the axis fitted again."""
        still = [self.without_drift(rows) for rows in (self.q, self.k)]
        x = np.concatenate(still)
        t, example = (
            np.concatenate([getattr(r, name) for r in (self.q, self.k)]) for name in ("position", "example_id")
        )
        names = np.unique(example)
        ends = np.array([[t[example == e].min(), t[example == e].max()] for e in names]).sum(1)
        number, found = np.searchsorted(names, example), []
        for sign in balanced(np.bincount(number), 0):
            back = np.where(sign[number] < 0, ends[number] - t, t).astype(float)
            c = (back - back.mean()) @ (x - x.mean(0)) / len(x)
            along = (x - x.mean(0)) @ c
            found.append(abs(np.corrcoef(along, back)[0, 1]))
        return float(np.quantile(found, 0.95))

    def without_drift(self, rows: Rows) -> np.ndarray:
        late = rows.position - rows.position.mean()
        return rows.x - np.outer(late, late @ rows.x / (late @ late))

    def interval(self, value: float, again: list[float]) -> tuple[float, float]:
        """Delete-one jackknife, centred at the bias-corrected value, and extended to the value itself."""
        g = len(again)
        centre = g * value - (g - 1) * np.mean(again)
        half = student.ppf(0.975, g - 1) * np.sqrt((g - 1) / g * ((again - np.mean(again)) ** 2).sum())
        return min(centre - half, value), max(centre + half, value)


def compare(row: pd.Series, head: ByHand) -> None:
    """Every number of a row of ``position`` and its interval."""
    kinds = {"q": (head.q,), "k": (head.k,), "": (head.q, head.k)}
    for kind, rows in kinds.items():
        name = f"position_share_{kind}".rstrip("_")
        again = [head.share(*rows, without=g) for g in head.groups]
        check(row, name, head.share(*rows), head.interval(head.share(*rows), again))
    check(row, "decay", head.decay(), head.interval(head.decay(), [head.decay(g) for g in head.groups]))


def check(row: pd.Series, name: str, value: float, ends: tuple[float, float]) -> None:
    assert row[name] == pytest.approx(value, rel=1e-8, abs=1e-8), name
    assert row[f"{name}_low"] == pytest.approx(ends[0], rel=1e-7, abs=1e-7), name
    assert row[f"{name}_high"] == pytest.approx(
        min(ends[1], 1.0) if "share" in name else ends[1], rel=1e-7, abs=1e-7
    ), name


def test_a_dataset_with_four_document_groups(tmp_path: Path):
    """Twelve documents in four groups: the jackknife of four."""
    rng = np.random.default_rng(0)
    documents = [g + 8 * i for i in range(3) for g in range(4)]
    q, k = (rows_of(mean, documents, rng) for mean in rng.standard_normal((2, D)))
    heads = [(HeadId(0, 0, "q"), q), (HeadId(0, 0, "k"), k)]
    rope = {"frequencies": THETA.tolist()}
    folder = write_dataset(tmp_path / "data", heads, q_per_kv=1, window=WINDOW, rope=rope)
    for name, rows in heads:
        widen(folder / str(name) / "data.parquet", rows)
    run = qkscope.open(folder)
    head = ByHand(q, k, THETA, WINDOW, D**-0.5)
    assert head.groups == [0, 1, 2, 3]
    compare(qkscope.position(run).iloc[0], head)
    assert qkscope.rotation(run)["null_r95"].iloc[0] == pytest.approx(head.null(), rel=1e-8)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small model with all its vectors beside it."""
    pytest.importorskip("torch")
    from tests.capture.conftest import captured_with_vectors
    from tests.capture.families import families

    return captured_with_vectors(tmp_path_factory.mktemp("position"), families()["llama"], 12, "--layers", "1")


def test_a_captured_run(captured: Path):
    """Sums over all tokens against the vectors themselves; the run's sample holds every token here."""
    run, vectors = qkscope.open(captured), Dataset.open(captured / "vectors")
    layer = json.loads((captured / "run.json").read_text())["layers"][0]
    table, rotated = qkscope.position(run), qkscope.rotation(run)
    for (_, row), (_, other) in list(zip(table.iterrows(), rotated.iterrows(), strict=True))[:3]:
        head = HeadId(int(row["layer"]), int(row["head"]), "q")
        q, k = (vectors.read(part).ordered().as_double() for part in (head, vectors.key_head(head)))
        theta = np.array(layer["rope"]["frequencies"])
        by_hand = ByHand(q, k, theta, int(run.source.window or 0), layer["scaling"])
        compare(row, by_hand)
        assert other["null_r95"] == pytest.approx(by_hand.null(), rel=1e-6)  # sums over tokens are of float32 vectors


# ---- planted ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_planted_share_is_recovered(share: float):
    rng = np.random.default_rng(int(10 * share))
    theta = np.array([0.9, 0.31, 0.12, 0.05])  # fast enough that the plain mean is next to zero
    rope, documents = Rope(theta), 48
    parts = []
    for _ in range(2):
        mean = rng.standard_normal(8)
        mean *= np.sqrt(8 * share / (1 - share)) / np.linalg.norm(mean)
        position = np.concatenate([np.sort(rng.choice(2048, 200, replace=False)) for _ in range(documents)])
        content = mean + rng.standard_normal((len(position), 8))
        parts.append(Rows(turned(content, position, theta), position, np.repeat(np.arange(documents), 200)))
    rotary = HeadRotary(rope, *(undone_sums(rows, rope) for rows in parts))
    row = tables_of(head_data(one_head(*parts, 2048), rotary=rotary), "position")["position"].iloc[0]
    for name in ("position_share_q", "position_share_k", "position_share"):
        assert row[name] == pytest.approx(share, abs=0.02), name
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_content_alone_has_no_share_and_a_layer_without_rotary_none_by_definition():
    rng = np.random.default_rng(3)
    documents = list(range(32))
    q, k = (rows_of(np.zeros(D), documents, rng) for _ in range(2))
    rotary = HeadRotary(ROPE, undone_sums(q, ROPE), undone_sums(k, ROPE))
    moments = one_head(q, k, WINDOW)
    known, nope = (
        tables_of(head_data(moments, **said), "position")["position"].iloc[0]
        for said in ({"rotary": rotary}, {"nope": True})
    )
    assert abs(known["position_share"]) < 0.02
    assert nope["position_share_q"] == nope["position_share_k"] == nope["position_share"] == 0
    assert np.isnan(nope["decay"])
    assert tables_of(head_data(moments), "position").get("position") is None, "nothing is known about its rotation"


def test_a_temperature_is_part_of_what_position_says():
    """Queries twice as long in the second half of the window: without noise, all of it is position."""
    position, example = np.tile(np.arange(WINDOW), 8), np.repeat(np.arange(8), WINDOW)
    factor = np.where(np.arange(WINDOW) < WINDOW // 2, 1.0, 2.0)
    x = turned(np.tile(np.arange(1.0, D + 1), (len(position), 1)), position, THETA)
    q, k = Rows(x * factor[position][:, None], position, example), Rows(x, position, example)
    cold = Rows(x, position, example)
    rotary = HeadRotary(ROPE, undone_sums(cold, ROPE), undone_sums(k, ROPE), factor)
    head = head_data(one_head(q, k, WINDOW), vectors=Pair(q, k), rotary=rotary)
    split = tables_of(head, "planes", "position")
    planes = split["planes"].query("view == 'rope' and plane < 4")
    np.testing.assert_allclose(planes["position_share_q"], 1.0)
    np.testing.assert_allclose(planes["position_share_k"], 1.0)


def test_the_range_of_decay_can_be_set_and_ends_within_a_sliding_window():
    rng = np.random.default_rng(5)
    q, k = (rows_of(mean, list(range(8)), rng) for mean in rng.standard_normal((2, D)))
    rotary = HeadRotary(ROPE, undone_sums(q, ROPE), undone_sums(k, ROPE))
    moments = one_head(q, k, WINDOW)

    def end(asked: int | None, sliding: int | None) -> int:
        head = head_data(moments, rotary=rotary, sliding_window=sliding)
        return int(tables_of(head, "position", decay_range=asked)["position"]["decay_range"].iloc[0])

    assert end(None, None) == WINDOW // 2
    assert end(40, None) == 40
    assert end(None, 64) == 32
    assert end(100, 64) == 63
