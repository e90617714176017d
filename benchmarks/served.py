"""Compare a capture by transformers with one inside vLLM: differences of moments, loss and two columns.

    make vllm                                                                     # installs vLLM into .venv-vllm
    PYTHONPATH=src .venv-vllm/bin/python -m benchmarks.served MODEL TEXTS [--window 512]

MODEL is a folder with a tokenizer, TEXTS are text files, one document each; both in float32.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

import qkscope
from benchmarks.whole import apart
from qkscope.files.runfolder import RunFolder
from qkscope.runs.run import Run


def alone(model: str, texts: list[str], window: int) -> Run:
    """Capture with transformers, before vLLM changes classes of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    return qkscope.capture_model(loaded, texts, AutoTokenizer.from_pretrained(model), window=window)


def served(model: str, texts: list[str], window: int) -> Run:
    """Capture inside vLLM, four documents at a time."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    import vllm

    from qkscope.capture.options import CaptureOptions
    from qkscope.integrations import capture_vllm

    llm = vllm.LLM(
        model, model_impl="transformers", enforce_eager=True, enable_prefix_caching=False, dtype="float32",
        max_model_len=window + 1, max_num_batched_tokens=4 * window,
    )  # fmt: skip
    return capture_vllm(llm, texts, window=window, options=CaptureOptions(batch=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--window", type=int, default=512)
    given = parser.parse_args()
    texts = [path.read_text() for path in given.texts]
    runs = [capture(given.model, texts, given.window) for capture in (alone, served)]
    folders = [RunFolder.open(Path(str(run.source))) for run in runs]
    print(f"moments differ by at most {apart(*(folder.folder for folder in folders)):.1e} of the spread")
    losses = [folder.raw["loss"]["mean"] for folder in folders]
    print(f"mean loss {losses[0]:.6f} by itself, {losses[1]:.6f} inside vLLM")
    tables = [qkscope.position(run) for run in runs]
    for column in ("decay", "position_share_q", "position_share_k"):
        print(f"{column} differs by at most {np.nanmax(np.abs(tables[0][column] - tables[1][column])):.1e}")


if __name__ == "__main__":
    main()
