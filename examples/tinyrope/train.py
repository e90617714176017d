"""Train tinyrope: a small language model, extended twice to a longer context, with ten checkpoints on the way.

    python examples/tinyrope/train.py --data examples/tinyrope/data --output tinyrope [--nope]
    qkscope report tinyrope/qkscope/study.yaml                         # what was measured while it trained

One GPU, about four minutes. The model is an ordinary transformers class (Llama; SmolLM3 with --nope, which leaves every
fourth layer without rotary encoding), so that a capture sees what it would see of any other. Each phase starts from the
last weights with its own context length and rope_theta.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from qkscope.integrations import TrainingStudy

SHAPE = {
    "vocab_size": 2048, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
TOKENS_PER_STEP = 131_072
EVALUATED = 4096
"""Every phase's model is evaluated at its own context and at this one."""
MEASURED = 8
"""Held-out documents on which heads are measured while it trains."""
SMOOTH = 50
"""Steps that a logged loss averages over."""


@dataclass(frozen=True)
class Phase:
    """A part of training: context length, rotary base, steps, learning rate, and the steps that are kept."""

    name: str
    context: int
    rope_theta: float
    steps: int
    rate: float
    keep: tuple[int, ...]


PHASES = (
    Phase("pretrain", 1024, 1e4, 3000, 3e-3, (1, 20, 100, 400, 1000, 3000)),
    Phase("extend-4k", 4096, 2e5, 500, 1e-3, (50, 500)),
    Phase("extend-8k", 8192, 1e6, 300, 7e-4, (50, 300)),
)


def main() -> None:
    """All phases, their checkpoints, the losses, and the held-out loss by position."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nope", action="store_true", help="SmolLM3: every fourth layer without rotary encoding.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--every", type=int, default=100, help="Steps between measurements of all heads.")
    parser.add_argument("--max-share", type=float, default=0.05, help="Share of the time that they may take.")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    stream = load(options.data / "train.npz", options.device)
    held_out = np.load(options.data / "held_out.npz")
    losses, positions, weights, done = [], {}, None, 0
    started = time.monotonic()
    for phase in PHASES:
        model = build(phase, options.nope, options.device)
        if weights is not None:
            model.load_state_dict(weights)
        else:
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
        study = TrainingStudy(
            options.output / "qkscope", documents(held_out, phase.context)[:MEASURED], every=options.every,
            window=phase.context, max_share=options.max_share, title="tinyrope, while it trains", phase=phase.name,
        )  # fmt: skip
        losses += run(phase, model, stream, options.output, options.seed, started, study, done)
        weights, done = model.state_dict(), done + phase.steps
        for context in sorted({phase.context, EVALUATED}):
            by_position = loss_by_position(model, held_out, context, options.device)
            positions[f"{phase.name} at {context}"] = by_position
            print(f"{phase.name}, held out at {context}: {np.mean(by_position):.4f}")
    with (options.output / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([("phase", "step", "loss"), *losses])
    record = {
        "seed": options.seed, "nope": options.nope, "phases": [asdict(phase) for phase in PHASES], "shape": SHAPE,
        "tokens_per_step": TOKENS_PER_STEP, "held_out_loss_by_position": positions, "unigram_loss": unigram(held_out),
        "seconds": round(time.monotonic() - started), "device": device_name(options.device), "torch": torch.__version__,
    }  # fmt: skip
    (options.output / "record.json").write_text(json.dumps(record, indent=1) + "\n")


def build(phase: Phase, nope: bool, device: str) -> PreTrainedModel:
    """The model with this phase's context and rotary base."""
    settings = SHAPE | {"max_position_embeddings": phase.context}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": phase.rope_theta}
    if nope:
        config = SmolLM3Config(**settings, no_rope_layer_interval=4, use_sliding_window=False)
        return SmolLM3ForCausalLM(config).to(device)
    return LlamaForCausalLM(LlamaConfig(**settings)).to(device)


def run(
    phase: Phase,
    model: PreTrainedModel,
    stream: Tensor,
    output: Path,
    seed: int,
    started: float,
    study: TrainingStudy,
    done: int,
) -> list[tuple[str, int, float]]:
    """Train one phase, after ``done`` steps of others, and measure its heads; returns the smoothed losses."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=phase.rate, betas=(0.9, 0.95), fused=stream.is_cuda)
    # One generator per phase: a phase draws the same windows whatever came before it.
    generator = torch.Generator().manual_seed(seed * 1000 + phase.context)
    recent, logged = [], []
    for step in range(1, phase.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = phase.rate * schedule(step, phase.steps)
        loss = loss_of(model, windows(stream, phase.context, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        if step % SMOOTH == 0 or step == phase.steps:
            logged.append((phase.name, step, round(torch.stack(recent).mean().item(), 4)))
            recent.clear()
        if step % 250 == 0:
            print(f"{phase.name} {step}: {logged[-1][2]:.4f}, {time.monotonic() - started:.0f} s", flush=True)
        if step in phase.keep:
            save(model, output / f"{phase.name}-step-{step:04d}")
        study.at(done + step, model)
    study.close(done + phase.steps, model)
    return logged


def schedule(step: int, steps: int) -> float:
    """Up over the first 5% (at most 100 steps), level, down to a tenth over the last 30%."""
    up, down = min(1.0, step / min(100, 0.05 * steps)), min(1.0, (steps - step) / (0.3 * steps))
    return up * (0.1 + 0.9 * down)


def windows(stream: Tensor, context: int, generator: torch.Generator) -> Tensor:
    """A batch of windows from anywhere in the stream, of TOKENS_PER_STEP tokens in all."""
    starts = torch.randint(len(stream) - context - 1, (TOKENS_PER_STEP // context,), generator=generator)
    at = starts.to(stream.device)[:, None] + torch.arange(context + 1, device=stream.device)
    return stream[at].long()


def loss_of(model: PreTrainedModel, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of each next token, in nats."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def loss_by_position(model: PreTrainedModel, held_out: np.lib.npyio.NpzFile, context: int, device: str) -> list[float]:
    """Mean held-out loss in 16 parts of the window, over the documents that are long enough."""
    batch = torch.tensor(np.stack(documents(held_out, context)), device=device)
    per_token = torch.cat([loss_of(model, part, "none").view(len(part), context) for part in batch.split(8)])
    return [round(x, 4) for x in per_token.view(len(batch), 16, context // 16).mean((0, 2)).tolist()]


def documents(held_out: np.lib.npyio.NpzFile, context: int) -> list[np.ndarray]:
    """The first tokens of each held-out document that is longer than a context: so many, and the next."""
    tokens, starts = held_out["tokens"].astype(np.int64), held_out["starts"]
    lengths = np.diff([*starts, len(tokens)])
    return [tokens[s : s + context + 1] for s, length in zip(starts, lengths, strict=True) if length > context]


def unigram(held_out: np.lib.npyio.NpzFile) -> float:
    """Held-out loss of the best model that ignores its context."""
    share = np.bincount(held_out["tokens"]) / len(held_out["tokens"])
    share = share[share > 0]
    return round(float(-(share * np.log(share)).sum()), 4)


def save(model: PreTrainedModel, folder: Path) -> None:
    """The weights in bfloat16, as safetensors."""
    kept = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}  # tied
    state = {name: value.to(torch.bfloat16) for name, value in kept.items()}
    model.save_pretrained(folder, state_dict=state)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def load(path: Path, device: str) -> Tensor:
    """The training stream, on the device."""
    return torch.tensor(np.load(path)["tokens"].astype(np.int16), device=device)


def device_name(device: str) -> str:
    """What it ran on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else device


if __name__ == "__main__":
    main()
