"""Tiny random models of every family that capture supports, and what their attention should look like."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")  # without it, modules that import this one are skipped
tf = pytest.importorskip("transformers")
nn = torch.nn

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """A config, and what to expect of it."""

    config: Any
    layout: str = "half"
    rotated: int | None = None
    """Rotated coordinates; by default all."""
    start: int = 0
    nope: tuple[int, ...] = ()
    sliding: dict[int, int] = field(default_factory=dict)
    eager_only: bool = False


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


YARN = rope("yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LAYERS = ["sliding_attention", "full_attention"] * 2


def matrix(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """These families as test parameters; those that are not among the quick ones are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def families() -> dict[str, Family]:
    d16, every = {"head_dim": 16}, {0: 16, 1: 16, 2: 16, 3: 16}
    return {
        "llama": Family(tf.LlamaConfig(**BASE)),
        "llama wide heads": Family(tf.LlamaConfig(**BASE, head_dim=32)),
        "llama3 scaling": Family(tf.LlamaConfig(**BASE, **LLAMA3)),
        "linear scaling": Family(tf.LlamaConfig(**BASE, **rope("linear", factor=4.0))),
        "dynamic scaling": Family(tf.LlamaConfig(**BASE, **rope("dynamic", factor=4.0))),
        "yarn scaling": Family(tf.LlamaConfig(**BASE, **YARN)),
        "mistral": Family(tf.MistralConfig(**BASE, sliding_window=16), sliding=every),
        "ministral": Family(tf.MinistralConfig(**BASE, **d16, sliding_window=16), sliding=every),
        "ministral3": Family(
            tf.Ministral3Config(
                **BASE,
                **d16,
                **rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
            )
        ),
        "qwen2": Family(tf.Qwen2Config(**BASE)),
        "qwen3": Family(tf.Qwen3Config(**BASE, head_dim=32)),
        "qwen3 moe": Family(tf.Qwen3MoeConfig(**BASE, **d16, **MOE, moe_intermediate_size=32, num_experts=4)),
        "smollm3": Family(tf.SmolLM3Config(**BASE, no_rope_layers=[1, 1, 1, 0]), nope=(3,)),
        "gemma2": Family(
            tf.Gemma2Config(**BASE, **d16, sliding_window=16, query_pre_attn_scalar=16),
            sliding={0: 16, 2: 16},
            eager_only=True,
        ),
        "gemma3": Family(
            tf.Gemma3TextConfig(**BASE, **d16, sliding_window=16, query_pre_attn_scalar=16, layer_types=LAYERS),
            sliding={0: 16, 2: 16},
        ),
        "glm4": Family(tf.Glm4Config(**BASE, **d16), layout="interleaved", rotated=8),
        "phi3": Family(tf.Phi3Config(**BASE)),
        "phi3 longrope": Family(
            tf.Phi3Config(
                **BASE,
                original_max_position_embeddings=64,
                **rope(
                    "longrope",
                    short_factor=[1.0] * 6,
                    long_factor=[2.0] * 6,
                    original_max_position_embeddings=64,
                ),
            )
        ),
        "gpt-neox": Family(
            tf.GPTNeoXConfig(**{k: v for k, v in BASE.items() if k != "num_key_value_heads"} | {"hidden_size": 64}),
            rotated=4,
        ),
        "olmo2": Family(tf.Olmo2Config(**BASE)),
        "olmo3": Family(tf.Olmo3Config(**BASE, sliding_window=16, layer_types=LAYERS), sliding={0: 16, 2: 16}),
        "granite": Family(tf.GraniteConfig(**BASE, attention_multiplier=0.3)),
        "cohere2": Family(
            tf.Cohere2Config(**BASE, sliding_window=16), layout="interleaved", nope=(3,), sliding={0: 16, 1: 16, 2: 16}
        ),
        "gpt-oss": Family(
            tf.GptOssConfig(**BASE, **d16, **MOE, num_local_experts=4, sliding_window=16, layer_types=LAYERS),
            sliding={0: 16, 2: 16},
            eager_only=True,
        ),
        "llama4": Family(
            tf.Llama4TextConfig(
                **BASE,
                **d16,
                intermediate_size_mlp=64,
                num_local_experts=2,
                num_experts_per_tok=1,
                attention_chunk_size=64,
                no_rope_layers=[1, 1, 1, 0],
            ),
            layout="interleaved",
            nope=(3,),
        ),
        "deepseek-v3": Family(
            tf.DeepseekV3Config(
                **{**BASE, "num_key_value_heads": 4},
                moe_intermediate_size=32,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                q_lora_rank=24,
                kv_lora_rank=24,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                first_k_dense_replace=1,
            ),
            rotated=8,
            start=16,
        ),
        "mllama text": Family(
            tf.models.mllama.configuration_mllama.MllamaTextConfig(
                **{k: v for k, v in BASE.items() if k != "max_position_embeddings"}, cross_attention_layers=[]
            )
        ),
    }


