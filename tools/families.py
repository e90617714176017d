"""Every causal language model and masked encoder of the installed transformers, tiny and random, through a capture.

python -m tools.families [NAME …] [--write]    # about ten minutes on two cores; --write writes docs/models.md

A model is built from its config class with everything small. Then: the gate, a capture, and a check of the rotation: on
a text of one token over and over, queries and keys with the rotation undone must be the same at every position.
Nothing is known here about any architecture; what cannot be built small this way is listed as such.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
TOKENS, WINDOW = 120, 128
LARGEST = 40_000_000
"""Parameters of a model that is still tiny."""
UNDONE = 1e-3
"""Largest difference between positions once the rotation is undone, relative to the vectors (half precision)."""

SMALL: dict[str, Any] = {
    r"hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|width|model_dim|hidden_dim": 64,
    r"intermediate_size.*|ffn_dim|n_inner|.*_ffn_dim|ffn_hidden_size|d_ff|dim_ff|.*shared.*intermediate_size": 96,
    r"num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|n_layer": 4,
    r"num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads|attention_heads": 4,
    r"num_key_value_heads|num_kv_heads|n_kv_heads": 2,
    r"head_dim|kv_channels|attention_head_dim|global_head_dim|d_kv": 16,
    r"vocab_size.*": 96,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len": 512,
    r"moe_intermediate_size|expert_ffn_hidden_size|.*expert.*intermediate_size|expert_dim": 32,
    r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|n_experts|num_routed_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_selected_experts|moe_router_topk": 2,
    r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group": 1,
    r"zero_expert_num": 2,
    r"q_lora_rank|kv_lora_rank|o_lora_rank": 24,
    r"qk_rope_head_dim": 8,
    r"qk_nope_head_dim|v_head_dim": 16,
    r"qk_head_dim": 24,
    r"index_n_heads": 4,
    r"index_head_dim": 16,
    r"index_topk": 4096,
    r"sliding_window|local_attention|attention_window_size|sliding_window_size": 32,
    r"attention_chunk_size|chunk_size": 64,
    r"hidden_size_per_layer_input|laurel_rank": 16,
    r"first_k_dense_replace|moe_layer_start_index": 1,
    r"num_kv_shared_layers|num_nextn_predict_layers|mtp_num_hidden_layers": 0,
    r"mamba_d_state|mamba_d_conv|ssm_state_size|mamba_dt_rank": 16,
    r"mamba_n_heads|mamba_num_heads|n_mamba_heads": 4,
    r"mamba_d_head|mamba_head_dim": 32,
    r"mamba_n_groups|n_groups|expand": 1,
    r"mamba_d_ssm": 128,
    r"rotary_dim": 8,
    r"lru_width": 64,
    r"attn_layer_indices": [1, 3],
    r"attn_layer_period": 2,
    r"attn_layer_offset": 1,
    r"linear_num_key_heads|linear_num_value_heads|linear_num_heads": 4,
    r"linear_key_head_dim|linear_value_head_dim|linear_head_dim": 16,
    r"pad_token_id": 0,
    r"bos_token_id|decoder_start_token_id|forced_bos_token_id": 1,
    r"eos_token_id|sep_token_id|forced_eos_token_id": 2,
    r"type_vocab_size": 2,
    r"block_size": 16,
    r".*dropout.*|.*_pdrop|layerdrop": 0.0,
}
"""What a setting whose name matches is set to."""
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "head_dim": None},
    {"head_dim": None},
    {"head_dim": 16},
    {"head_dim": 16, "num_key_value_heads": 4},
    {"head_dim": 8, "num_key_value_heads": 4},
    {"num_experts_per_tok": 1},
    {"num_hidden_layers": 8},
    {"num_hidden_layers": 8, "num_key_value_heads": 4},
    {"qk_rope_head_dim": 16, "num_key_value_heads": 4},
    {"layer_types": ["sliding_attention", "full_attention"] * 2},
    {"layer_types": ["conv", "full_attention"] * 2},
    {"layers_block_type": ["mamba", "hybrid"] * 2},
    {"attention_types": [[["global", "local"], 2]]},
    {"default_language": "en_XX"},
)
"""Settings that are tried in turn, until a model runs."""


class ListedElsewhere(Exception):
    """The config is of a model that has the one in question inside."""


@dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    name: str
    kind: str
    """supported, partly, refused, not built, failed."""
    why: str = ""
    layers: int = 0
    captured: int = 0
    rotary: int = 0
    """Layers with rotary encoding."""
    undone: float | None = None
    """Largest difference between positions once the rotation is undone."""


def small_config(config_class: type, other: dict[str, Any], *, fill: bool = False) -> Any:
    """A config with every setting small.

    Settings without a value, which are often derived from others, are left to the class or, if ``fill``, given one.
    """
    default = config_class()
    if hasattr(default, "text_config"):
        raise ListedElsewhere("its text model is listed under its own name")
    chosen = {}
    for name, value in vars(default).items():
        rule = next((small for pattern, small in SMALL.items() if re.fullmatch(pattern, name)), None)
        if isinstance(rule, list):
            chosen[name] = rule
        elif rule is not None and (value is None or isinstance(value, int | float)) and not isinstance(value, bool):
            chosen[name] = rule if fill or value is not None or name.endswith("token_id") else None
    chosen |= {name: value for name, value in other.items() if name in chosen or name in vars(default)}
    return config_class(**{name: value for name, value in chosen.items() if value is not None})


def built(name: str, *, encoder: bool = False) -> Any:
    """A tiny model of random weights that runs; variants are tried in order."""
    first = None
    for fill, other in product((False, True), OTHERS):
        try:
            return _built(name, encoder, other, fill=fill)
        except ListedElsewhere:
            raise
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _built(name: str, encoder: bool, other: dict[str, Any], *, fill: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[name], other, fill=fill)
    if not encoder and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    make = AutoModelForMaskedLM if encoder else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} M parameters with everything small")
    model = make.from_config(config).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if label.endswith("bias") or "norm" in label:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model(torch.arange(3, 35)[None], use_cache=False)
    return model


def tried(name: str, *, encoder: bool = False) -> Outcome:
    """Build one model, capture it, check its rotation."""
    from qkscope.errors import QkscopeError

    try:
        model = built(name, encoder=encoder)
    except Exception as error:
        return Outcome(name, "not built", _line(error))
    try:
        with tempfile.TemporaryDirectory() as folder:
            return captured(name, model, Path(folder) / "run")
    except QkscopeError as error:
        return Outcome(name, "refused", _line(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        return Outcome(name, "failed", f"{type(error).__name__}: {_line(error)} ({place})")


def captured(name: str, model: Any, folder: Path) -> Outcome:
    """Capture a model into a folder, and check its rotation."""
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.passage import Passage
    from qkscope.capture.run import capture
    from qkscope.capture.texts import Document
    from qkscope.files.runfolder import RunFolder

    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 90, TOKENS) for _ in range(3)]
    documents = [Document(f"d{i}", f"text {i}") for i in range(3)]
    passage = Passage(np.full(48, 7), tuple("a" * 48))
    capture(model, documents, ids, folder, CaptureOptions(window=WINDOW, sample=64), {"id": name}, passage=passage)
    layers = RunFolder.open(folder).manifest["layers"]
    in_all = _layers(model)
    rotary = sum(layer["rope"] is not None for layer in layers)
    error = undone_error(folder)
    few = len(layers) < in_all
    why = f"{len(layers)} of its {in_all} layers have softmax attention" if few else ""
    if error is not None and error > UNDONE:
        why = f"its keys are changed after the rotation: undoing it leaves {error:.2g} of them, so means predict less"
        return Outcome(name, "partly", why, in_all, len(layers), rotary, error)
    return Outcome(name, "partly" if few else "supported", why, in_all, len(layers), rotary, error)


def undone_error(folder: Path) -> float | None:
    """How far keys of layer 0 differ between positions once the rotation is undone, on a text of one token.

    None if it does not rotate; what later layers get can depend on the position in other ways.
    """
    from qkscope.runs.run import open_run
    from qkscope.runs.source import Reading

    source = open_run(folder).source
    (data,), _ = source.load([source.query_heads[0]], Reading(passage=True, rotary=True))
    if data.head.layer != 0 or data.rotary is None or data.passage is None:
        return None
    undone = data.rotary.rope.unrotated(data.passage.k, np.arange(len(data.passage.tokens)))
    return float(np.abs(undone - undone[0]).max() / np.abs(undone).max())


def _layers(model: Any) -> int:
    from qkscope.capture.attention import backbone

    config = backbone(model).config
    names = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    return int(next((getattr(config, name) for name in names if getattr(config, name, None)), 0))


def _line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:200] or type(error).__name__


def names() -> tuple[list[str], list[str]]:
    """Model types of causal language models, and of masked encoders that are not among them."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    causal = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    return causal, [name for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name not in causal]


