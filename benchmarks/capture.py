"""The cost of watching and reducing on top of the forward pass, and the accuracy of the moments.

    python -m benchmarks.capture                                            # CPU: 135M Llama shape, 2,048 tokens
    python -m benchmarks.capture --device cuda --shape 3b --dtype bfloat16 --tokens 8192 32768 131072

Random weights of a known shape, random tokens, all heads, all tokens, 16 position buckets and document groups. Both
ways are timed in turn in one process; the ratio of medians is what counts. Correctness stands beside it: moments of
one layer against float64 on the very vectors.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from qkscope.capture.options import CaptureOptions
from qkscope.capture.rope import describe_rope, embeddings
from qkscope.capture.sums.finish import layer_moments
from qkscope.capture.sums.layersums import LayerSums
from qkscope.capture.sums.reachsums import ReachSums
from qkscope.capture.sums.tokens import BatchTokens, Plan
from qkscope.capture.watch import Attention, backbone, self_attentions, watching
from qkscope.core.moments import Moments
from qkscope.core.reach import query_positions
from qkscope.core.rope import Rope

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def build(shape: str, device: str, dtype: torch.dtype, tokens: int) -> tf.PreTrainedModel:
    config = tf.LlamaConfig(**SHAPES[shape], vocab_size=32_000, max_position_embeddings=tokens)
    with torch.device(device):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return backbone(model.eval())


class Bench:
    """One model, one document, with and without capture."""

    def __init__(self, model: tf.PreTrainedModel, tokens: int, device: str) -> None:
        self.model, self.device = model, device
        self.plan, self.attentions = Plan(tokens, 16, 4), self_attentions(model)
        self.ids = torch.randint(0, 32_000, (1, tokens), device=device)
        queries = query_positions(tokens, CaptureOptions().reach_queries, self.plan.skip_first)
        self.tokens = BatchTokens(0, np.array([tokens]), np.array([3]), [np.arange(0)], [queries])
        seen: list[Attention] = []
        few = min(tokens, 256)
        with torch.no_grad(), watching(model, seen.append):
            self.model(self.ids[:, :few], use_cache=False)
        found = embeddings(model)
        at = torch.arange(few, device=device)
        self.ropes = {call.layer: describe_rope(call, at, found, tokens) for call in seen}
        self.angles = found[0].angles(torch.arange(tokens, device=device))
        self.sums: dict[int, LayerSums] = {}

    def plain(self) -> None:
        with torch.no_grad():
            self.model(self.ids, use_cache=False)

    def start(self) -> None:
        heads = tuple(range(int(self.model.config.num_attention_heads)))
        self.sums = {
            layer: LayerSums(self.plan, rope, reach=ReachSums(self.plan, heads)) for layer, rope in self.ropes.items()
        }

    def captured(self) -> None:
        def add(seen: Attention) -> None:
            self.sums[seen.layer].add(seen, self.tokens, self.angles)

        with torch.no_grad(), watching(self.model, add, modules=self.attentions):
            self.model(self.ids, use_cache=False)

    def error(self) -> float:
        """Largest relative error of one layer's moments against float64 on the same vectors.

        Scatter of queries by group and in one bucket and of keys, as a share of the spread; and means with the rotation
        undone, as a share of the mean length of vectors.
        """
        last: list[Attention] = []
        self.start()

        def add(seen: Attention) -> None:
            self.sums[seen.layer].add(seen, self.tokens, self.angles)
            if seen.layer == 2:
                last.append(seen)

        with torch.no_grad(), watching(self.model, add):
            self.model(self.ids, use_cache=False)
        found, rope = layer_moments(self.sums[2]), self.ropes[2]
        assert rope is not None
        q, k = (x[0, 1, 4:].double().cpu().numpy() for x in (last[0].q, last[0].k))
        t = np.arange(4, 4 + len(q))
        inside = t // self.plan.width == 3
        worst = [
            _apart(found.q[1].merged(), Moments.from_rows(q, t)),
            _apart(found.k[1].merged(), Moments.from_rows(k, t)),
            _apart(found.q_buckets[1, 3], Moments.from_rows(q[inside], t[inside])),
        ]
        turned = Rope(np.array(rope.frequencies), rope.layout, rope.start, rope.sign).unrotated(q, t)
        mean = found.unrotated_q[1].sum(0) / len(q)
        worst.append(np.abs(mean[:, 0] + 1j * mean[:, 1] - turned.mean(0)).max() / np.abs(turned).mean())
        return float(max(worst))

    def timed(self, way: Any) -> float:
        self.synchronize()
        start = time.perf_counter()
        way()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def _apart(got: Moments, exact: Moments) -> float:
    spread = np.sqrt(np.diag(exact.scatter))
    return float(np.abs((got.scatter - exact.scatter) / np.outer(spread, spread)).max())


def measure(model: tf.PreTrainedModel, tokens: int, device: str, repeats: int) -> dict[str, float]:
    bench = Bench(model, tokens, device)
    error = bench.error()
    bench.start()
    for way in (bench.plain, bench.captured):
        way()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        bench.sums = {}
        bench.plain()
        base = torch.cuda.max_memory_allocated()
        bench.start()
        torch.cuda.reset_peak_memory_stats()
        bench.captured()
        extra = (torch.cuda.max_memory_allocated() - base) / 2**30
    else:
        extra = float("nan")
    plain, captured = [], []
    for _ in range(repeats):
        plain.append(bench.timed(bench.plain))
        captured.append(bench.timed(bench.captured))
    a, b = statistics.median(plain), statistics.median(captured)
    return {"tokens": tokens, "plain_s": a, "captured_s": b, "ratio": b / a, "extra_gib": extra, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = build(given.shape, given.device, getattr(torch, given.dtype), max(given.tokens))
    where = (
        torch.cuda.get_device_name()
        if given.device != "cpu"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{given.shape} Llama shape, {given.dtype}, {where}, torch {torch.__version__}", flush=True)
    print(f"{'tokens':>8}{'plain s':>10}{'captured s':>12}{'ratio':>8}{'extra GiB':>11}{'rel. error':>12}", flush=True)
    rows = []
    for tokens in given.tokens:
        row = measure(model, tokens, given.device, given.repeats)
        rows.append(row)
        print(
            f"{tokens:>8}{row['plain_s']:>10.3f}{row['captured_s']:>12.3f}{row['ratio']:>8.3f}"
            f"{row['extra_gib']:>11.2f}{row['error']:>12.1e}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
