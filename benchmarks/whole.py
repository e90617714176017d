"""A whole capture beside its forward passes alone: everything from a loaded model to a run on disk.

    python -m benchmarks.whole                                    # CPU, 135M shape, 16 documents of 2,048 tokens
    python -m benchmarks.whole --device cuda --documents 16 128   # one GPU, Llama-3.2-3B shape, 8,192 tokens
    python -m benchmarks.whole --device cuda --per-shard 8        # the same in shards: what merging costs and changes
    python -m benchmarks.whole --steps                            # and when each step began, and what it took

Plain passes come before and after the capture, and the ratio is to their mean. The reduction kernel of a GPU is
compiled while the model is made, as it is while weights are loaded.
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
from qkscope.capture.sums.gramsums import warm_up
from qkscope.capture.texts import Document
from qkscope.files.runfolder import RunFolder

SIZES = {"cpu": ("135m", 2048, [16]), "cuda": ("3b", 8192, [16, 128])}
"""Shape, tokens per document and numbers of documents by default."""


def build(device: str, tokens: int) -> tf.PreTrainedModel:
    """A model with random weights, bfloat16 on a GPU."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SHAPES[SIZES[device][0]], vocab_size=32_000, max_position_embeddings=tokens)
    dtype = torch.float32
    if device == "cuda":
        dtype = torch.bfloat16
        warm_up(torch.device("cuda", 0), dtype, config.head_dim)
    with torch.device(device):
        return tf.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def plain(model: tf.PreTrainedModel, ids: list[np.ndarray]) -> float:
    """Seconds of the forward passes alone."""
    _wait(model)
    start = time.perf_counter()
    with torch.no_grad():
        for one in ids:
            model.model(torch.from_numpy(one)[None].to(model.device), use_cache=False)
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


def measure(
    device: str, documents: list[int] | None = None, tokens: int | None = None, per_shard: int | None = None
) -> list[dict[str, Any]]:
    """One row for each number of documents."""
    _, default_tokens, default_documents = SIZES[device]
    tokens = tokens or default_tokens
    model = build(device, tokens)
    rows = []
    for count in documents or default_documents:
        made = np.random.default_rng(0)
        ids = [made.integers(0, 32_000, tokens) for _ in range(count)]
        plain(model, ids[:1])
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch) / "run"
            before = plain(model, ids)
            first, last, end = captured(model, ids, run, None)
            alone = (before + plain(model, ids)) / 2
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            row = {"documents": count, "tokens": tokens, "plain_s": alone, "first_s": first, "last_s": last}
            row |= {"end_s": end, "ratio": end / alone, "size_mb": size / 1e6}
            print(
                f"{count} × {tokens:,} tokens: forward passes alone {alone:.1f} s; first document {first:.1f} s, last "
                f"{last:.1f} s, on disk {end:.1f} s ({end / alone:.2f} ×); {size / 1e6:.0f} MB",
                flush=True,
            )
            if per_shard is not None:
                other = Path(scratch) / "shards"
                *_, in_shards = captured(model, ids, other, per_shard)
                row |= {"shards_s": in_shards, "apart": apart(other, run)}
                print(f"{per_shard} per shard: {in_shards:.1f} s; moments differ by {row['apart']:.1e}", flush=True)
        rows.append(row)
    return rows


def _wait(model: tf.PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    parser.add_argument("--documents", type=int, nargs="*")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--per-shard", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", action="store_true")
    given = parser.parse_args()
    if given.steps:
        tell_steps()
    rows = measure(given.device, given.documents, given.tokens, given.per_shard)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