def build(family: Family, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    if isinstance(family.config, tf.models.mllama.configuration_mllama.MllamaTextConfig):
        make = tf.models.mllama.modeling_mllama.MllamaForCausalLM._from_config
    elif type(family.config) in tf.MODEL_FOR_CAUSAL_LM_MAPPING:
        make = tf.AutoModelForCausalLM.from_config
    else:
        make = tf.AutoModelForMaskedLM.from_config
    model = make(family.config, attn_implementation=attention, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def project(module: nn.Module, hidden: torch.Tensor, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (B, H, T, d) before the rotation, from the module's own weights, by hand."""
    m: Any = module
    if hasattr(m, "kv_a_proj_with_mqa"):
        return _latent(m, hidden)
    if hasattr(m, "qkv_proj"):
        whole = m.qkv_proj(hidden)
        n_q, n_k = m.config.num_attention_heads * d, m.config.num_key_value_heads * d
        q, k = whole[..., :n_q], whole[..., n_q : n_q + n_k]
    elif hasattr(m, "query_key_value"):
        whole = m.query_key_value(hidden).unflatten(-1, (-1, 3 * d))
        q, k = whole[..., :d].flatten(-2), whole[..., d : 2 * d].flatten(-2)
    else:
        q, k = m.q_proj(hidden), m.k_proj(hidden)
    both = []
    for x, norm in ((q, getattr(m, "q_norm", None)), (k, getattr(m, "k_norm", None))):
        if norm is not None and norm.weight.shape[0] != d:
            x = norm(x)
        x = x.unflatten(-1, (-1, d))
        if norm is not None and norm.weight.shape[0] == d:
            x = norm(x)
        both.append(x.transpose(1, 2))
    return both[0], both[1]


def _latent(m: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek's latent attention: low-rank queries, keys from a shared latent and one rotated part for all heads.

    The rotated part comes interleaved and leaves half-split; here it is put in that order beforehand.
    """
    heads, plain, rotated = m.config.num_attention_heads, m.qk_nope_head_dim, m.qk_rope_head_dim
    q = m.q_b_proj(m.q_a_layernorm(m.q_a_proj(hidden))).unflatten(-1, (heads, plain + rotated)).transpose(1, 2)
    latent = m.kv_a_proj_with_mqa(hidden)
    shared = latent[..., -rotated:][:, None].expand(-1, heads, -1, -1)
    k = m.kv_b_proj(m.kv_a_layernorm(latent[..., :-rotated])).unflatten(-1, (heads, -1))[..., :plain].transpose(1, 2)

    def ordered(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[..., 0::2], x[..., 1::2]], -1)

    return (
        torch.cat([q[..., :plain], ordered(q[..., plain:])], -1),
        torch.cat([k, ordered(shared)], -1),
    )


def turn(x: torch.Tensor, angle: torch.Tensor, factor: float, layout: str) -> torch.Tensor:
    """Rotate the leading 2·planes coordinates of x by angle (T, planes)."""
    planes = angle.shape[-1]
    part, rest = x[..., : 2 * planes].double(), x[..., 2 * planes :].double()
    u, v = (part[..., :planes], part[..., planes:]) if layout == "half" else (part[..., 0::2], part[..., 1::2])
    cos, sin = factor * angle.cos(), factor * angle.sin()
    first, second = u * cos - v * sin, v * cos + u * sin
    turned = torch.cat([first, second], -1) if layout == "half" else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([turned, rest], -1)
