"""Every sentence that compares agrees with the tables and their intervals: in one study, and in its opposite.

Both studies are planted. In the first keys follow position more closely than queries and the extension left the
curve where it was, in the second queries do and the curve fell; the third is one run of one family, where nothing can
be told.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import qkscope
import qkscope.report.report as report_module
from qkscope.analyses.options import AnalysisOptions
from qkscope.config import StudyRunConfig
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.files.dataset import write_dataset
from qkscope.heads import HeadId
from qkscope.report.claims import Claims
from qkscope.report.findings import FINDINGS
from qkscope.report.front import answers
from qkscope.report.report import report_html
from qkscope.report.values import Value, frames_of, mean_of
from qkscope.report.windows import same_weights
from qkscope.results.analyze import analyze, write_results
from qkscope.results.job import Job
from qkscope.results.study import Study, build

THETA = 5000.0 ** (-np.arange(6) / 6)
D = 12


@dataclass(frozen=True)
class Truth:
    """Planted values: how strongly means of queries and keys are locked, before and after the extension."""

    q: float
    k: float
    later: float
    """Factor on the keys' mean after it."""


def head(truth: Truth, factor: float, window: int, seed: int) -> tuple[Rows, Rows]:
    rng = np.random.default_rng(seed)
    documents, each = 16, 60
    parts = []
    for size in (truth.q, truth.k * factor):
        mean = size * np.concatenate([np.linspace(0.3, 1.0, 6), np.zeros(6)])
        position = np.concatenate([np.sort(rng.choice(window, each, replace=False)) for _ in range(documents)])
        x = mean + rng.standard_normal((len(position), D))
        z = (x[:, :6] + 1j * x[:, 6:]) * np.exp(1j * position[:, None] * THETA)
        parts.append(Rows(np.concatenate([z.real, z.imag], -1), position, np.repeat(np.arange(documents), each)))
    return parts[0], parts[1]


def results(folder: Path, label: str, truth: Truth, factor: float, window: int) -> Path:
    """Tables of four planted heads at one window."""
    heads = []
    for number in range(4):
        q, k = head(truth, factor, window, seed=number)
        heads += [(HeadId(0, number, "q"), q), (HeadId(0, number, "k"), k)]
    rope = {"frequencies": THETA.tolist()}
    data = write_dataset(folder / f"{label}-{window}-data", heads, q_per_kv=1, window=window, rope=rope)
    computed = analyze(
        [Job(qkscope.open(data, model=label), options=AnalysisOptions(decay_range=128))], target=IN_PROCESS
    )
    write_results(folder / f"{label}-{window}", computed, wall_seconds=0.0)
    return folder / f"{label}-{window}"


def study_of(folder: Path, truth: Truth) -> Study:
    """Two checkpoints, the second with a longer window and also captured at the shorter one."""
    before = StudyRunConfig(path=results(folder, "before", truth, 1.0, 256), phase="short", step=1.0)
    after = StudyRunConfig(path=results(folder, "after", truth, truth.later, 1024), phase="long", step=2.0)
    there = build([StudyRunConfig(path=results(folder, "after", truth, truth.later, 256), phase="long", step=2.0)])
    return build([before, after], other_windows=[there])


@pytest.fixture(scope="module", params=["as bundled", "the opposite"])
def planted(request, tmp_path_factory) -> tuple[Truth, Study]:
    truth = Truth(2.0, 5.0, 1.0) if request.param == "as bundled" else Truth(5.0, 2.0, 0.3)
    return truth, study_of(tmp_path_factory.mktemp("truth"), truth)


def mean(study: Study, label: str, table: str, column: str) -> Value:
    value = mean_of(study, [label], frames_of(study)[table], column)
    assert value is not None
    return value


def text_of(study: Study) -> str:
    """The report as a reader sees it."""
    return read(report_html(study, [], []))


def read(page: str) -> str:
    """The text of a page."""
    page = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def test_who_follows_position_more_closely_is_who_the_intervals_say(planted):
    truth, study = planted
    text, q, k = text_of(study), mean(study, "after", "rotated", "r_q_a"), mean(study, "after", "rotated", "r_k_a")
    assert (k.low > q.high) is (truth.k > truth.q), "the planted order is in the tables"
    keys, queries = "Keys follow position more closely than queries", "Queries follow position more closely than keys"
    assert (keys in text) is (k.low > q.high)
    assert (queries in text) is (q.low > k.high)
    assert f"{'Keys' if truth.k > truth.q else 'Queries'}: correlations along the drift axis" in text


