import numpy as np
import pandas as pd
import pytest
from scipy.stats import pearsonr
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from qkscope.analyses.components import TAXONOMY, components, head_variance, lda_accuracy_gaussian, taxonomy
from qkscope.analyses.options import PcaOptions
from qkscope.core.moments import Moments
from qkscope.core.planted import Ring, plant
from qkscope.core.rows import Rows
from tests.helpers import heads_of, one_head, tables_of


def totals(q: Rows, k: Rows) -> tuple[Moments, Moments]:
    return Moments.from_rows(q.x, q.position), Moments.from_rows(k.x, k.position)


def planted(seed: int = 0, d: int = 24, **options: object) -> tuple[Rows, Rows]:
    settings = {"n": 1500, "documents": 16, "sigma": np.geomspace(2.0, 0.3, d), "rings": [Ring(0.02, 1.0, 1.5)]}
    head = plant(d, seed=seed, **(settings | options))  # type: ignore[arg-type]
    return head.q, head.k


def stacked(seed: int) -> tuple[Rows, Rows]:
    """Unstructured data of unequal size and scale, far from the origin."""
    rng = np.random.default_rng(seed)

    def rows(n: int, offset: float) -> Rows:
        x = (rng.standard_normal((n, 15)) * np.geomspace(5, 0.5, 15) + offset) @ rng.standard_normal((15, 15))
        return Rows(x, rng.integers(0, 131_072, n), rng.integers(0, 40, n))

    return rows(900, 3.0), rows(1300, -2.0)


@pytest.mark.parametrize("make", [planted, stacked])
@pytest.mark.parametrize("seed", range(5))
def test_components_equal_sklearn_and_scipy(make, seed):
    q, k = make(seed)
    ours = components(*totals(q, k))
    theirs = PCA(10, svd_solver="full").fit(np.concatenate([q.x, k.x]))
    assert ours.eigengap.min() > 1e-4  # else single components are not comparable
    np.testing.assert_allclose(ours.explained_variance, theirs.explained_variance_ratio_, rtol=1e-6)
    on_q, on_k = theirs.transform(q.x), theirs.transform(k.x)
    np.testing.assert_allclose(
        np.abs(ours.r_q), [abs(pearsonr(c, q.position)[0]) for c in on_q.T], atol=1e-6, rtol=1e-6
    )
    np.testing.assert_allclose(
        np.abs(ours.r_k), [abs(pearsonr(c, k.position)[0]) for c in on_k.T], atol=1e-6, rtol=1e-6
    )
    # The relative sign of r_q and r_k is not free.
    product = [pearsonr(a, q.position)[0] * pearsonr(b, k.position)[0] for a, b in zip(on_q.T, on_k.T, strict=True)]
    np.testing.assert_allclose(ours.r_q * ours.r_k, product, atol=1e-6)


def test_signs_are_canonical_and_concordance_says_when_it_means_nothing():
    q, k = planted(3, n=20_000, alpha_q=4e-4)
    pcs = components(*totals(q, k))
    anchored = pcs.sign_anchored_on_k
    assert anchored.any()
    assert not anchored.all()
    assert (pcs.r_q[~anchored] >= 0).all()
    assert (pcs.r_k[anchored] >= 0).all()
    table = tables_of(one_head(q, k), "pca")["qk"]
    assert table["concordant"].isna().tolist() == anchored.tolist()


def test_discordant_heads_have_a_negative_r_k():
    q, k = planted(0, alpha_k=-2e-3, mu_q=(2.0, 1.0), mu_k=(2.0, 1.0))
    pcs = components(*totals(q, k))
    assert pcs.r_q[0] > 0.5
    assert pcs.r_k[0] < -0.5


def test_the_full_uncentred_basis_preserves_scores():
    q, k = planted(1)
    axes = components(*totals(q, k), n_components=q.d).axes
    scores = (q.x[:50] @ axes.T) @ (k.x[:50] @ axes.T).T
    np.testing.assert_allclose(scores, q.x[:50] @ k.x[:50].T, rtol=1e-10, atol=1e-10)


def test_taxonomy_thresholds_are_strict():
    r_q, r_k = np.array([0.7, 0.71, 0.71, 0.3, 0.29]), np.array([0.9, 0.7, -0.71, 0.0, 0.3])
    assert [TAXONOMY[i] for i in taxonomy(r_q, r_k)] == ["mixed", "mixed", "position-dominated", "mixed", "mixed"]
    assert TAXONOMY[taxonomy(np.array([0.5]), np.array([0.5]), high=0.4, low=0.1)[0]] == "position-dominated"


