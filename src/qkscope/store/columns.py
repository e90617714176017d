"""What each column of each table is: name, unit, meaning, and where its formula stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column's name, unit, meaning and the section of docs/method.md that defines it."""

    name: str
    unit: str
    meaning: str
    section: str


def _columns(section: str, *rows: tuple[str, str, str]) -> list[Column]:
    return [Column(name, unit, meaning, section) for name, unit, meaning in rows]


def _ranges(names: Iterable[str], of: str = "") -> list[Column]:
    """``X_se``, ``X_low``, ``X_high`` for each name."""
    return [
        Column(f"{name}_{part}", "as " + name, meaning + of, "6")
        for name in names
        for part, meaning in (
            ("se", f"jackknife standard error of {name}"),
            ("low", f"lower end of the 95% interval of {name}"),
            ("high", f"upper end of the 95% interval of {name}"),
        )
    ]


_HEAD = _columns(
    "0",
    ("model", "", "label of the model or checkpoint"),
    ("family", "", "label of the model family"),
    ("layer", "index", "layer, from 0"),
    ("head", "index", "query head within the layer, from 0"),
    ("k_head", "index", "key head it reads"),
)
_LAYER = _columns(
    "7",
    ("nope", "true/false", "the layer has no rotary encoding; empty where the source does not say"),
    ("sliding_window", "tokens", "how far back the layer's queries see; empty: to the beginning, or not known"),
)
_COUNTS = _columns("0", ("n_q", "rows", "query vectors used"), ("n_k", "rows", "key vectors used"))
_FLAGS = _columns(
    "6",
    ("flags", "", "what qualifies the row, joined by ';': low_n, few_documents, nonfinite_q=N, nonfinite_k=N"),
)
_TAXONOMY = _columns(
    "1", ("taxonomy", "", "position-dominated, q-positional, k-positional, content-focused or mixed, from PC0")
)

_DISTANCE = [
    *_columns(
        "4",
        ("distance_r2", "share", "1 − SSE/SST of the curve predicted from means, over bins; empty without rotary"),
        ("distance_corr", "correlation", "of the predicted and the measured distance curve over bins"),
        ("position_share_of_score", "share", "of the variance of scores over pairs that the predicted curve explains"),
    ),
    *_ranges(["position_share_of_score"]),
]
_PLASTICITY = [
    *_columns(
        "5",
        ("ap_overall", "share", "attention plasticity over the window: mean of ap over buckets, weighted by queries"),
        ("ap_first20", "share", "the same over buckets with their middle in the first fifth of the window"),
        ("ap_last20", "share", "the same in the last fifth"),
        ("ap_drop", "share", "ap_first20 − ap_last20"),
    ),
    *_ranges(["ap_overall", "ap_first20", "ap_last20", "ap_drop"]),
]

SUMMED_UP = {
    "qk": ("explained_variance", "r_q", "r_k"),
    "heads": (
        "positional_overhead",
        "posvar_q",
        "posvar_k",
        "lda_accuracy",
        "active_planes",
        "distance_r2",
        "position_share_of_score",
        "ap_overall",
        "ap_first20",
        "ap_last20",
        "ap_drop",
    ),
    "rotated": (
        "r_q_a",
        "r_k_a",
        "bias_strength",
        "bias_window",
        "bias_full_window",
        "bias_causal_window",
        "separation_strength",
        "plane_var_fraction",
    ),
}
"""The columns of ``runs`` by the table they come from; those of ``qk`` on component 0."""
STATISTICS = ("mean", "median", "low", "high")

