"""Tiny random models that read images, documents for them, and what plain hooks see of their text tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as tf
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

IMAGE, VIDEO, START, END = 90, 91, 92, 93
_SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_MORE = {"intermediate_size": 96, "vocab_size": 96, "max_position_embeddings": 512, "pad_token_id": 0}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
_EYES = {"depth": 2, "embed_dim": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64, "patch_size": 4}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


@lru_cache(maxsize=8)
def built(name: str, **text: Any) -> PreTrainedModel:
    """A model with its vision tower and language-model head."""
    eyes = _EYES | {"hidden_size": 64 if name == "qwen2_vl" else 32, "deepstack_visual_indexes": [0]}
    eyes |= {"num_position_embeddings": 64}
    config = CONFIG_MAPPING[name](text_config=_SIZES | _MORE | _ROPE | text, vision_config=eyes, **_TOKENS)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config).eval()
    return model


@lru_cache(maxsize=1)
def with_temperature() -> PreTrainedModel:
    """A model whose images take as many positions as they have tokens, and whose queries are scaled by position."""
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
    more = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, **scaling, **more}
    text = tf.Ministral3Config(**_SIZES | _MORE, rope_parameters=rope)
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    eyes = tf.PixtralVisionConfig(**small, patch_size=4, image_size=64)
    torch.manual_seed(0)
    config = tf.Mistral3Config(text_config=text, vision_config=eyes, image_token_index=IMAGE)
    return tf.Mistral3ForConditionalGeneration(config).eval()


def words(n: int, seed: int) -> list[int]:
    """Ids of text tokens."""
    return torch.randint(3, 85, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def document(seed: int, *, video: bool = False) -> dict[str, torch.Tensor]:
    """Text with two images, or an image and a video, as a processor returns it."""
    grids = [(1, 8, 6), (3, 4, 8) if video else (1, 4, 12)]
    kinds = [IMAGE, VIDEO if video else IMAGE]
    ids = words(20, seed)
    for grid, kind in zip(grids, kinds, strict=True):
        ids += [START, *[kind] * (int(np.prod(grid)) // 4), END, *words(30, seed + 1)]
    generator = torch.Generator().manual_seed(seed)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE) + 2 * (inputs["input_ids"] == VIDEO)
    for kind, pixels, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [grids[i] for i in range(2) if kinds[i] == kind]
        if own:
            inputs[grid] = torch.tensor(own)
            inputs[pixels] = torch.randn(int(np.prod(own, axis=1).sum()), 3 * 2 * 4 * 4, generator=generator)
    return inputs


class Hooked(NamedTuple):
    """The text tokens of a document, as plain hooks see them in layer 1."""

    columns: np.ndarray
    position: np.ndarray
    """As the model's own function gives them."""
    before: tuple[np.ndarray, np.ndarray]
    """Queries and keys (H, n, d) before the rotation."""
    after: tuple[np.ndarray, np.ndarray]
    """After it, turned by hand with the cosines and sines of the call."""


def hooked(model: Any, inputs: dict[str, torch.Tensor]) -> Hooked:
    """A call of the model with hooks on projections (or their norms) and on the rotary embedding."""
    layer, seen = model.model.language_model.layers[1].self_attn, dict[str, Any]()
    places = {"q": getattr(layer, "q_norm", layer.q_proj), "k": getattr(layer, "k_norm", layer.k_proj)}
    places["angles"] = model.model.language_model.rotary_emb
    hooks = [
        module.register_forward_hook(lambda _m, _a, out, name=name: seen.update({name: out}))
        for name, module in places.items()
    ]
    with torch.no_grad():
        model.model(**inputs)
    for hook in hooks:
        hook.remove()
    model.model.rope_deltas = None
    ids = inputs["input_ids"]
    cos, sin = (part[0] for part in seen["angles"])
    before = [seen[kind].reshape(ids.shape[1], -1, 16).transpose(0, 1) for kind in "qk"]
    after = [x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in before]
    columns = np.flatnonzero(~np.isin(ids[0].numpy(), [IMAGE, VIDEO]))
    grids = {name: inputs.get(name) for name in ("image_grid_thw", "video_grid_thw")}
    position = model.model.get_rope_index(ids, mm_token_type_ids=inputs["mm_token_type_ids"], **grids)[0][:, 0, columns]
    assert (position == position[0]).all()
    q, k, turned_q, turned_k = (x[:, columns].double().numpy() for x in (*before, *after))
    return Hooked(columns, position[0].numpy(), (q, k), (turned_q, turned_k))
