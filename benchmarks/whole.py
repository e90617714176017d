"""A whole capture beside its forward passes alone: everything from a loaded model to a run on disk.

    python -m benchmarks.whole                                         # CPU, 135M shape, 16 documents of 2,048 tokens
    python -m benchmarks.whole --device cuda --sizes 16x8192 512x512   # one GPU, Llama-3.2-3B shape
    python -m benchmarks.whole --device cuda --per-shard 8             # in shards: what merging costs and changes
    python -m benchmarks.whole --by-length --figure by-length.png      # time per token for documents of all lengths
    python -m benchmarks.whole --steps                                 # and when each step began, and what it took

Plain passes come before and after the capture, and the ratio is to their mean; they read as many documents at once as
the capture does. The reduction kernel of a GPU is compiled while the model is made, as it is while weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from benchmarks.capture import SHAPES
from qkscope.capture import assemble as assemble_module
from qkscope.capture import measure as measure_module
from qkscope.capture import run as run_module
from qkscope.capture.corpus import Corpus
from qkscope.capture.measure import Measurement
from qkscope.capture.options import CaptureOptions, ExecutionOptions
from qkscope.capture.run import capture
from qkscope.capture.shards import documents_at_once
from qkscope.capture.sums.gramsums import warm_up
from qkscope.capture.texts import Document
from qkscope.files.runfolder import RunFolder

SHAPE = {"cpu": "135m", "cuda": "3b"}
SIZES = {"cpu": ["16x2048"], "cuda": ["16x8192", "128x8192", "128x2048", "512x512"]}
"""Documents and the tokens of each, by default."""
LENGTHS = {"cpu": (2**14, [64, 256, 1024, 4096, 8192]), "cuda": (2**18, [64, 256, 1024, 8192])}
"""Tokens in all, and lengths of documents."""


def build(device: str, tokens: int) -> tf.PreTrainedModel:
    """A model with random weights, bfloat16 on a GPU."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SHAPES[SHAPE[device]], vocab_size=32_000, max_position_embeddings=tokens)
    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        warm_up(torch.device("cuda", 0), dtype, config.head_dim)
    with torch.device(device):
        return tf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def plain(model: tf.PreTrainedModel, ids: list[np.ndarray]) -> float:
    """Seconds of the forward passes alone, with as many documents of one length in a pass as a capture takes."""
    batch = documents_at_once(len(ids[0]), model.device.type)
    _wait(model)
    start = time.perf_counter()
    with torch.no_grad():
        for first in range(0, len(ids), batch):
            together = torch.from_numpy(np.stack(ids[first : first + batch]))
            model.model(together.to(model.device), use_cache=False)
    _wait(model)
    return time.perf_counter() - start


def captured(model: tf.PreTrainedModel, ids: list[np.ndarray], folder: Path, per_shard: int | None) -> list[float]:
    """Seconds to the first document, to the last one, and to the end; on a GPU, to when their passes were started."""
    documents = [Document(f"d{number}", str(number)) for number in range(len(ids))]
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    start = time.perf_counter()
    options = CaptureOptions(window=len(ids[0]), documents_per_shard=per_shard)
    capture(model, Corpus(documents, ids), folder, options, {"id": "random"}, ExecutionOptions(on_progress=mark))
    return [mark - start for mark in (marks[0], marks[-1], time.perf_counter())]


def tell_steps() -> None:
    """Print when each step of a capture begins, and how long it takes."""
    for place, name in _STEPS:
        setattr(place, name, _told(getattr(place, name), name.removeprefix("_")))


_STEPS: list[tuple[Any, str]] = [
    (Measurement, "_look"), (Measurement, "_output_head"), (Measurement, "_report"), (Measurement, "_forward"),
    (measure_module, "kept_vectors"), (measure_module, "finished"), (run_module._Job, "_save"),
    (assemble_module, "_write_layers"), (assemble_module, "write_checksums"),
]  # fmt: skip


