"""A cut cache on tiny models: generation as under ``windowed``, fewer bytes, and a model that is left as it was."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import qkscope
from qkscope.capture.watch import backbone
from qkscope.cause import cutlayer, intervene
from qkscope.errors import CaptureError, ConfigError
from tests.capture.families import BASE, LAYERS, build, families, matrix
from tests.cause.test_intervene import IN_FLEX, with_kernel

FAMILIES = families()
WINDOW, SINKS = 8, 3
REFUSED = ("deepseek-v3", "dynamic scaling", "phi3 longrope")
QUICK = ("llama", "gemma3", "gemma2", "glm4", "gpt-oss", "mistral")
"""GQA; layers with and without a sliding window; softcap; partial rotary; learned sinks; only sliding windows."""


def made(name: str):
    family = FAMILIES[name]
    model = build(family, "eager" if family.eager_only else "sdpa")
    model.generation_config.eos_token_id = None  # texts of random models are as long as asked
    return model


def key_heads(model) -> dict[tuple[int, int], int]:
    """Some key heads of every layer: all of layer 0, one of the others, with two windows."""
    config = model.config
    n_layers, n = config.num_hidden_layers, getattr(config, "num_key_value_heads", config.num_attention_heads)
    some = {(layer, (layer * 7) % n): WINDOW for layer in range(1, n_layers)}
    return some | {(0, head): WINDOW - 2 * (head % 2) for head in range(n)}


def prompt(rows: int = 1, length: int = 30) -> torch.Tensor:
    return torch.randint(3, 93, (rows, length), generator=torch.Generator().manual_seed(4))


def generated(model, ids: torch.Tensor, tokens: int = 12, **options):
    """Generated ids and the logits of each."""
    with torch.no_grad():
        out = model.generate(
            ids, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
        )
    return out.sequences, torch.stack(out.logits, 1)


def expected(model, ids: torch.Tensor, windows, tokens: int = 12, sinks: int = SINKS, **options):
    with intervene.windowed(model, windows, sinks=sinks):
        return generated(model, ids, tokens, **options)


def same(got, want) -> None:
    assert torch.equal(got[0], want[0])
    assert torch.allclose(got[1], want[1], atol=1e-4)


@pytest.mark.parametrize("name", matrix([name for name in FAMILIES if name not in REFUSED], QUICK))
def test_generation_is_that_of_windowed_in_every_family(name):
    model, ids = made(name), prompt()
    windows = key_heads(model)
    plain, want = generated(model, ids), expected(model, ids, windows)
    assert not torch.allclose(plain[1], want[1], atol=1e-3), "the cut must change something"
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        same(generated(model, ids, past_key_values=cache), want)
        cache.reset()
        same(generated(model, ids, past_key_values=cache, prefill_chunk_size=7), want)
    same(generated(model, ids), plain)


@IN_FLEX
def test_several_texts_at_once_are_cut_in_flex_attention():
    """Which reads the mask of a text of its own for each."""
    model, ids = with_kernel("llama", "flex_attention"), prompt(2)
    windows = key_heads(model)
    want = expected(with_kernel("llama", "sdpa"), ids, windows)
    same(expected(model, ids, windows), want)
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        same(generated(model, ids, past_key_values=cache), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_long_generation_is_that_of_windowed(name):
    model, ids = made(name), prompt(2, 20)
    windows = key_heads(model)
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        same(generated(model, ids, 256, past_key_values=cache), expected(model, ids, windows, 256))


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma3"])
def test_rows_padded_on_the_left_are_generated_as_alone(name):
    model, ids = made(name), prompt(3, 30)
    windows, pads = key_heads(model), (0, 5, 13)
    mask = torch.ones_like(ids)
    for row, n in enumerate(pads):
        ids[row, :n], mask[row, :n] = 0, 0
    want = [expected(model, ids[row : row + 1, n:], windows) for row, n in enumerate(pads)]
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        for chunks in ({}, {"prefill_chunk_size": 4}):
            cache.reset()
            got = generated(model, ids, attention_mask=mask, past_key_values=cache, **chunks)
            for row, (sequence, logits) in enumerate(want):
                same((got[0][row, pads[row] :], got[1][row]), (sequence[0], logits[0]))


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_half_precision_with_padding_stays_finite_and_near(name):
    family, ids, mask = FAMILIES[name], prompt(2, 30), torch.ones(2, 30, dtype=torch.long)
    ids[1, :11], mask[1, :11] = 0, 0
    full = made(name)
    windows = key_heads(full)
    for dtype in (torch.bfloat16, torch.float16):
        model = build(family, "eager" if family.eager_only else "sdpa", dtype)
        got = []
        for one in (model, full):
            with qkscope.cut_cache(one, windows, sinks=SINKS) as cache, torch.no_grad():
                got.append(one(ids, attention_mask=mask, past_key_values=cache).logits.float())
        assert torch.isfinite(got[0]).all()
        assert torch.allclose(got[0][mask == 1], got[1][mask == 1], atol=0.1)


def test_one_prompt_is_continued_in_several_ways():
    model, ids = made("llama"), prompt(1, 40)
    windows, other = key_heads(model), prompt(2, 40)[1:]
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache, torch.no_grad():
        model(ids[:, :25], past_key_values=cache)
        for rest in (ids[:, 25:], other[:, 25:]):
            whole = torch.cat([ids[:, :25], rest], 1)
            with copy.deepcopy(cache) as continued:
                same(generated(model, whole, past_key_values=continued), expected(model, whole, windows))
        assert cache.get_seq_length() == 25
    assert not backbone(model)._forward_hooks


def test_beams_are_those_of_windowed():
    model, ids = made("llama"), prompt(2)
    windows = key_heads(model)
    with intervene.windowed(model, windows, sinks=SINKS):
        want = model.generate(ids, max_new_tokens=12, do_sample=False, num_beams=3)
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        assert torch.equal(model.generate(ids, max_new_tokens=12, num_beams=3, past_key_values=cache), want)
        assert cache.layers[0].stores[0].keys.shape[0] == 6


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_long_prompts_are_computed_in_blocks(monkeypatch, attention):
    model, ids = build(FAMILIES["llama"], attention), prompt(2, 45)
    windows = key_heads(model)
    want = expected(model, ids, windows)
    monkeypatch.setattr(cutlayer, "_BLOCK", 10)
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        same(generated(model, ids, past_key_values=cache), want)
        cache.reset()
        same(generated(model, ids, past_key_values=cache, prefill_chunk_size=17), want)


@pytest.mark.parametrize("sinks", [0, 1, WINDOW])
@pytest.mark.parametrize("length", [2, 5, 12])
def test_short_texts_and_any_number_of_sinks(length, sinks):
    model, ids = made("llama"), prompt(1, length)
    windows = dict.fromkeys(key_heads(model), WINDOW)
    with qkscope.cut_cache(model, windows, sinks=sinks) as cache:
        same(generated(model, ids, past_key_values=cache), expected(model, ids, windows, sinks=sinks))


@pytest.mark.parametrize("name", ["llama", "gemma3", "glm4"])
def test_bytes_are_those_of_the_formula(name):
    """2 · d · bytes per number · rows · Σ over key heads of min(n, sinks + w), or of n where they are whole."""
    model, rows, new = made(name), 2, 5
    windows, config = key_heads(model), model.config
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        assert cache.nbytes == 0
        for length in (4, 9, 40):
            cache.reset()
            generated(model, prompt(rows, length), new, past_key_values=cache)
            n, stored = length + new - 1, 0  # the last token is not read
            for layer in range(config.num_hidden_layers):
                sliding = FAMILIES[name].sliding.get(layer)
                whole = n if sliding is None else min(n, sliding - 1)
                for head in range(config.num_key_value_heads):
                    window = windows.get((layer, head))
                    stored += whole if window is None else min(n, SINKS + window)
            assert cache.nbytes == 2 * d * 4 * rows * stored
            held = [x for layer in cache.layers if hasattr(layer, "stores") for s in layer.stores for x in (s.keys,)]
            assert all(x.untyped_storage().nbytes() == x.numel() * 4 for x in held), "a view keeps more in memory"


def test_the_model_is_left_as_it_was():
    model, ids = made("llama"), prompt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    decoder, plain = backbone(model), generated(model, ids)
    attention = type(model.model.layers[0].self_attn).forward.__globals__["ALL_ATTENTION_FUNCTIONS"]
    functions = dict(attention._local_mapping)

    def hooks() -> int:
        return len(decoder._forward_hooks) + len(decoder._forward_pre_hooks)

    cache = qkscope.cut_cache(model, key_heads(model), sinks=SINKS)
    assert hooks() == 2
    same(generated(model, ids), plain)
    generated(model, ids, past_key_values=cache)
    assert dict(attention._local_mapping) == functions
    with intervene.windowed(model, {(0, 0): 4}):
        pass
    del cache
    gc.collect()
    assert hooks() == 0
    with (
        pytest.raises(CaptureError, match="one intervention at a time"),
        qkscope.cut_cache(model, {}) as cache,
        intervene.windowed(model, {(0, 0): 4}),
    ):
        generated(model, ids, past_key_values=cache)
    assert hooks() == 0
    assert dict(attention._local_mapping) == functions
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    same(generated(model, ids), plain)


def test_an_error_in_a_pass_leaves_nothing_behind():
    model, ids = made("llama"), prompt()
    attention = type(model.model.layers[0].self_attn).forward.__globals__["ALL_ATTENTION_FUNCTIONS"]
    functions, windows = dict(attention._local_mapping), key_heads(model)
    with qkscope.cut_cache(model, windows, sinks=SINKS) as cache:
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generated(model, ids, past_key_values=cache)
        assert dict(attention._local_mapping) == functions
        handle.remove()
        cache.reset()
        same(generated(model, ids, past_key_values=cache), expected(model, ids, windows))


def test_a_cache_without_cuts_is_the_plain_one():
    model, ids = made("llama"), prompt()
    with qkscope.cut_cache(model, {}) as cache:
        got, want = generated(model, ids, past_key_values=cache), generated(model, ids, past_key_values=DynamicCache())
        assert torch.equal(got[1], want[1])


def test_what_cannot_be_cut_is_refused():
    model, ids = made("llama"), prompt(2)
    refused = [
        ({(0, 0): 2}, "keeps the first 4 tokens and a window of 2", {}),
        ({(0, 0): 0}, "expected windows of 1 token or more, got 0", {}),
        ({(0, 0): 8}, "expected 0 to 8 first tokens", {"sinks": -1}),
        ({(9, 0): 8}, "the model has no layer 9", {}),
        ({(0, 2): 8}, "expected key heads 0 to 1 in layer 0, got 2", {}),
    ]
    for windows, message, more in refused:
        with pytest.raises((ConfigError, CaptureError), match=message):
            qkscope.cut_cache(model, windows, **more)
    with qkscope.cut_cache(model, {(0, 0): 8}) as cache:
        generated(model, ids, past_key_values=cache)
        with pytest.raises(CaptureError, match="used already, for a text of 41 tokens; make a new one"):
            generated(model, prompt(2, 60), past_key_values=cache)
        with pytest.raises(CaptureError, match="expected an attention_mask of"):
            model(ids[:, :1], attention_mask=torch.ones(2, 3), past_key_values=cache)
        with pytest.raises(CaptureError, match="holds a batch of 2, got 1"):
            generated(model, prompt(1, 60), past_key_values=cache)
        with pytest.raises(CaptureError, match="of another model"):
            generated(made("llama"), ids, past_key_values=cache)
        cache.reset()
        with pytest.raises(ValueError, match="Passing both"):
            generated(model, ids, past_key_values=cache, cache_implementation="static")
        mask = torch.ones(2, 30)
        mask[0, -3:] = 0
        with pytest.raises(CaptureError, match="padded on the left"):
            model(ids, attention_mask=mask, past_key_values=cache)
        with pytest.raises(ConfigError, match="no attention weights"):
            model(ids, past_key_values=cache, output_attentions=True)
        with pytest.raises(CaptureError, match="cannot take back tokens"):
            cache.crop(-1)
    with pytest.raises(CaptureError, match="closed"):
        generated(model, ids, past_key_values=cache)
    for kind in ("static", "quantized"):
        model.generation_config.cache_implementation = kind
        with pytest.raises(ConfigError, match=f"asks for a {kind} cache, and a cut cache is dynamic"):
            qkscope.cut_cache(model, {(0, 0): 8})


def test_compressed_latents_and_encodings_by_length_are_refused():
    model = made("deepseek-v3")
    with (
        qkscope.cut_cache(model, {(1, 1): 8}) as cache,
        pytest.raises(CaptureError, match="layer 1 attends with 4 key heads but stores 1"),
    ):
        generated(model, prompt(), past_key_values=cache)
    for name in ("dynamic scaling", "phi3 longrope"):
        with pytest.raises(CaptureError, match="depends on the length of a text"):
            qkscope.cut_cache(made(name), {(0, 0): 8})


def test_layers_that_read_the_keys_of_others_are_refused():
    import transformers as tf

    config = tf.Gemma3nTextConfig(
        **BASE, head_dim=16, num_kv_shared_layers=2, layer_types=LAYERS, sliding_window=16, laurel_rank=4,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=96, activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(CaptureError, match="layer 2 reads the keys of an earlier layer"):
        qkscope.cut_cache(model, {(1, 0): 8})
