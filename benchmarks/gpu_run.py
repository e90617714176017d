"""A whole capture on one GPU beside its forward passes alone: what keeping the sums adds to watching them.

    python -m benchmarks.gpu_run                              # 128 documents of 8,192 tokens, Llama-3.2-3B shape
    python -m benchmarks.gpu_run --documents 32 --per-shard 8

Times: to the first document, to the last one, and until the run is on disk. With --per-shard the same again in other
shards; how far its moments are from the first shows what adding up in float32 within a shard costs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers as tf

from benchmarks.capture import SHAPES
from qkscope.capture.options import CaptureOptions, ExecutionOptions, Progress
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.files.runfolder import RunFolder


def captured(
    model: tf.PreTrainedModel, ids: list[np.ndarray], folder: Path, per_shard: int | None
) -> tuple[float, float, float]:
    """Seconds to the first document, to the last one, and to the end."""
    documents = [Document(f"d{number}", str(number)) for number in range(len(ids))]
    marks: list[float] = []

    def mark(_: Progress) -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    start = time.perf_counter()
    options = CaptureOptions(window=len(ids[0]), documents_per_shard=per_shard)
    capture(model, documents, ids, folder, options, {"id": "3b"}, ExecutionOptions(on_progress=mark))
    return marks[0] - start, marks[-1] - start, time.perf_counter() - start


def apart(one: Path, other: Path) -> float:
    """Largest difference of scatters, as a share of the spread."""
    worst = 0.0
    for layer in range(0, 28, 9):
        a, b = (RunFolder.open(folder).layer(layer) for folder in (one, other))
        for x, y in ((a.q, b.q), (a.k, b.k), (a.q_buckets, b.q_buckets)):
            spread = np.sqrt(np.einsum("...ii->...i", y.scatter))
            scale = np.maximum(spread[..., :, None] * spread[..., None, :], 1e-30)
            worst = max(worst, float(np.abs((x.scatter - y.scatter) / scale).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--per-shard", type=int, nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SHAPES["3b"], vocab_size=32_000, max_position_embeddings=given.tokens)
    with torch.device("cuda"):
        model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    made = np.random.default_rng(0)
    ids = [made.integers(0, 32_000, given.tokens) for _ in range(given.documents)]
    with torch.no_grad():
        model.model(torch.from_numpy(ids[0])[None].cuda(), use_cache=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for one in ids:
            model.model(torch.from_numpy(one)[None].cuda(), use_cache=False)
        torch.cuda.synchronize()
    plain = time.perf_counter() - start
    print(f"{given.documents} × {given.tokens:,} tokens; forward passes alone {plain:.1f} s", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, per_shard in enumerate([None, *given.per_shard]):
            first, last, end = captured(model, ids, Path(scratch) / str(number), per_shard)
            row = {"per_shard": per_shard, "first_s": first, "last_s": last, "end_s": end, "plain_s": plain}
            row["apart"] = apart(Path(scratch) / str(number), Path(scratch) / "0")
            rows.append(row)
            print(
                f"{per_shard or 'default'} per shard: first document {first:.1f} s, last {last:.1f} s, "
                f"on disk {end:.1f} s; moments differ by {row['apart']:.1e}",
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps({"machine": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
