import sys

import pytest
import torch
import transformers as tf

from qkscope.capture import gate as parity
from qkscope.capture.rope import describe_rope, embeddings, planes_of, temperature
from qkscope.capture.watch import Attention, backbone, self_attentions, watching
from qkscope.errors import CaptureError
from tests.capture.families import BASE, build, families, project, turn

FAMILIES = families()
CASES = [
    (name, how) for name, f in FAMILIES.items() for how in ("sdpa", "eager") if not (how == "sdpa" and f.eager_only)
]
LENGTH = 80  # beyond original_max_position_embeddings of the scaled families


def tokens(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def look(model, ids: torch.Tensor) -> tuple[list[Attention], dict[int, torch.Tensor]]:
    """Attention calls, and what went into each attention module."""
    seen: list[Attention] = []
    inputs: dict[int, torch.Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(
            lambda module, args, options: inputs.__setitem__(
                module.layer_idx, options.get("hidden_states", args[0] if args else None)
            ),
            with_kwargs=True,
        )
        for m in self_attentions(model)
    ]
    with torch.no_grad(), watching(model, seen.append):
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen, inputs


def patched() -> list[str]:
    """Whatever in transformers still leads to one of our functions."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            found += [f"{name}.{k}" for k, v in vars(module).items() if "_Watch" in getattr(v, "__qualname__", "")]
            found += [f"{name}.{k}" for k, v in vars(module).items() if "_Watch" in str(getattr(v, "__code__", ""))]
    registry = tf.modeling_utils.ALL_ATTENTION_FUNCTIONS
    return found + [f"registry {key}" for key in registry._local_mapping]


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_outputs_are_bit_identical_and_nothing_stays_patched(name, attention):
    model, ids = build(FAMILIES[name], attention), tokens()
    with torch.no_grad():
        plain = model(ids).logits
        seen: list[Attention] = []
        with watching(model, seen.append):
            watched = model(ids).logits
        n = len(seen)
        model(ids)
    assert torch.equal(plain, watched)
    assert [a.layer for a in seen] == [0, 1, 2, 3]
    assert len(seen) == n
    assert not patched()


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_what_is_seen_is_projection_norm_and_rotary_done_by_hand(name, attention):
    family = FAMILIES[name]
    model = build(family, attention)
    seen, inputs = look(model, tokens())
    positions = torch.arange(LENGTH)
    candidates = embeddings(model)
    for call in seen:
        d = call.q.shape[-1]
        assert call.sliding_window == family.sliding.get(call.layer)
        assert call.q_per_kv == (1 if name in ("gpt-neox", "deepseek-v3") else 2)
        described = describe_rope(call, positions, candidates, 512 if "scaling" in name else LENGTH)
        assert (described is None) == (call.layer in family.nope)
        if described is not None:
            assert described.layout == family.layout
            assert described.start == family.start
            assert 2 * described.planes == (family.rotated or d)
            assert described.sign == 1
            assert described.temperature == (name == "ministral3")
        q, k = project(call.module, inputs[call.layer], d)
        if described is not None:
            cos, sin = (part.double() for part in described.embedding.angles(positions))
            factor = float(torch.hypot(cos, sin).mean())
            angle = torch.atan2(sin, cos)
            q, k = (
                torch.cat(
                    [x[..., : family.start].double(), turn(x[..., family.start :], angle, factor, family.layout)], -1
                )
                for x in (q, k)
            )
        if hasattr(call.module, "qk_norm"):
            q, k = (call.module.qk_norm(x) for x in (q, k))
        scaled = temperature(call, described) if described is not None else None
        if scaled is not None:
            assert scaled[0, 0] == pytest.approx(1.0)
            assert scaled[0, -1] > 1.05
            q = q * scaled[:, None, :, None]
        for got, expected in ((call.q, q), (call.k, k)):
            torch.testing.assert_close(got.double(), expected.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_undoing_the_rotation_gives_the_vectors_before_it(name, attention):
    family = FAMILIES[name]
    model = build(family, attention)
    seen, _ = look(model, tokens())
    positions = torch.arange(LENGTH)
    for call in seen:
        described = describe_rope(call, positions, embeddings(model), LENGTH)
        if described is None or hasattr(call.module, "qk_norm"):
            continue
        cos, sin = described.embedding.angles(positions)
        unit = torch.complex(cos, sin) / described.attention_factor
        after = planes_of(call.k, described.planes, described.layout, described.start)
        before = call.rotary.k.before
        before = before if before.shape[1] == call.k.shape[1] or before.shape[1] == 1 else before.transpose(1, 2)
        undone = (after * unit.conj() / described.attention_factor).abs()
        source = "interleaved" if name in ("deepseek-v3", "glm4", "cohere2", "llama4") else "half"
        expected = planes_of(before, described.planes, source).abs()
        torch.testing.assert_close(undone, expected.expand_as(undone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [10_000 ** (-2 * m / 12) for m in range(6)]),
        ("linear scaling", [10_000 ** (-2 * m / 12) / 4 for m in range(6)]),
        ("gpt-neox", [1.0, 0.01]),
    ],
)
def test_frequencies_are_those_of_the_formula(name, expected):
    model = build(FAMILIES[name])
    seen, _ = look(model, tokens())
    described = describe_rope(seen[0], torch.arange(LENGTH), embeddings(model), 512)
    assert described.frequencies == pytest.approx(expected, rel=1e-6)


def test_local_and_global_layers_have_their_own_frequencies():
    model = build(FAMILIES["gemma3"])
    seen, _ = look(model, tokens())
    first, second = (describe_rope(call, torch.arange(LENGTH), embeddings(model), 512) for call in seen[:2])
    assert first.frequencies[1] != pytest.approx(second.frequencies[1], rel=0.1)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_the_parity_gate_passes_every_family(name, attention):
    model = build(FAMILIES[name], attention)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return backbone(model)(tokens(1)).last_hidden_state

    assert len(parity.check(model, forward)) == 4


def test_the_parity_gate_stops_a_model_that_is_not_the_same_twice():
    model = build(FAMILIES["llama"])

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return backbone(model)(tokens(1)).last_hidden_state + torch.rand(())

    with pytest.raises(CaptureError, match="hidden states change"):
        parity.check(model, forward)


def test_the_parity_gate_forgives_a_pass_that_does_not_repeat_itself_once():
    model, calls = build(FAMILIES["llama"], "eager"), iter([0.0, 1e-7, 0.0, 0.0])

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return backbone(model)(tokens(1)).last_hidden_state + next(calls)

    assert len(parity.check(model, forward)) == 4


def test_the_parity_gate_notices_queries_that_are_not_those_that_attend(monkeypatch):
    model = build(FAMILIES["llama"], "eager")
    module = sys.modules[type(self_attentions(model)[0]).__module__]
    original = module.eager_attention_forward
    monkeypatch.setattr(module, "eager_attention_forward", lambda m, q, k, *a, **o: original(m, q * 2, k, *a, **o))

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return backbone(model)(tokens(1)).last_hidden_state

    with pytest.raises(CaptureError, match="attention recomputed from q and k of layer"):
        parity.check(model, forward)


def test_an_exception_inside_leaves_nothing_patched():
    model = build(FAMILIES["llama"])

    def fail(_: Attention) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), torch.no_grad(), watching(model, fail):
        model(tokens())
    assert not patched()


def test_two_models_of_one_family_can_be_watched_at_once():
    outer, inner = build(FAMILIES["llama"]), build(FAMILIES["llama"])
    seen_outer, seen_inner = [], []
    with torch.no_grad(), watching(outer, seen_outer.append), watching(inner, seen_inner.append):
        inner(tokens())
        outer(tokens())
    assert len(seen_outer) == len(seen_inner) == 4
    assert {id(a.module) for a in seen_outer}.isdisjoint({id(a.module) for a in seen_inner})
    assert not patched()


def test_compiled_models_are_watched():
    model = build(FAMILIES["llama"])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = compiled(tokens()).logits
        seen = []
        with watching(compiled, seen.append):
            watched = compiled(tokens()).logits
    assert len(seen) == 4
    torch.testing.assert_close(plain, watched)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch asks itself whether this CPU is an Intel GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    model = build(FAMILIES["llama"], dtype=dtype)
    # Some virtual machines announce matrix instructions that they then refuse.
    with torch.backends.mkldnn.flags(enabled=False):
        seen, _ = look(model, tokens())
    assert seen[0].q.dtype == dtype
    described = describe_rope(seen[0], torch.arange(LENGTH), embeddings(model), 512)
    assert described.frequencies[1] == pytest.approx(10_000 ** (-2 / 12), rel=1e-6)


def test_cross_attention_is_not_self_attention():
    config = tf.models.mllama.configuration_mllama.MllamaTextConfig(
        **{k: v for k, v in BASE.items() if k != "max_position_embeddings"}, cross_attention_layers=[1]
    )
    model = tf.models.mllama.modeling_mllama.MllamaForCausalLM(config).eval()
    seen = []
    states = torch.randn(2, 7, 48)
    mask = torch.ones(2, 1, LENGTH, 7)
    with torch.no_grad(), watching(model, seen.append):
        model(tokens(), cross_attention_states=states, cross_attention_mask=mask)
    assert [a.layer for a in seen] == [0, 2, 3]
    assert all(a.rotary is not None for a in seen)


@pytest.mark.parametrize(
    "config",
    [
        tf.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96),
        tf.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=8, vocab_size=96),
        tf.GPTNeoXJapaneseConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96),
        tf.RoFormerConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, is_decoder=True),
        tf.CodeGenConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=8, vocab_size=96),
    ],
)
def test_a_model_outside_the_registry_is_named(config):
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(CaptureError, match=rf"{type(model).__name__} cannot be captured: its attention \(.*Attention"):
        self_attentions(model)


def test_not_a_transformers_model():
    with pytest.raises(CaptureError, match="expected a transformers model, got Linear"):
        backbone(torch.nn.Linear(2, 2))