def test_what_changes_is_told_at_one_window_and_by_the_intervals(planted):
    truth, study = planted
    text, there = text_of(study), study.compared
    assert study.compare_at == 256
    assert not study.uncompared
    assert "What is compared between them is at 256" in text
    before, after = (mean(there, label, "heads", "decay") for label in ("before", "after"))
    said = re.search(r"decay: [^;]*; it (rises|falls|does not change)", text)
    assert said is not None
    expected = "rises" if after.low > before.high else "falls" if after.high < before.low else "does not change"
    assert said[1] == expected
    assert (expected == "falls") is (truth.later < 1), "the planted change is in the tables"


def test_every_change_that_is_told_follows_from_the_numbers_beside_it(planted):
    _, study = planted
    assert checked_changes(text_of(study)) > 15


def checked_changes(text: str) -> int:
    """Check every sentence that tells a change, wherever it stands, against the intervals before it; their number."""
    number = r"(-?[\d.,e-]+%?) \[(-?[\d.,e-]+%?), (-?[\d.,e-]+%?)\]"
    pattern = re.compile(rf"{number} → (?:{number} → )?{number}; it (rises|falls|does not change)")
    found = list(pattern.finditer(text))
    for match in found:
        groups = [float(group.strip("%").replace(",", "")) if group else None for group in match.groups()[:-1]]
        low, high, later_low, later_high = groups[1], groups[2], groups[-2], groups[-1]
        assert None not in (low, high, later_low, later_high)
        word = match.groups()[-1]
        apart = later_low > high or later_high < low
        touching = later_low == high or later_high == low  # printed ends are rounded
        assert touching or (word == "does not change") is not apart, match[0]
        if apart:
            assert word == ("rises" if later_low > high else "falls"), match[0]
    return len(found)


def test_the_window_alone_does_not_move_decay(planted):
    """The same weights at two windows: the word in every line follows from its values; the curve does not change."""
    _, study = planted
    one = same_weights(study)
    assert one is not None
    assert (one.label, one.windows) == ("after", [256, 1024])
    lines = next(finding for finding in FINDINGS if finding.id == "windows").fill(Claims(study)).lines
    for line, (name, _, values) in zip(lines[1:], one.rows, strict=True):
        assert line.startswith(name)
        assert line.endswith(f"it {values[0].change(values[-1])}.")
    decay = next(values for _, column, values in one.rows if column == "decay")
    assert decay[1].value == pytest.approx(decay[0].value, rel=0.1)


def test_one_run_of_one_family_claims_no_comparison(tmp_path):
    study = build([StudyRunConfig(path=results(tmp_path, "only", Truth(3.0, 3.0, 1.0), 1.0, 256))])
    text, said = text_of(study), dict(answers(Claims(study)))
    q, k = mean(study, "only", "rotated", "r_q_a"), mean(study, "only", "rotated", "r_k_a")
    assert q.compare(k) == 0
    assert "Queries and keys follow position about as closely" in text
    assert said["Who follows position more closely?"].startswith("Neither, beyond the intervals")
    for phrase in (
        "; it rises",
        "; it falls",
        "same weights each time",
        "What is compared between them",
        "family by family:",
    ):
        assert phrase not in text, phrase
    assert "What changed over training?" not in said


def test_runs_of_different_windows_that_were_not_captured_at_one_are_warned_about(tmp_path):
    truth = Truth(3.0, 4.0, 1.0)
    study = build(
        [
            StudyRunConfig(path=results(tmp_path, "short", truth, 1.0, 256)),
            StudyRunConfig(path=results(tmp_path, "long", truth, 1.0, 512)),
        ]
    )
    text = text_of(study)
    assert study.uncompared == ["long"]
    assert "long was not captured at 256" in text
    assert "do not compare" in text


def test_only_claims_compare():
    """Front page, sections and cards place claims; what is larger is decided in claims and windows alone."""
    report = Path(report_module.__file__).parent
    comparing = {path.name for path in report.glob("*.py") if re.search(r"\.compare\(|\.change\(", path.read_text())}
    assert comparing == {"claims.py", "windows.py", "values.py"}


def test_a_claim_has_its_numbers_and_their_window(planted):
    _, study = planted
    claims = Claims(study)
    assert claims.recency is claims.recency, "computed once"
    for claim in (claims.recency, claims.share, claims.axes, claims.terms, claims.first_component):
        assert claim is not None
        assert claim.window == "window 1,024"
        assert all(np.isfinite([value.value, value.low, value.high]).all() for value in claim.values.values()), claim
    assert claims.extension is not None
    assert claims.extension.window == ", both at a window of 256 tokens"
    assert set(claims.extension.values) == {"before", "after"}