TABLES: dict[str, list[Column]] = {
    "qk": [
        *_HEAD,
        *_columns("1", ("pc", "index", "principal component, from 0, by descending variance")),
        *_COUNTS,
        *_columns(
            "1",
            ("explained_variance", "share", "share of the pooled variance of queries and keys on this component"),
            ("r_q", "correlation", "of the queries' projection with position; sign canonical"),
            ("r_k", "correlation", "of the keys' projection with position; negative: drifts against the queries"),
            ("mu_q", "vector units", "mean projection of the queries, not centred"),
            ("mu_k", "vector units", "mean projection of the keys, not centred"),
            ("slope_q", "per token", "regression slope of the queries' projection on position"),
            ("slope_k", "per token", "regression slope of the keys' projection on position"),
            ("var_q", "squared units", "variance of the queries' projection"),
            ("var_k", "squared units", "variance of the keys' projection"),
            ("fisher", "ratio", "(mu_q − mu_k)² / (var_q + var_k)"),
            ("separation", "vector units", "|mu_q − mu_k|"),
            ("concordant", "true/false", "r_k > 0; empty where |r_q| < 0.05 leaves the sign of r_k undefined"),
            ("eigengap", "ratio", "relative distance to the nearer neighbouring eigenvalue"),
            ("degenerate", "true/false", "eigengap < 0.02: r of this component alone means little"),
        ),
        *_TAXONOMY,
        *_ranges(["r_q", "r_k"], " (component 0 only)"),
        *_ranges(["explained_variance"]),
        *_FLAGS,
    ],
    "heads": [
        *_HEAD,
        *_TAXONOMY,
        *_columns(
            "1",
            ("posvar_q_published", "mixed share", "Σ explained_variance·r_q² over the kept components, as published"),
            ("posvar_k_published", "mixed share", "Σ explained_variance·r_k² over the kept components, as published"),
            ("posvar_q_pc0_share", "share", "component 0's part of posvar_q_published"),
            ("posvar_k_pc0_share", "share", "component 0's part of posvar_k_published"),
            ("posvar_q", "share", "exact share of the queries' variance that is linear in position"),
            ("posvar_k", "share", "exact share of the keys' variance that is linear in position"),
            ("positional_overhead", "share", "the same for queries and keys together, each class about its own mean"),
            ("amplification", "score per token", "mu_q·slope_k on component 0"),
            ("amplification_window", "score", "amplification × window"),
            ("fisher", "ratio", "of component 0"),
            ("separation", "vector units", "of component 0"),
            ("lda_accuracy_gaussian", "share", "accuracy of Fisher's line on components 0 and 1 for Gaussian classes"),
            ("lda_accuracy", "share", "accuracy of that line on sampled vectors of documents it was not fitted to"),
        ),
        *_columns(
            "3",
            ("active_planes", "count", "planes of the complement that turn with position; empty without planes.csv"),
            ("active_share", "share", "of the complement's variance in those planes"),
        ),
        *_DISTANCE,
        *_PLASTICITY,
        *_LAYER,
        *_ranges(
            [
                "posvar_q_published",
                "posvar_k_published",
                "posvar_q",
                "posvar_k",
                "positional_overhead",
                "amplification",
                "amplification_window",
                "fisher",
                "separation",
                "lda_accuracy_gaussian",
                "lda_accuracy",
            ]
        ),
    ],
    "rotated": [
        *_HEAD,
        *_COUNTS,
        *_columns("0", ("window", "tokens", "context length: as the dataset says, or the head's last position + 1")),
        *_columns(
            "2",
            ("position_r", "correlation", "|corr| of the pooled projection on a with position"),
            ("r_q_a", "correlation", "of the queries' projection on a with position"),
            ("r_k_a", "correlation", "of the keys' projection on a with position"),
            ("alpha_q", "per token", "drift slope of the queries on a"),
            ("alpha_k", "per token", "drift slope of the keys on a"),
            ("mu_q_a", "vector units", "mean of the queries on a, not centred"),
            ("mu_k_a", "vector units", "mean of the keys on a, not centred"),
            ("mu_q_b", "vector units", "mean of the queries on b, not centred"),
            ("mu_k_b", "vector units", "mean of the keys on b, not centred"),
            ("separation_strength", "share", "share of E‖q − k‖² on b"),
            ("var_frac_a", "share", "share of the pooled variance on a"),
            ("var_frac_b", "share", "share of the pooled variance on b"),
            ("plane_var_fraction", "share", "var_frac_a + var_frac_b"),
            ("content_var_b", "squared units", "variance on b within a class, mean of the two"),
            ("bias_strength", "score per token", "mu_q_a·alpha_k; positive: later keys score higher (recency)"),
            ("query_term", "score per token", "alpha_q·mu_k_a, the coefficient of the query's position"),
            ("interaction", "score per token²", "alpha_q·alpha_k, the coefficient of both positions"),
            ("constant", "score", "mu_q_a·mu_k_a + mu_q_b·mu_k_b"),
            ("bias_full", "score per token", "μ_Q·β_K over all dimensions, of which bias_strength is the part on a"),
            (
                "bias_causal",
                "score per token",
                "slope of the score on the key's position within queries, over earlier keys",
            ),
            ("bias_window", "score", "bias_strength × window"),
            ("bias_full_window", "score", "bias_full × window"),
            ("bias_causal_window", "score", "bias_causal × window"),
            ("logit_bias_window", "logit", "bias_full × window × the model's scaling of q·k"),
            ("residual_pos_r", "correlation", "largest |corr| with position off a: rounding only, by the lemma"),
            ("residual_r_q", "correlation", "|corr| of the queries with position along the part of their drift off a"),
            ("residual_r_k", "correlation", "|corr| of the keys with position along the part of their drift off a"),
            ("a_qk_cos", "cosine", "between the drift of the queries and the drift of the keys"),
            ("b_centroid_cos", "cosine", "between b and the difference of the class means off a"),
            ("linearity_r2", "share", "how straight the keys' drift on a is: squared correlation of bucket means"),
        ),
        *_columns(
            "3",
            ("omega", "radians per token", "signed frequency of the best circle through x_a + i·x_b, from the sample"),
            ("omega_r_squared", "share", "how much of x_a + i·x_b about its class means that circle explains"),
            ("omega_at_edge", "true/false", "omega is the lowest frequency searched: drift rather than rotation"),
        ),
        *_columns(
            "6",
            ("null_r95", "correlation", "what position_r stays below in 95% of cases where content ignores position"),
            ("r_q_heldout", "correlation", "r_q_a along an axis a that other documents chose"),
            ("r_k_heldout", "correlation", "r_k_a along an axis a that other documents chose"),
        ),
        *_LAYER,
        *_ranges(
            [
                "position_r",
                "r_q_a",
                "r_k_a",
                "alpha_q",
                "alpha_k",
                "mu_q_a",
                "mu_k_a",
                "mu_q_b",
                "mu_k_b",
                "bias_strength",
                "query_term",
                "interaction",
                "constant",
                "bias_full",
                "bias_causal",
                "bias_window",
                "bias_full_window",
                "bias_causal_window",
                "separation_strength",
                "var_frac_a",
                "var_frac_b",
                "plane_var_fraction",
                "content_var_b",
                "linearity_r2",
            ]
        ),
        *_FLAGS,
    ],
    "planes": [
        *_HEAD,
        *_columns(
            "3",
            ("view", "", "svd: principal planes of the complement of a and b; rope: the planes that RoPE turns"),
            ("plane", "index", "plane within the view, from 0: by descending variance, or as RoPE numbers them"),
            ("n_q", "rows", "query vectors measured"),
            ("n_k", "rows", "key vectors measured"),
            ("var_share", "share", "svd: of the complement's variance in this plane; rope: of the pooled variance"),
            ("angle_r", "correlation", "resultant with the sign of the frequency"),
            ("frequency", "radians per token", "at which the angle turns with position; its sign is the plane's"),
            ("resultant", "share", "mean length of e^{i(θ − ωt)} over queries and keys"),
            ("coherence", "ratio", "|Σ_d F_d|² / Σ_d |F_d|² over documents: about 1 by chance"),
            ("coherence_chance", "ratio", "what 99% of structureless planes on the same tokens stay below"),
            ("ring", "ratio", "coefficient of variation of the radius: 0 is a perfect ring, 0.5 a Gaussian cloud"),
            ("active", "true/false", "coherence > coherence_chance"),
            ("qk_accuracy", "share", "how well a line in the plane tells queries from keys: 0.5 on a shared ring"),
            ("theta", "radians per token", "RoPE's frequency of the plane; 0 for the coordinates it leaves alone"),
            ("lock_q", "share", "how firmly queries are locked to the rotation: |mean with it undone| / mean length"),
            ("lock_k", "share", "the same of keys"),
            ("cycles", "turns", "theta × window / 2π"),
            ("bias_part", "score per token", "the plane's part of bias_full; the parts add up to it"),
            ("bias_share", "share", "|bias_part| over the sum of all |bias_part|"),
        ),
    ],
    "distance": [
        *_HEAD,
        *_columns(
            "4",
            ("distance_low", "tokens", "smallest distance of query and key in the bin"),
            ("distance_high", "tokens", "largest distance in the bin"),
            ("n_pairs", "pairs", "pairs of sampled tokens of one document in the bin"),
            ("measured", "logit", "mean of q·k × the model's scaling over these pairs"),
            ("measured_se", "logit", "its standard error, by document"),
            ("predicted", "logit", "mean of the mean-field score at the distances of these pairs"),
        ),
        *_DISTANCE,
    ],
    "plasticity": [
        *_HEAD,
        *_columns(
            "5",
            ("q_bucket", "index", "position bucket of the queries, from 0; bucket 0 has no earlier keys and no row"),
            ("q_position", "tokens", "middle of the bucket"),
            ("bucket_width", "tokens", "positions per bucket, on which plasticity depends"),
            ("n_queries", "rows", "queries in the bucket"),
            ("n_pairs", "pairs", "pairs of earlier keys"),
            ("ap", "share", "mean of 4p(1 − p) over pairs, p from the bucket's mean and full covariance"),
            ("ap_se", "share", "its jackknife standard error by document group"),
            ("ap_published", "share", "the same by the published model: linear drift, and variances only"),
            ("ap_fixed", "share", "the same of queries turned to the middle of the bucket first; empty without rotary"),
        ),
        *_PLASTICITY,
    ],
    "plasticity_pairs": [
        *_columns(
            "5",
            ("model", "", "label of the model or checkpoint"),
            ("family", "", "label of the model family"),
            ("layer", "index", "layer, from 0; all its heads together"),
            ("inter_key", "tokens", "distance of the two keys: this and up to twice it"),
            ("key_to_query", "tokens", "distance of the later key and the middle of the query bucket: likewise"),
            ("n_pairs", "pairs", "pairs of keys, added up over buckets and heads"),
            ("ap", "share", "mean plasticity of these pairs"),
            ("ap_published", "share", "the same by the published model"),
        ),
    ],
    "plasticity_links": _columns(
        "5",
        ("model", "", "label of the model or checkpoint"),
        ("family", "", "label of the model family"),
        ("link", "", "class: mean ap_overall of a class of heads; rank: Spearman's ρ of ap_overall with a column"),
        ("name", "", "the class or the column; abs_ leaves out its sign"),
        ("n_heads", "heads", "query heads"),
        ("value", "share or correlation", "the mean or ρ"),
        ("value_low", "as value", "lower end of its 95% interval, by bootstrap over key heads"),
        ("value_high", "as value", "upper end of it"),
    ),
    "runs": [
        *_columns(
            "7",
            ("model", "", "label of the model or checkpoint"),
            ("family", "", "label of the model family"),
            ("phase", "", "part of training, where a study says so"),
            ("step", "steps", "training step, where a study says so"),
            ("window", "tokens", "context length"),
            ("n_heads", "heads", "query heads analysed"),
            ("n_documents", "documents", "measured; of a dataset, those of its first head"),
            ("n_tokens", "tokens", "measured; of a dataset, rows of its first query head"),
        ),
        *(
            Column(f"{column}_{name}", f"as {column}", meaning.format(column), "7")
            for columns in SUMMED_UP.values()
            for column in columns
            for name, meaning in zip(
                STATISTICS,
                (
                    "mean of {} over heads",
                    "median of {} over heads",
                    "lower end of the mean's 95% interval, by document",
                    "upper end of it",
                ),
                strict=True,
            )
        ),
    ],
}

KEYS = {
    "qk": ["layer", "head", "pc"],
    "heads": ["layer", "head"],
    "rotated": ["layer", "head"],
    "planes": ["layer", "head", "view", "plane"],
    "distance": ["layer", "head", "distance_low"],
    "plasticity": ["layer", "head", "q_bucket"],
    "plasticity_pairs": ["layer", "inter_key", "key_to_query"],
    "plasticity_links": ["link", "name"],
    "runs": [],
}
"""What identifies a row within its model; rows stand in this order."""


def column_names(table: str) -> list[str]:
    """The columns of a table, in order."""
    return [column.name for column in TABLES[table]]
