import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import qkscope
from qkscope.errors import ConfigError, HeadError, QkscopeError
from qkscope.headids import HeadId
from tests.helpers import small_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return qkscope.open(small_dataset(tmp_path_factory.mktemp("api") / "<b>model", window=512))


def test_tables_from_python_are_those_of_the_command(run, tmp_path):
    command = [sys.executable, "-m", "qkscope", "analyze", str(run.source), "-o", str(tmp_path), "-q"]
    subprocess.run(command, check=True)
    single = {"qk": qkscope.qk(run), "rotated": qkscope.rotated(run), "planes": qkscope.planes(run)}
    tables = qkscope.tables(run)
    for name, table in single.items():
        pd.testing.assert_frame_equal(table, tables[name])
    for name, table in tables.items():
        pd.testing.assert_frame_equal(table, pd.read_parquet(tmp_path / f"{name}.parquet"))
    pd.testing.assert_frame_equal(qkscope.heads(run), tables["heads"])


def test_functions_have_the_names_of_their_tables_and_earlier_names():
    names = ("qk", "heads", "rotated", "planes", "position", "distance", "scores", "reach", "plasticity")
    assert all(callable(getattr(qkscope, name)) for name in names)
    assert (qkscope.pca, qkscope.head_table, qkscope.rotation) == (qkscope.qk, qkscope.heads, qkscope.rotated)


def test_a_run_may_be_given_by_its_path(tmp_path):
    folder = small_dataset(tmp_path / "tiny", window=512)
    run = qkscope.open(folder)
    for table in (qkscope.heads, qkscope.plasticity):
        pd.testing.assert_frame_equal(table(folder, intervals=False), table(run, intervals=False))
    by_path = qkscope.analyze([str(folder)], tmp_path / "tables", only=["pca"], intervals=False)
    pd.testing.assert_frame_equal(by_path["heads"], qkscope.analyze(folder, only=["pca"], intervals=False)["heads"])
    with pytest.raises(QkscopeError, match="nowhere"):
        qkscope.scores(tmp_path / "nowhere")


def test_one_head_has_axes_moments_and_projections(run):
    head = run.head(1, 3)
    table = qkscope.rotation(run).query("layer == 1 and head == 3").iloc[0]
    assert head.rotation.bias_strength == pytest.approx(table["bias_strength"])
    assert abs(head.a @ head.b) < 1e-12
    assert run.head("l01h03").id == head.id
    with pytest.raises(ConfigError, match=r"expected query heads such as l04h01 or \(4, 1\), got 'five'"):
        run.head("five")
    with pytest.raises(ConfigError, match=r"expected query heads such as l04h01 or \(4, 1\), got 1"):
        run.head(1)
    assert head.taxonomy == qkscope.pca(run).query("layer == 1 and head == 3")["taxonomy_published"].iloc[0]
    q = head.projections("q")
    assert len(q) == 200
    assert q["a"].mean() == pytest.approx(head.rotation.mu_q_a, abs=1e-5)
    assert np.corrcoef(q["pc0"], q["position"])[0, 1] == pytest.approx(head.pca.r_q[0], abs=1e-5)
    assert len(head.projections("k", size=30)) == 30
    assert head.moments.total_k.n == 200


def test_samples_are_the_same_tokens_whatever_the_size(run):
    large, small = (run.sample(HeadId(0, 1, "q"), size, seed=3).rows for size in (50, 20))
    np.testing.assert_array_equal(large.position[:20], small.position)


def test_html_escapes_what_users_name(run):
    for text in (run._repr_html_(), run.head(0, 0)._repr_html_()):
        assert "<b>" not in text
        assert "&lt;b&gt;model" in text
    assert "8 query heads in 2 layers" in repr(run)
    assert "l00h01q" in repr(run.head(0, 1))


def test_what_is_not_there_is_named(run):
    with pytest.raises(HeadError, match=r"l07h00q: .* has no such head; see run.heads"):
        run.head(7, 0)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qkscope.nothing
    assert set(qkscope.__all__) == set(dir(qkscope))
    pytest.importorskip("torch")  # for qkscope.intervene
    for name in qkscope.__all__:
        assert getattr(qkscope, name) is not None


def test_a_broken_head_raises_from_python(tmp_path):
    dataset = small_dataset(tmp_path / "d")
    (dataset / "l00h00q" / "data.parquet").write_bytes(b"")
    with pytest.raises(QkscopeError, match="l00h00q"):
        qkscope.pca(qkscope.open(dataset))


REFUSED = """
from qkscope.analyses.options import PcaOptions, RotationOptions
for make in (lambda: RotationOptions("bogus"), lambda: RotationOptions(pairing="bogus"), lambda: PcaOptions(low=0.9)):
    try:
        make()
    except ValueError as error:
        assert "expected" in str(error) or "there are" in str(error)
    else:
        raise SystemExit("accepted")
"""


def test_options_that_do_not_exist_are_refused_also_where_types_are_not_checked():
    subprocess.run([sys.executable, "-c", REFUSED], check=True)


PROBE = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name)
sys.meta_path.insert(0, NoTorch())
import qkscope
assert "pandas" not in sys.modules and "numpy" not in sys.modules, "import qkscope must stay light"
import qkscope.core.moments, qkscope.core.sample, qkscope.core.planted
assert "pandas" not in sys.modules and "pyarrow" not in sys.modules, "core is NumPy and SciPy only"
import qkscope.analyses.tabulate
assert "pyarrow.parquet" not in sys.modules and "huggingface_hub" not in sys.modules
import qkscope.results.analyze, qkscope.cli.main
"""


def test_imports_are_light_and_need_no_torch():
    subprocess.run([sys.executable, "-c", PROBE], check=True)
