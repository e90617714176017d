"""Every sentence that compares agrees with the tables and their intervals: in one study, and in its opposite.

Both studies are planted. In the first keys follow position more closely than queries and the extension left the
curve where it was, in the second queries do and the curve fell; the third is one run of one family, where nothing can
be told.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import qkscope
import qkscope.report.claims as claims_module
import qkscope.report.front as front_module
import qkscope.report.report as report_module
from qkscope.analyses.components import TAXONOMY
from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.config import StudyRunConfig
from qkscope.core.rows import Rows
from qkscope.engine import IN_PROCESS
from qkscope.figures.card import prepare_card
from qkscope.figures.catalogue import CATALOGUE, FIGURES_BY_NAME
from qkscope.figures.figure import NotApplicable
from qkscope.files.dataset import write_dataset
from qkscope.headids import TERMS, HeadId
from qkscope.report import sections, values
from qkscope.report.claims import Claims
from qkscope.report.findings import FINDINGS
from qkscope.report.front import answers
from qkscope.report.report import report_html
from qkscope.report.values import Value, frames_of, mean_of
from qkscope.report.values import in_text as values_in_text
from qkscope.report.windows import same_weights
from qkscope.results.analyze import analyze, write_results
from qkscope.results.frames import csv_bytes
from qkscope.results.job import Job
from qkscope.results.study import Study, build, select_runs

THETA = 5000.0 ** (-np.arange(6) / 6)
D = 12


@dataclass(frozen=True)
class Truth:
    """Planted values: how strongly means of queries and keys are locked, before and after the extension."""

    q: float
    k: float
    later: float
    """Factor on the keys' mean after it."""


BUNDLED, OPPOSITE = Truth(2.0, 5.0, 1.0), Truth(5.0, 2.0, 0.3)


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
    truth = BUNDLED if request.param == "as bundled" else OPPOSITE
    return truth, study_of(tmp_path_factory.mktemp("truth"), truth)


def mean(study: Study, label: str, table: str, column: str) -> Value:
    value = mean_of(study, label, frames_of(study)[table], column)
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
    text = text_of(study)
    assert [run.window for run in study.runs] == [256, 256]
    assert [run.window for run in study.as_captured.runs] == [256, 1024]
    assert "All numbers here are at 256" in text
    before, after = (mean(study, label, "heads", "decay") for label in ("before", "after"))
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
    for line, (name, _, means) in zip(lines[1:], one.rows, strict=True):
        assert line.startswith(name)
        assert line.endswith(f"it {means[0].change(means[-1])}.")
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
        "All numbers here are at",
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
        assert claim.window == "window 256"
        assert all(np.isfinite([value.value, value.low, value.high]).all() for value in claim.values.values()), claim
    assert claims.extension is not None
    assert claims.extension.window == ", both at a window of 256 tokens"
    assert set(claims.extension.values) == {"before", "after"}


# ---- every number of the page ------------------------------------------------------------------------

LONG = re.compile(r"(?<![\w.])([-+−]?\d[\d,]*\.\d+(?:e[-+]\d+)?)(%?)")
INTERVAL = re.compile(r"\[[^\]\[]*\]")


@pytest.fixture
def _precise(monkeypatch):
    """Numbers are printed with nine digits, by which each can be found in the tables."""
    for module in (values, claims_module, front_module, sections):
        monkeypatch.setattr(module, "in_text", lambda x, percent=False, *_: values_in_text(x, percent, 9))


def known_numbers(study: Study) -> dict[str, set[str]]:
    """The mean of every column of every run, by how nine digits of it read, computed from the tables themselves."""
    found: dict[str, set[str]] = {}
    qk, heads, rotated = (study.tables[name] for name in ("qk", "heads", "rotated"))
    first = qk[qk["pc"] == 0]
    derived = first.assign(
        abs_r_k=first["r_k"].abs(), discordant=(first["r_k"] < 0).astype(float).where(first["r_q"].abs() >= 0.05),
        **{kind: first["taxonomy_published"] == kind for kind in TAXONOMY},
    )  # fmt: skip
    kinds = {f"class_{kind}": heads["head_class"] == kind for kind in HEAD_CLASSES}
    signs = rotated.assign(positive=rotated["bias_strength"] > 0, mu_q_a_positive=rotated["mu_q_a"] > 0)
    for frame in (derived, heads.assign(decays=heads["decay"] > 0, **kinds), signs):
        numeric = frame.drop(columns=["layer", "head", "k_head", "pc"], errors="ignore").select_dtypes(
            ["number", "bool"]
        )
        for label, rows in numeric.astype(float).groupby(frame["model"]):
            for column, mean in rows.mean().items():
                for percent in (False, True):
                    found.setdefault(values_in_text(mean, percent, 9), set()).add(f"{label}:{column}")
    return found


@pytest.mark.usefixtures("_precise")
def test_every_mean_of_the_page_is_that_of_its_column_and_run_at_the_window(planted):
    """Cells by the column in their heading and the run of their row; numbers in sentences by their nine digits."""
    _, study = planted
    page = report_html(study, [], [])
    known, n_cells = known_numbers(study), 0
    for table in re.findall(r'<table class="numbers">(.*?)</table>', page, flags=re.S):
        columns = re.findall(r'<th scope="col" title="(.*?)">', table)
        for label, row in re.findall(r'<th scope="row">(.*?), window 256</th>(.*?)</tr>', table, flags=re.S):
            cells = re.findall(r"<td>(.*?)</td>", row, flags=re.S)
            assert len(cells) == len(columns)
            for column, cell in zip(columns, cells, strict=True):
                number = read(cell.split("<small")[0])
                if number != "–":
                    assert f"{label}:{column}" in known.get(number, ()), (label, column, number)
                    n_cells += 1
    assert n_cells > 100
    own = known_numbers(study.as_captured)
    windows = re.search(r'<details class="section" id="windows">.*?</details>', page, flags=re.S)
    assert windows is not None
    told = checked_sentences(page.replace(windows[0], ""), study, known, own)
    assert told > 30
    assert checked_sentences(windows[0], study, known | own, {}) > 5


