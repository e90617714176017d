"""Cost of an estimate of all heads and terms: time of its backward passes, compared with forward passes, and memory.

    python -m benchmarks.effectcost --device cpu --tokens 512
    python -m benchmarks.effectcost --device cuda --tokens 2048

The model has the shape of SmolLM2-135M and random float32 weights; draws of one document share its forward pass.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers as tf

from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.cause.fisher import fisher_draws, frozen_weights
from qkscope.cause.lockedmodel import LockedModel

DRAWS = 4


def model_of(layers: int, device: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49_152, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).to(device).eval()


def seconds(work: Callable[[], object], device: str, repeats: int) -> tuple[float, float]:
    """Median time of one call, and the peak of GPU memory in GiB."""
    work()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else float("nan")
    return float(np.median(taken)), peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    model = model_of(given.layers, given.device)
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        ids, run = [rng.integers(10, 40_000, 64) for _ in range(8)], Path(folder) / "run"
        documents = [Document(str(n), str(n)) for n in range(8)]
        capture(model, Corpus(documents, ids), run, CaptureOptions(window=64), {"id": "random"})
        locked = LockedModel.of(model, run)
        document = torch.from_numpy(rng.integers(10, 40_000, given.tokens))[None].to(given.device)

        def plain() -> None:
            with torch.no_grad():
                model(input_ids=document, use_cache=False)

        def backward() -> None:
            with frozen_weights(model):
                inputs = model.get_input_embeddings()(document).requires_grad_()
                logits = model(inputs_embeds=inputs, use_cache=False).logits.float()
                loss = torch.nn.functional.cross_entropy(logits[0], document[0])
                torch.autograd.grad(loss, inputs)

        forward, _ = seconds(plain, given.device, given.repeats)
        both, memory = seconds(backward, given.device, given.repeats)
        estimate, more = seconds(
            lambda: fisher_draws(locked, locked.heads, document, DRAWS, 0), given.device, given.repeats
        )
    print(f"{given.device}, {given.tokens} tokens, {len(locked.heads)} heads × 4 terms, {DRAWS} draws per document")
    print(f"forward pass {forward:.3f} s; with a backward pass to its input {both / forward:.2f} × that")
    print(f"estimate: {estimate / DRAWS / forward:.2f} forward passes per draw; memory {memory:.2f} → {more:.2f} GiB")


if __name__ == "__main__":
    main()