def test_positional_variance_is_a_regression_r2():
    q, k = planted(2)
    whole = head_variance(*totals(q, k), components(*totals(q, k)))
    t = q.position - q.position.mean()
    fitted = np.outer(t, t @ (q.x - q.x.mean(0)) / (t @ t))
    assert whole.posvar_q == pytest.approx((fitted**2).sum() / ((q.x - q.x.mean(0)) ** 2).sum(), rel=1e-10)
    pcs = components(*totals(q, k))
    assert whole.posvar_k_published == pytest.approx((pcs.explained_variance * pcs.r_k**2).sum())
    assert whole.posvar_k_pc0_share == pytest.approx(
        pcs.explained_variance[0] * pcs.r_k[0] ** 2 / whole.posvar_k_published
    )


def test_with_all_components_the_published_formula_differs_from_the_exact_share():
    """Pooled shares weigh the classes' own r² by variance that is not theirs: the separation of Q from K counts."""
    q, k = planted(2, mu_q=(2.0, 12.0), mu_k=(-1.0, -12.0))
    whole = head_variance(*totals(q, k), components(*totals(q, k), n_components=q.d))
    assert whole.posvar_q_published < 0.5 * whole.posvar_q


@pytest.mark.parametrize("gap", [0.3, 1.0, 6.0])
def test_gaussian_lda_accuracy_agrees_with_sklearn(gap):
    q, k = planted(4, n=20_000, mu_q=(0.0, gap), mu_k=(0.0, -gap), rings=[])
    moments = totals(q, k)
    axes = components(*moments).axes[:2]
    x = np.concatenate([q.x, k.x]) @ axes.T
    label = np.repeat([0, 1], [len(q), len(k)])
    expected = LinearDiscriminantAnalysis().fit(x, label).score(x, label)
    assert lda_accuracy_gaussian(*(one.project(axes) for one in moments)) == pytest.approx(expected, abs=5e-3)


def test_amplification_is_the_mean_query_times_the_key_slope():
    q, k = planted(5)
    tables = tables_of(one_head(q, k), "pca")
    first = tables["qk"].iloc[0]
    assert tables["heads"]["amplification"][0] == pytest.approx(first["mu_q"] * first["slope_k"], rel=1e-12)
    assert tables["heads"]["amplification_window"][0] == pytest.approx(4096 * first["mu_q"] * first["slope_k"])


def test_near_equal_eigenvalues_are_called_degenerate():
    m = Moments.from_rows(
        np.eye(4).repeat(2, 0) * [[3.0, 1.005, 1.0, 0.1]] * np.tile([[1], [-1]], (4, 1)), np.arange(8)
    )
    pcs = components(m, Moments.zeros(4), n_components=4)
    np.testing.assert_allclose(pcs.eigengap[:2], [(9 - 1.005**2) / 9, (1.005**2 - 1) / 1.005**2], rtol=1e-9)
    assert pcs.degenerate.tolist() == [False, True, True, False]


@pytest.mark.parametrize("n", [2, 3, 6])
def test_few_rows_give_as_many_components_as_they_span_and_no_nan(n):
    q, k = planted(0, n=n, documents=1)
    tables = tables_of(one_head(q, k), "pca")
    assert len(tables["qk"]) == min(10, 2 * n - 1)
    numbers = tables["qk"].drop(columns=["concordant"]).select_dtypes("number")
    assert np.isfinite(numbers.loc[:, ~numbers.columns.str.contains("_se|_low|_high")].to_numpy()).all()
    assert tables["qk"]["flags"].unique().tolist() == ["low_n;few_documents"]
    assert tables["qk"]["r_q_low"].isna().all()


def test_identical_vectors_are_no_information_not_nan():
    same = Rows(np.ones((40, 5)), np.arange(40), np.arange(40) % 16)
    tables = tables_of(one_head(same, same), "pca")
    assert (tables["qk"][["r_q", "r_k", "explained_variance"]] == 0).all(axis=None)
    assert (tables["heads"][["posvar_q", "fisher"]] == 0).all(axis=None)


def test_classes_without_spread_are_told_apart_perfectly():
    t = np.arange(40)
    q, k = (Rows(np.full((40, 5), v), t, t % 16) for v in (1.0, -1.0))
    assert tables_of(one_head(q, k), "pca")["heads"]["lda_accuracy_gaussian"][0] == 1.0


def test_orthogonal_rotation_changes_no_column():
    heads = [plant(16, n=800, documents=16, sigma=np.geomspace(2, 0.5, 16), seed=s) for s in range(3)]
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((16, 16)))[0]
    turned = [one_head(*(Rows(r.x @ turn, r.position, r.example_id) for r in (head.q, head.k))) for head in heads]
    before = tables_of(heads_of(*heads), "pca")
    after = tables_of(turned, "pca")
    for name in ("qk", "heads"):
        pd.testing.assert_frame_equal(before[name], after[name], rtol=1e-8, atol=1e-8)


def test_number_of_components_is_a_choice():
    q, k = planted(0)
    assert len(tables_of(one_head(q, k), "pca", pca=PcaOptions(n_components=3))["qk"]) == 3