def _told(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        try:
            return step(*given, **named)
        finally:
            print(f"  {name:16} from {start:10.3f} s for {time.perf_counter() - start:7.3f} s", flush=True)

    return timed


def apart(one: Path, other: Path) -> float:
    """Largest difference of scatters, as a share of the spread."""
    worst = 0.0
    runs = [RunFolder.open(folder) for folder in (one, other)]
    for entry in runs[0].raw["layers"][::9]:
        a, b = (run.layer(entry["layer"]) for run in runs)
        for x, y in ((a.q, b.q), (a.k, b.k)):
            spread = np.sqrt(np.einsum("...ii->...i", y.scatter))
            scale = np.maximum(spread[..., :, None] * spread[..., None, :], 1e-30)
            worst = max(worst, float(np.abs((x.scatter - y.scatter) / scale).max()))
    return worst


def measure(device: str, sizes: list[str] | None = None, per_shard: int | None = None) -> list[dict[str, Any]]:
    """One row for each number of documents and tokens, such as 16x8192."""
    of_sizes = [tuple(map(int, size.split("x"))) for size in sizes or SIZES[device]]
    model = build(device, max(tokens for _, tokens in of_sizes))
    return [_measured(model, documents, tokens, per_shard) for documents, tokens in of_sizes]


def by_length(device: str) -> list[dict[str, Any]]:
    """The same number of tokens in documents of different lengths."""
    total, lengths = LENGTHS[device]
    model = build(device, max(lengths))
    return [_measured(model, total // length, length, None) for length in lengths]


def _measured(model: tf.PreTrainedModel, documents: int, tokens: int, per_shard: int | None) -> dict[str, Any]:
    made = np.random.default_rng(0)
    ids = [made.integers(0, 32_000, tokens) for _ in range(documents)]
    plain(model, ids[: documents_at_once(tokens, model.device.type)])
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        before = plain(model, ids)
        started = time.process_time()
        first, last, end = captured(model, ids, run, None)
        processor = time.process_time() - started
        alone = (before + plain(model, ids)) / 2
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
        row = {"documents": documents, "tokens": tokens, "plain_s": alone, "first_s": first, "last_s": last}
        row |= {"end_s": end, "ratio": end / alone, "size_mb": size / 1e6, "processor_s": processor}
        print(
            f"{documents} × {tokens:,} tokens: forward passes alone {alone:.2f} s; first document {first:.2f} s, "
            f"last {last:.2f} s, on disk {end:.2f} s ({end / alone:.2f} ×); processor {processor:.0f} s, "
            f"{size / 1e6:.0f} MB",
            flush=True,
        )
        if per_shard is not None:
            other = Path(scratch) / "shards"
            *_, in_shards = captured(model, ids, other, per_shard)
            row |= {"shards_s": in_shards, "apart": apart(other, run)}
            print(f"{per_shard} per shard: {in_shards:.1f} s; moments differ by {row['apart']:.1e}", flush=True)
    return row


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Microseconds per token of captures, of what they add, and of their passes alone, by the length of documents."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5.2, 3.4))
    lengths = [row["tokens"] for row in rows]
    for name, seconds, style in (
        ("capture, until on disk", [row["end_s"] for row in rows], "o-"),
        ("its passes alone, batched", [row["plain_s"] for row in rows], "s--"),
        ("what the capture adds", [row["end_s"] - row["plain_s"] for row in rows], "^:"),
    ):
        per_token = [1e6 * t / (row["documents"] * row["tokens"]) for t, row in zip(seconds, rows, strict=True)]
        panel.plot(lengths, per_token, style, label=name)
    panel.set(title=title, xlabel="tokens per document", ylabel="µs per token", ylim=(0, None))
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
    panel.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _wait(model: tf.PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--sizes", nargs="*", help="such as 16x8192: documents x tokens of each")
    parser.add_argument("--by-length", action="store_true")
    parser.add_argument("--per-shard", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="picture of the time per token, with --by-length")
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    if given.steps:
        tell_steps()
    rows = by_length(given.device) if given.by_length else measure(given.device, given.sizes, given.per_shard)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")
    if given.figure:
        draw(rows, f"{SHAPE[given.device]} shape, {given.device}", given.figure)


if __name__ == "__main__":
    main()