def checked_sentences(part: str, study: Study, known: dict[str, set[str]], own: dict[str, set[str]]) -> int:
    """Check each number of nine digits; one at a run's own window must stand in a sentence that says so."""
    told = 0
    for sentence in re.split(r"(?<=\.)\s", read(re.sub(r"<table.*?</table>|<svg.*?</svg>", "", part, flags=re.S))):
        at_own = "own window" in sentence
        for number, percent in LONG.findall(INTERVAL.sub("", sentence)):
            if len(re.sub(r"\D", "", number.split("e")[0]).lstrip("0")) < 8:
                continue  # a fixed number of the text, such as a threshold or a published value
            text = number + percent
            assert text in known or (at_own and text in own) or is_median(study, number), sentence
            told += 1
    return told


def is_median(study: Study, number: str) -> bool:
    """True for what is told of the median head, or the head at a tenth: medians and quantiles over heads."""
    heads, rotated = study.tables["heads"], study.tables["rotated"]
    columns = [heads["distance_worst"], rotated["residual_r_q"], rotated["residual_r_k"]]
    quantiles = [c[heads["model"] == label].quantile(q) for c in columns for label in study.labels for q in (0.5, 0.9)]
    return any(values_in_text(quantile, False, 9) == number for quantile in quantiles)


def test_a_number_from_another_window_is_caught(planted):
    """The same check finds a mean of a run at its own window, where it differs from that at the common one."""
    _, study = planted
    known, own = known_numbers(study), known_numbers(study.as_captured)
    differ = {text for text, names in own.items() if any(name.startswith("after:") for name in names)} - set(known)
    assert len(differ) > 50


# ---- every number of figures and cards -----------------------------------------------------------------


def test_every_number_that_a_figure_draws_of_a_head_is_in_the_tables_at_the_window(planted, data_of_figures):
    """data.csv, column by column: a column with the name of one in the tables has its value in that head and run."""
    _, study = planted
    checked = 0
    for data in data_of_figures(study).values():
        keys = [name for name in ("model", "layer", "head") if name in data]
        if len(keys) < 3 or data.duplicated(keys).any():
            continue
        assert set(data["window"].dropna()) <= {256.0}
        for frame in (study.pc0, study.tables["heads"], study.tables["rotated"]):
            assert frame is not None
            joined = data[keys].astype({"layer": int, "head": int}).merge(frame, on=keys, how="left")
            for column in (set(data) & set(frame)) - {*keys, "window", "flags"}:
                if pd.api.types.is_float_dtype(data[column]) and pd.api.types.is_numeric_dtype(frame[column]):
                    expected = joined[column].to_numpy(float)
                    np.testing.assert_allclose(data[column], expected, rtol=1e-6, atol=1e-12, err_msg=column)
                    checked += 1
    assert checked > 12


def test_what_a_figure_says_follows_from_its_data_alone_and_turns_with_it(tmp_path, data_of_figures):
    """Read back from data.csv the sentences are the same; in the study of the opposite truth they are others."""
    studies = [study_of(tmp_path / str(n), truth) for n, truth in enumerate((BUNDLED, OPPOSITE))]
    drawn = [data_of_figures(study) for study in studies]
    assert set(drawn[0]) == set(drawn[1])
    said = [
        {
            name: FIGURES_BY_NAME[name].says(pd.read_csv(io.BytesIO(csv_bytes(data, "%.17g"))))
            for name, data in of_study.items()
        }
        for of_study in drawn
    ]
    for name, data in drawn[0].items():
        assert said[0][name] == FIGURES_BY_NAME[name].says(data), name
        assert said[0][name] != said[1][name] or not said[0][name], f"{name} says the same of the opposite"
    assert sum(map(bool, said[0].values())) > 20


@pytest.fixture(scope="module")
def data_of_figures():
    """The data of every figure that applies to a study."""

    def prepared(study: Study) -> dict[str, pd.DataFrame]:
        found = {}
        for figure in CATALOGUE:
            with contextlib.suppress(NotApplicable):
                found[figure.name] = figure.prepared(study)
        return found

    return prepared


def test_a_card_has_the_numbers_of_the_tables(planted):
    _, study = planted
    one = select_runs(study, ["after"])
    for head in range(4):
        data = prepare_card(one, (0, head))
        row = one.tables["heads"].set_index("head").loc[head]
        shares = data[data["part"] == "terms"].set_index("term")["share"]
        assert shares.to_dict() == pytest.approx({term: row[f"part_{term}"] for term in TERMS})
        assert set(data["window"]) == {256}
        sentence = data["sentence"].iloc[0]
        fall = re.search(r"(falls|rises) by ([\d.]+) logits", sentence)
        if row["decay_low"] > 0 or row["decay_high"] < 0:
            assert fall is not None
            assert (fall[1] == "falls") == (row["decay"] > 0)
            assert float(fall[2]) == pytest.approx(abs(row["decay"]), rel=0.06)
        else:
            assert fall is None
