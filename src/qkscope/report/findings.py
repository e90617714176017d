"""The findings of the study: the texts that do not depend on the data."""

from __future__ import annotations

from qkscope.report.claims import details
from qkscope.report.sections import Finding, Measure
from qkscope.report.values import CLASS_COLUMNS
from qkscope.report.windows import same_weights_lines

_FIRST = Measure("explained_variance", "PC0's share of variance", "qk", percent=True)
FINDINGS = (
    Finding(
        "share",
        "How much of the variance is position",
        "With the rotation undone, the mean query turned to its position is all that position alone says about a "
        "query; what is left is content. position_share is that part of the variance, fitted on other documents. Its "
        "linear part, a drift along one direction, is posvar.",
        "position_share depends on the window: planes that hardly turn within it count as position only in a longer "
        "one. The published formula, Σ explained_variance · r², multiplies a share of the pooled variance, in which "
        "the distance between queries and keys counts, with a correlation within one class. It is not a fraction of "
        "anything. The exact share, ‖Cov(x, t)‖² / (var t · tr Σ), is.",
        ("qk-pca/01_pc_roles", "qk-pca/05_explained_variance", "audit/01_published_vs_exact"),
        (
            Measure("position_share_q", "queries", "heads", percent=True),
            Measure("position_share_k", "keys", "heads", percent=True),
            Measure("posvar_q", "queries, linear part", "heads", percent=True),
            Measure("posvar_q_published", "queries, published formula", "heads", percent=True),
            Measure("posvar_k", "keys, linear part", "heads", percent=True),
            Measure("posvar_k_published", "keys, published formula", "heads", percent=True),
            _FIRST,
        ),
        lambda claims: [
            *details(claims.formula),
            *claims.published_lines(("posvar_q_published", "queries"), ("posvar_k_published", "keys")),
        ],
    ),
    Finding(
        "separability",
        "How far apart queries and keys are",
        "Queries and keys of a head are two clouds. Here is how far apart they lie along the first component.",
        "lda_accuracy_gaussian is what Fisher's line would score on PC0 and PC1 if both clouds were Gaussian. PCA "
        "centres its coordinates; (Uq)·(Uk) = q·k holds for the uncentred ones only.",
        ("qk-pca/06_collage_example",),
        (
            Measure("fisher", "Fisher ratio on PC0", "heads"),
            Measure("separation", "distance of the means on PC0", "heads"),
            Measure("lda_accuracy_gaussian", "accuracy of a line, were they Gaussian", "heads", percent=True),
            Measure("lda_accuracy", "on documents it was not fitted to", "heads", percent=True),
        ),
        lambda claims: claims.published_lines(
            ("fisher_pc0", "Fisher ratio about"), ("separation_pc0", "separation about")
        ),
    ),
    Finding(
        "amplification",
        "The mean query amplifies the keys' drift",
        "On PC0 the score holds the term mu_q · slope_k · j: a mean query far from zero turns a small drift of the "
        "keys into a bias towards one end of the context.",
        "It is the slope of a line: per token it shrinks as the window grows, per window it grows, even if the head "
        "does not change. Compare it at one window only.",
        (),
        (
            Measure("amplification", "mu_q · slope_k per token", "heads"),
            Measure("amplification_window", "per window", "heads"),
        ),
    ),
    Finding(
        "taxonomy",
        "Kinds of heads",
        "Heads by what most of the variance of their scores is: position, key, query or content, beyond the intervals; "
        "else mixed. A head whose scores hardly vary is flat, whatever their parts are: it attends almost evenly.",
        "The published classes, on the right, are by how queries and keys follow position on PC0: |r| above 0.7 is "
        "strong, below 0.3 is weak. They do not say what scores are made of: weights that never saw a text are "
        "content-focused by them. A mean of signed r_k can fall because heads turn discordant rather than because keys "
        "forget position, so the discordant share stands beside them.",
        ("qk-pca/02_rq_vs_rk_scatter",),
        (
            *(Measure(column, kind, "heads", percent=True) for column, kind in CLASS_COLUMNS.items()),
            *(
                Measure(kind, f"published: {kind}", "qk", percent=True)
                for kind in ("position-dominated", "content-focused")
            ),
            Measure("discordant", "discordant", "qk", percent=True),
        ),
    ),
    Finding(
        "axes",
        lambda claims: claims.axes.headline,
        "PC0 is where queries and keys vary most; axis a is where their position drift is. Which class follows "
        "position more closely can differ between the two.",
        "Axis a is fitted to the position covariance, so a correlation along it is high by construction; compare it "
        "between classes and runs, not with 0.",
        ("qk-pca/03_layer_heatmap_rq", "qk-pca/04_layer_heatmap_rk", "qk-rotation/02_rq_rk_drift_bars"),
        (
            Measure("r_q", "r_q on PC0", "qk"),
            Measure("r_k", "r_k on PC0, signed", "qk"),
            Measure("abs_r_k", "|r_k| on PC0", "qk"),
            Measure("r_q_a", "r_q on a", "rotated"),
            Measure("r_k_a", "r_k on a", "rotated"),
        ),
        lambda claims: details(claims.axes_order),
        menu="Queries and keys along the drift",
    ),
    Finding(
        "bias",
        "Recency bias",
        "bias_strength = mu_q_a · alpha_k is what one more token of lateness adds to the score of a key for the "
        "average query, in the plane of a and b. Positive means that later keys score higher.",
        "The average runs over all pairs of positions, also those a causal mask hides, so a head that decays evenly "
        "with distance scores about 0. No slope of a line can be compared across windows, neither per token nor per "
        "window: the score falls about as the logarithm of the distance, and a line through a logarithm depends on how "
        "much of it one looks at. decay, the fall per doubling of the distance, can. bias_full is the line in all "
        "dimensions, of which bias_strength is the part on axis a; bias_causal is the slope within queries over the "
        "keys before them, most of whose weight is on late queries.",
        ("qk-rotation/04_bias_strength", "qk-rotation/05_slope_ratio", "qk-rotation/06_layer_heatmaps"),
        (
            Measure("decay", "decay: logits per doubling", "heads"),
            Measure("decay_measured", "decay, measured", "heads"),
            Measure("decays", "share that favours near keys", "heads", percent=True),
            Measure("positive", "share positive", "rotated", percent=True),
            Measure("bias_strength", "per token", "rotated"),
            Measure("bias_window", "per window", "rotated"),
            Measure("bias_full_window", "per window, all dimensions", "rotated"),
            Measure("bias_causal_window", "per window, causal pairs", "rotated"),
        ),
        lambda claims: details(claims.recency, claims.published_line),
    ),
    Finding(
        "windows",
        "The same weights at several windows",
        "One model, captured at several windows: whatever moves here moves because of the window alone.",
        "Correlations, classes, slopes and shares of a run describe the head and the window it was looked at with. Two "
        "comparisons between windows are fair: the same window for every run, and decay.",
        ("audit/02_same_weights",),
        (),
        lambda claims: same_weights_lines(claims.same_weights),
    ),
    Finding(
        "plane",
        "The plane of drift and separation",
        "The drift axis a and the separation axis b span a plane. Were all directions alike, it would hold 2/d of the "
        "pooled variance.",
        "The pooled variance counts the distance between queries and keys, which axis b is chosen to hold.",
        ("qk-rotation/01_ab_plane_collage", "qk-rotation/03_variance_decomposition"),
        (
            Measure("plane_var_fraction", "in the plane", "rotated", percent=True),
            Measure("separation_strength", "separation_strength", "rotated", percent=True),
        ),
    ),
    Finding(
        "complement",
        "What turns with position in the rest",
        "Over queries and keys pooled no direction off a drifts with position, by construction; pairs of directions "
        "turn with it: the rings that rotary encoding makes.",
        "A plane counts as active when its rotation is coherent over documents beyond 99% of structureless planes on "
        "the same tokens, however little of it turns: significance, not size. turning_share is the size. The published "
        "count rests on another criterion. Within a class, drifts that cancel in the pool remain.",
        ("qk-rotation/08_complement_collage",),
        (
            Measure("active_planes", "active planes of at most 30", "heads"),
            Measure("strong_planes", "of them with |r| of 0.3 or more", "heads"),
            Measure("active_share", "variance in active planes", "heads", percent=True),
            Measure("turning_share", "variance that turns", "heads", percent=True),
            Measure("residual_r_q", "queries' drift left within the class", "rotated"),
            Measure("residual_r_k", "keys'", "rotated"),
        ),
        lambda claims: [
            *details(claims.rings, claims.residual_drift),
            *claims.published_lines(
                ("active_planes_of_30", "active planes"),
                ("active_planes_complement_variance", "share of the complement"),
            ),
        ],
    ),
    Finding(
        "planes",
        "Which RoPE planes carry the bias",
        "RoPE turns each pair of coordinates at a speed of its own. A plane that turns many times within the window "
        "cannot drift over it, and one that hardly turns drifts little unless its vectors are long.",
        "Parts of planes add up to bias_full, in all dimensions, not to bias_strength, its part on axis a.",
        ("rope/01_plane_spectrum",),
    ),
    Finding(
        "distance",
        lambda claims: claims.distance.headline,
        "Undo the rotation, average queries and keys, and rotate back: that predicts the mean score at every distance. "
        "The linear drift in the plane of a and b is its first-order part.",
        "R² is over bins of distance, equally weighted. A straight line over log distance with two free parameters "
        "reaches the R² in the third column: so much the shape alone can give; the largest error says how far off the "
        "prediction is. What is left, measured − predicted, is how far the contents of tokens at that distance agree. "
        "Over single pairs position explains the share in the last column. Heads without rotary encoding have no such "
        "curve.",
        ("distance/01_distance_curves", "distance/02_curves_by_depth"),
        (
            Measure("distance_r2", "R² of the curve", "heads"),
            Measure("distance_r2_pairs", "weighted by pairs", "heads"),
            Measure("distance_log_r2", "R² of a line over log distance", "heads"),
            Measure("distance_worst", "largest error (logits)", "heads"),
            Measure("content_offset", "measured − predicted (logits)", "heads"),
            Measure("position_share_of_score", "explained over single pairs", "heads", percent=True),
        ),
        lambda claims: details(claims.distance),
        menu="The distance curve",
    ),
    Finding(
        "score",
        "What scores are made of, and what heads do with them",
        "A score is exactly the sum of four terms: where query and key are, which key it is, which query it is, and "
        "this query with this key. Attention beyond a window is measured on queries followed through the model, and "
        "predicted from means alone. The role of a head is what it does with its attention: look for an "
        "earlier copy of the current token (induction), look at the token before, rest on the first tokens.",
        "Parts of the variance of scores over pairs, sinks apart, sum to 1. A term that varies little can still matter "
        "to the prediction, and one that varies much need not: that is a question of cause. Predicted reach knows "
        "means alone; attention also follows content.",
        ("cause/01_score_terms", "cause/06_roles", "cause/04_reach"),
        (
            Measure("part_position", "position", "heads", percent=True),
            Measure("part_key", "key", "heads", percent=True),
            Measure("part_query", "query", "heads", percent=True),
            Measure("part_content", "content", "heads", percent=True),
            Measure("mass_sink", "attention on sinks", "heads", percent=True),
            Measure("previous", "on the token before", "heads", percent=True),
            Measure("induction", "on the token after an earlier copy", "heads", percent=True),
            Measure("reach90", "90% of attention within (tokens)", "heads"),
        ),
    ),
    Finding(
        "cause",
        "What the prediction loses: cause and decision",
        "A term of a head's scores can be taken away while the model runs, and key heads can be cut to a window. "
        "qkscope effects and qkscope reach --measure write the tables this section is drawn from.",
        "Estimates are half of the Fisher information, an extrapolation to a change as large as taking a whole term "
        "away; how far it holds is said where it was measured. Costs are on the texts given. A cut that is cheap on "
        "plain text can lose what copying needs, so both are shown.",
        ("cause/02_effects", "cause/03_descriptions", "cause/05_cut_cost"),
    ),
    Finding(
        "plasticity",
        "Which keys win: fixed, or up to the query",
        "Of two earlier keys one scores higher. Over the queries at one place of the window that can be the same one "
        "always, or depend on the query: plasticity is 4p(1 − p) for the probability p that a query prefers the later "
        "one, averaged over pairs of keys.",
        "The published number, ap_overall, depends on the width of the position buckets, which follows the window: "
        "within a bucket RoPE turns queries, and that counts as variety, so heads that follow position alone can be "
        "highest. ap_fixed_overall turns queries to one place first; it is the plasticity meant on this page. The "
        "published model of queries keeps variances and drops covariances, which takes correlated coordinates for "
        "independent votes.",
        (
            "plasticity/01_profile",
            "plasticity/02_pair_heatmap",
            "plasticity/03_by_taxonomy",
            "plasticity/04_ap_drop_by_depth",
            "plasticity/05_over_training",
        ),
        (
            Measure("ap_fixed_overall", "over the window", "heads"),
            Measure("ap_overall", "as published (ap_overall)", "heads"),
            Measure("ap_first20", "as published, first fifth", "heads"),
            Measure("ap_last20", "as published, last fifth", "heads"),
            Measure("ap_drop", "as published, drop", "heads"),
        ),
    ),
    Finding(
        "context",
        "Effective context, in one row per run",
        "Positional overhead, the share of the variance of queries and keys that is a linear function of position, is "
        "the scalar that the published study proposes for how much of a head is left for content. Beside it stand the "
        "part of position in single scores, plasticity, and the bias over the window.",
        "None of these is a benchmark of long-context behaviour. Overhead is a share of variance, not of the score; "
        "a small share can still decide which key wins. The same numbers, with medians and counts, are in runs.csv.",
        (),
        (
            Measure("positional_overhead", "positional overhead", "heads", percent=True),
            Measure("part_position", "position's part of what varies in scores", "heads", percent=True),
            Measure("ap_fixed_overall", "plasticity", "heads"),
            Measure("bias_causal_window", "causal bias per window", "rotated"),
            Measure("distance_r2", "R² of the distance curve", "heads"),
        ),
    ),
    Finding(
        "simpson",
        "Bias and separation: family by family",
        "Over heads of several families pooled, bias and separation can go together one way, and within a family the "
        "other.",
        "A pooled correlation always stands beside those within families. Per-token bias mixes windows where they "
        "differ.",
        ("qk-rotation/07_bias_vs_separation",),
        (),
        lambda claims: claims.family_lines(),
    ),
    Finding(
        "training",
        "What changes over training",
        "The same measures at ordered checkpoints, in the phases that the study names.",
        "Runs of different windows are compared at one window. Figures at each run's own window mix what training "
        "changed with what the window changes. Signed r_k stands beside |r_k|.",
        (
            "qk-pca/07_position_signal",
            "qk-pca/08_taxonomy_evolution",
            "qk-pca/09_explained_variance_over_training",
            "qk-pca/10_checkpoint_heatmap_rq",
            "qk-pca/11_checkpoint_heatmap_rk",
            "qk-pca/12_phase_portraits",
            "qk-rotation/09_training_trajectory",
            "qk-rotation/10_bias_decomposition",
        ),
        (),
        lambda claims: claims.training_lines(),
    ),
)
