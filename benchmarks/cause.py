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
from qkscope.heads import TERMS

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


def _said(rho: dict[str, float]) -> str:
    return f"{rho['rho']:+.2f} [{rho['rho_low']:+.2f}, {rho['rho_high']:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=Path)
    given = parser.parse_args()
    effects = pd.read_csv(given.folder / "effects.csv", keep_default_na=True)
    together = pd.read_csv(given.folder / "effects_together.csv")
    for row in together[together["over"] == "all"].itertuples():
        ends = f"[{row.delta_nll_low:.3f}, {row.delta_nll_high:.3f}]"
        print(f"without {row.change} in all heads: {row.delta_nll:+.3f} nats {ends}, KL {row.kl:.3f}")
    print("\n".join(of_estimates(effects)))
    if given.heads is not None:
        print("\n".join(of_descriptions(effects, pd.read_csv(given.heads / "heads.csv"))))


if __name__ == "__main__":
    main()