def page(outcomes: Iterable[Outcome]) -> str:
    """docs/models.md."""
    found = sorted(outcomes, key=lambda outcome: outcome.name)
    groups = {
        kind: [o for o in found if o.kind == kind] for kind in ("supported", "partly", "refused", "not built", "failed")
    }
    version = importlib.metadata.version("transformers")
    lines = [
        "# Models",
        f"Written by `python -m tools.families --write` with transformers {version}: every causal language model and "
        "masked encoder class that it lists, built tiny with random weights, through the gate, a capture and a "
        "check of the rotation. No architecture is named in the code of qkscope.",
        f"{len(groups['supported'])} supported, {len(groups['partly'])} in part, {len(groups['refused'])} refused, "
        f"{len(groups['not built'])} not built here, {len(groups['failed'])} failed.",
        "## Supported",
        "Every layer is captured. *rotary*: layers with rotary encoding. *rotation undone*: on one "
        "token over and over, the largest difference of keys of layer 0 between positions once that is undone, "
        "relative to them; they are kept in half precision.",
        "| model type | layers | rotary | rotation undone |\n|---|---|---|---|",
    ]
    lines[-1] += "".join(_row(o) for o in groups["supported"])
    lines += ["## In part", "| model type | captured | rotary | rotation undone | why in part |\n|---|---|---|---|---|"]
    lines[-1] += "".join(
        f"\n| `{o.name}` | {o.captured} of {o.layers} | {o.rotary} | {_error(o)} | {_cell(o.why)} |"
        for o in groups["partly"]
    )
    for title, kind in (("Refused", "refused"), ("Not built here", "not built"), ("Failed", "failed")):
        if groups[kind]:
            lines += [f"## {title}", "| model type | why |\n|---|---|" + "".join(
                f"\n| `{o.name}` | {_cell(o.why)} |" for o in groups[kind]
            )]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    return f"\n| `{outcome.name}` | {outcome.captured} | {outcome.rotary or '–'} | {_error(outcome)} |"


def _error(outcome: Outcome) -> str:
    return "–" if outcome.undone is None else f"{outcome.undone:.0e}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _quietly(name: str, encoder: bool) -> Outcome:
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    return tried(name, encoder=encoder)


def main() -> None:
    """Try all of them, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    causal, encoders = names()
    chosen = [(name, name in encoders) for name in (given.names or [*causal, *encoders])]
    outcomes = []
    with ProcessPoolExecutor(2) as pool:
        for outcome in pool.map(_quietly, *zip(*chosen, strict=True)):
            outcomes.append(outcome)
            print(f"{outcome.kind:10} {outcome.name:28} {outcome.captured}/{outcome.layers} {outcome.why}", flush=True)
    if given.write:
        PAGE.write_text(page(outcomes))


if __name__ == "__main__":
    main()
