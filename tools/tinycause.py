"""The four terms of the score and their effects through the training of the bundled family, for docs/tinyrope.md.

python -m tools.tinycause --output tinycause    # every checkpoint at a window of 1,024; about eight minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from qkscope.data.family import CHECKPOINTS, texts, tokenizer
from qkscope.headids import TERMS
from tools.tinyrope import qkscope

WINDOW, DOCUMENTS = 1024, 8


def measured(output: Path, number: int) -> pd.Series:
    """Shares of the variance of scores, and the rise of the loss without each term in all heads, of one checkpoint."""
    checkpoint, every = CHECKPOINTS[number], sorted(texts().iterdir())
    run, tables = output / checkpoint.name / "run", output / checkpoint.name / "tables"
    for folder, chosen, command in (
        (run, every[:DOCUMENTS], ["capture", checkpoint.folder]),
        (tables, every[DOCUMENTS : 2 * DOCUMENTS], ["effects", checkpoint.folder, run, "--passes", 0, "--measure", 0]),
    ):
        if not (folder / ("run.json" if command[0] == "capture" else "effects_together.csv")).exists():
            given = [argument for path in chosen for argument in ("--texts", path)]
            given += ["--tokenizer", tokenizer(), "--window", WINDOW, "--dtype", "float32", "--quiet"]
            qkscope(*command, *given, "-o", folder)
    qkscope("analyze", run, "--only", "scores", "-o", tables, "--quiet")
    shares = pd.read_csv(tables / "scores.csv")[[f"score_{term}" for term in TERMS]].mean()
    together = pd.read_csv(tables / "effects_together.csv")
    costs = together[together["over"] == "all"].set_index("change")
    ends = {
        f"without {name}": f"{costs.loc[name, 'delta_nll']:+.2f} "
        f"[{costs.loc[name, 'delta_nll_low']:.2f}, {costs.loc[name, 'delta_nll_high']:.2f}]"
        for name in (*TERMS, "drift", "control")
    }
    return pd.Series({term: f"{shares[f'score_{term}']:.0%}" for term in TERMS} | ends)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("tinycause"))
    given = parser.parse_args()
    rows = {checkpoint.name: measured(given.output, number) for number, checkpoint in enumerate(CHECKPOINTS)}
    table = pd.DataFrame(rows).T
    print("| checkpoint | " + " | ".join(table.columns) + " |\n" + "|---" * (len(table.columns) + 1) + "|")
    for name, row in table.iterrows():
        print(f"| {name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
