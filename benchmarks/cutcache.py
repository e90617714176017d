"""Cache bytes, peak memory and speed of decoding with a cut cache, compared with the whole one.

    python -m benchmarks.cutcache SmolLM2.gguf --lengths 2048 --batches 1 --new 32
    python -m benchmarks.cutcache MODEL --cuts half/cut.json,quarter/cut.json --device cuda --dtype bfloat16
    python -m benchmarks.cutcache 3B --device cuda --dtype bfloat16

MODEL is a model, or one of the shapes 135M and 3B with random weights. Without --cuts, half and three quarters of the
key heads are drawn: bytes and speed do not depend on which. The prompt is read in chunks of 4,096 tokens; then every
step reads one token of each row. Speed is that of the median step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from transformers import DynamicCache

from qkscope.capture import model as models
from qkscope.capture.options import ModelOptions
from qkscope.cause.cutcache import cut_cache
from qkscope.cause.intervene import read_cut
from qkscope.cause.lockedmodel import describe

SHAPES: dict[str, dict[str, Any]] = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49_152},
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128_256},
}  # fmt: skip
CHUNK = 4096


def loaded(name: str, device: str, dtype: str, attention: str) -> Any:
    if name not in SHAPES:
        return models.load_model(ModelOptions(name, dtype=dtype, device=device, attn=attention))
    config = tf.LlamaConfig(**SHAPES[name], max_position_embeddings=2**17, tie_word_embeddings=True)
    with torch.device(device):
        made = tf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
    return made.eval()


def drawn(model: Any, share: float, window: int) -> dict[tuple[int, int], int]:
    """A share of the key heads, drawn, each with the window."""
    heads = [(number, head) for number, layer in describe(model).items() for head in layer.key_heads]
    chosen = np.random.default_rng(0).choice(len(heads), round(share * len(heads)), replace=False)
    return {heads[i]: window for i in sorted(chosen)}


def measured(model: Any, make_cache: Callable[[], Any], ids: torch.Tensor, new: int) -> tuple[int, float, float, float]:
    """Bytes of the cache after a prompt, seconds to read it, tokens per second of decoding, and peak memory in GiB."""
    cuda = ids.is_cuda
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cache, taken, tokens = make_cache(), [], ids[:, :0]
    parts = list(ids.split(CHUNK, 1))
    with torch.no_grad():
        for number in range(len(parts) + new):
            tokens = parts[number] if number < len(parts) else tokens
            start = time.perf_counter()
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            if cuda:
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
    size = nbytes(cache)
    if hasattr(cache, "close"):
        cache.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    return size, sum(taken[:-new]), len(ids) / float(np.median(taken[-new:])), peak


def nbytes(cache: Any) -> int:
    """Bytes of the keys and values of a cache."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cuts", help="cut.json files, comma-separated")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--lengths", default="4096,16384,32768")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="sdpa")
    given = parser.parse_args()
    model = loaded(given.model, given.device, given.dtype, given.attention)
    if given.cuts:
        cuts = {path: read_cut(Path(path))[:2] for path in given.cuts.split(",")}
    else:
        cuts = {f"{share:.0%} cut": (drawn(model, share, given.window), 4) for share in (0.5, 0.75)}
    caches: dict[str, Callable[[], Any]] = {"whole": lambda: DynamicCache(config=model.config)}
    caches |= {
        name: lambda windows=windows, sinks=sinks: cut_cache(model, windows, sinks=sinks)
        for name, (windows, sinks) in cuts.items()
    }
    generator = torch.Generator().manual_seed(0)
    print("| tokens | batch | cache | MiB | of whole | prompt, s | decoding, tokens/s | of whole | peak GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for length in map(int, given.lengths.split(",")):
        for batch in map(int, given.batches.split(",")):
            ids = torch.randint(10, 40_000, (batch, length), generator=generator).to(given.device)
            whole: tuple[float, float] | None = None
            for name, make in caches.items():
                try:
                    size, prompt, speed, peak = measured(model, make, ids, given.new)
                except torch.OutOfMemoryError:
                    print(f"| {length:,} | {batch} | {name} | out of memory | | | | | |")
                    continue
                whole = whole or (size, speed)
                print(
                    f"| {length:,} | {batch} | {name} | {size / 2**20:,.1f} | {size / whole[0]:.0%} | {prompt:.2f} | "
                    f"{speed:,.1f} | {speed / whole[1]:.2f} | {peak:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
