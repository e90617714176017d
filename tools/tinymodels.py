"""A tiny model of random weights of any class of transformers, built from its config class with everything small.

Nothing is known here about any architecture: settings are set by their names, and a few variants are tried in turn.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

LARGEST = 40_000_000
"""Parameters of a model that is still tiny."""
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
"""Values of settings whose name matches."""
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
    """The config belongs to a model that contains the model in question."""


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
