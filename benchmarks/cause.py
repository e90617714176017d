"""Agreement of estimates and descriptions of heads with effects of removing terms; the numbers of docs/cause.md.

    python -m benchmarks.cause EFFECTS_FOLDER [--heads RESULTS_FOLDER]

EFFECTS_FOLDER is what ``qkscope effects`` wrote, RESULTS_FOLDER has the ``heads`` table of the same run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from qkscope.analyses.acrossheads import rank_correlation
from qkscope.figures.effects import description_ranks
from qkscope.headids import TERMS
from qkscope.results.effects import interval_text

DESCRIPTIONS = (
    "curve_range", "decay", "position_share", "lock_q", "lock_k", "curve_area", "positional_overhead", "posvar_q",
    "posvar_k", "r_q", "r_k", "score_position", "score_key", "score_query", "score_content", "positional", "symbolic",
)  # fmt: skip


def of_estimates(effects: pd.DataFrame) -> list[str]:
    """Rank correlation of γ²/2·F with the measured divergence and loss, and the median ratio, by term."""
    lines = ["| term | heads | ρ with KL | ρ with ΔNLL | median of estimate / KL |", "|---|---|---|---|---|"]
    for chosen in (["random"], ["strongest", "random"]):
        for term in TERMS:
            rows = effects[(effects["term"] == term) & effects["chosen"].isin(chosen)].dropna(subset=["kl"])
            if len(rows) > 2:
                kl, nll = (rank_correlation(rows, "kl_predicted", column) for column in ("kl", "delta_nll"))
                ratio = (rows["kl_predicted"] / rows["kl"]).median()
                label = "drawn" if chosen == ["random"] else "all measured"
                lines.append(f"| {term} | {len(rows)} {label} | {_said(kl)} | {_said(nll)} | {ratio:.2f} |")
    return lines


def of_descriptions(effects: pd.DataFrame, heads: pd.DataFrame) -> list[str]:
    """Rank correlation of each description with the estimated effect of each term, over all heads."""
    lines = ["| description | " + " | ".join(TERMS) + " |", "|---" * 5 + "|"]
    for name, rows in description_ranks(heads, effects, DESCRIPTIONS).groupby("description", sort=False):
        cells = [_said(row) for row in rows.to_dict("records")]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def of_classes(effects: pd.DataFrame, heads: pd.DataFrame) -> list[str]:
    """Agreement of classes with the term whose removal changes the prediction most; heads measured in all terms."""
    kl = effects.pivot_table(index=["layer", "head"], columns="term", values="kl")[list(TERMS)].dropna()
    largest = kl.idxmax(axis=1)
    table = heads.set_index(["layer", "head"]).loc[kl.index]
    positional = dict.fromkeys(("position-dominated", "q-positional", "k-positional"), "position")
    named = {
        "`head_class`": table["head_class"].where(table["head_class"].isin(TERMS)),
        "`taxonomy_published`": table["taxonomy_published"].map(positional | {"content-focused": "content"}),
        "always position": pd.Series("position", index=table.index),
    }
    lines = ["| class | heads it names | right of these | right of all | mean over terms |", "|---|---|---|---|---|"]
    for name, answers in named.items():
        right = (answers == largest).astype(float)
        per_term = right.groupby(largest).mean().mean()
        lines.append(
            f"| {name} | {answers.notna().sum()} of {len(table)} | {right[answers.notna()].mean():.0%} | "
            f"{right.mean():.0%} | {per_term:.0%} |"
        )
    lines += ["", "| | " + " | ".join(TERMS) + " |", "|---" * 5 + "|"]
    counts = largest.value_counts()
    lines.append("| heads with this largest | " + " | ".join(str(counts.get(term, 0)) for term in TERMS) + " |")
    shares = kl.div(kl.sum(axis=1), axis=0)
    rows = pd.DataFrame({f"part_{term}": table[f"part_{term}"] for term in TERMS})
    rows = rows.join(shares.add_prefix("share_")).join(table[["model", "k_head"]]).reset_index()
    ranks = [_said(rank_correlation(rows, f"part_{term}", f"share_{term}")) for term in TERMS]
    lines.append("| ρ of part with share of divergence | " + " | ".join(ranks) + " |")
    return lines


def _said(rho: dict[str, float]) -> str:
    return f"{rho['rho']:+.2f}{interval_text(rho['rho_low'], rho['rho_high'], '+.2f')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=Path)
    given = parser.parse_args()
    effects = pd.read_csv(given.folder / "effects.csv", keep_default_na=True)
    together = pd.read_csv(given.folder / "effects_together.csv")
    for row in together[together["over"] == "all"].itertuples():
        ends = interval_text(row.delta_nll_low, row.delta_nll_high, ".3f")
        print(f"without {row.change} in {row.n_heads} heads: {row.delta_nll:+.3f} nats{ends}, KL {row.kl:.3f}")
    print("\n".join(of_estimates(effects)))
    if given.heads is not None:
        heads = pd.read_csv(given.heads / "heads.csv")
        print("\n".join([*of_descriptions(effects, heads), *of_classes(effects, heads)]))


if __name__ == "__main__":
    main()
