"""Copying by each head: attention on repeated random tokens, as a list that ``qkscope reach --against`` reads.

    python -m benchmarks.retrieval MODEL -o retrieval.json

Random tokens are shown twice. Echo is a query's attention on the earlier occurrence of its own token, induction that on
the token after it; the score of a head is the sum of both, averaged over the second copy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from qkscope.capture import model as models
from qkscope.capture.gate import attention_weights
from qkscope.capture.options import ModelOptions
from qkscope.capture.watch import Attention, watching

LENGTH, TEXTS = 192, 8


def scores(model: PreTrainedModel, length: int = LENGTH, texts: int = TEXTS) -> dict[str, float]:
    """Echo plus induction of every query head."""
    embedding = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    sums: dict[tuple[int, int], float] = {}
    columns = torch.arange(length, 2 * length - 1)
    for _ in range(texts):
        half = torch.randint(10, embedding.weight.shape[0], (length,), generator=generator)

        def add(attention: Attention) -> None:
            at = columns.to(attention.q.device)
            weights = attention_weights(attention, at[None]).weights[0]
            rows = torch.arange(len(at), device=at.device)
            of_heads = weights[:, rows, at - length] + weights[:, rows, at - length + 1]
            for head, value in enumerate(of_heads.mean(-1).tolist()):
                sums[attention.layer, head] = sums.get((attention.layer, head), 0.0) + value / texts

        with torch.no_grad(), watching(model, add):
            model(torch.cat([half, half])[None].to(model.device), use_cache=False)
    return {f"{layer}-{head}": value for (layer, head), value in sorted(sums.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, default=Path("retrieval.json"))
    given = parser.parse_args()
    found = scores(models.load_model(ModelOptions(given.model, dtype="float32")))
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    best = sorted(found, key=lambda name: -found[name])[:5]
    print("strongest:", ", ".join(f"{name} {found[name]:.2f}" for name in best))


if __name__ == "__main__":
    main()
