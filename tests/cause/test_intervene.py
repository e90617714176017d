"""Interventions on tiny models of every family: nothing where nothing is asked, and the terms they say elsewhere."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

from qkscope.analyses.fourterms import terms
from qkscope.analyses.scores import locked_means
from qkscope.capture.corpus import Corpus
from qkscope.capture.gate import attention_weights
from qkscope.capture.options import CaptureOptions
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.capture.watch import Attention, watching
from qkscope.cause import intervene
from qkscope.cause.lockedmodel import LockedModel
from qkscope.cause.terms import ScaledLayer
from qkscope.errors import CaptureError
from qkscope.runs.run import open_run
from qkscope.runs.source import LoadSpec
from tests.capture.families import build, families

FAMILIES = families()
LENGTH = 48
EVERY_FAMILY = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"intervene {name}")) for name in FAMILIES]
)
"""The tests of a family share one process, which captures it once."""
NEARLY_1 = math.nextafter(1.0, 2.0)
"""Not 1, so the terms are formed, but 1 in float32."""


@cache
def case(name: str):
    """A model of the family and a run of it."""
    family = FAMILIES[name]
    model = build(family, "eager" if family.eager_only else "sdpa")
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 93, LENGTH) for _ in range(8)]
    documents = [Document(str(n), f"text {n}") for n in range(8)]
    options = CaptureOptions(window=LENGTH, documents_per_shard=8, batch=1)
    folder = Path(mkdtemp()) / "run"
    capture(model, Corpus(documents, ids), folder, options, {"id": name})
    return model, folder


def tokens(rows: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 93, (rows, length), generator=torch.Generator().manual_seed(4))


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def of_all(locked: LockedModel, *factors: float) -> dict:
    return dict.fromkeys(locked.heads, factors)


@EVERY_FAMILY
def test_all_ones_leave_every_family_as_it_is(name):
    model, folder = case(name)
    ids = tokens()
    plain, locked = logits(model, ids), LockedModel.of(model, folder)
    with intervene.scaled(model, folder, of_all(locked, 1, 1, 1, 1)):
        assert torch.equal(logits(model, ids), plain)
    with intervene.scaled(model, folder, of_all(locked, *[NEARLY_1] * 4)):
        doubled = logits(model, ids)
    assert not torch.equal(doubled, plain), "the terms were not formed"
    assert (doubled - plain).norm() < 1e-5 * plain.norm()
    assert torch.equal(logits(model, ids), plain), "something stayed"


@EVERY_FAMILY
def test_terms_sum_to_the_score_and_are_scaled_as_they_say(name):
    """Attention weights of the first layer, whose queries and keys no intervention changes, computed term by term."""
    model, folder = case(name)
    locked, run = LockedModel.of(model, folder), open_run(folder)
    layer, ids, chosen = min(locked.entries), tokens(), (0.0, 0.5, 2.0, -1.0)
    seen: list[Attention] = []
    got: dict[int, torch.Tensor] = {}

    def keep(attention: Attention, output: torch.Tensor) -> None:
        got.setdefault(attention.layer, output)

    with watching(model, seen.append):
        logits(model, ids)
    factors = {head: chosen for head in locked.heads if head[0] == layer}
    with intervene.scaled(model, folder, factors), watching(model, lambda _: None, keep):
        logits(model, ids)
    (call,) = (a for a in seen if a.layer == layer)
    plain = attention_weights(call, torch.arange(LENGTH)[None])
    _, query, key, value = call.call[0][:4]
    heads = run.source.load([h for h in run.heads if h.layer == layer], LoadSpec(rotary=True, sample=64))[0]
    at, skip = np.arange(LENGTH), locked.skip_first
    for i, head in enumerate(heads):
        q, k = (x.double().numpy() for x in (query[0, i], key[0, head.key_head.head]))
        means_q, means_k = locked_means(head)
        four = terms(q, k, means_q.at(at), means_k.at(at), call.scaling)
        score = call.scaling * q @ k.T
        assert np.abs(four.sum(0) - score).max() < 1e-5 * max(np.abs(score).max(), 1)
        if call.call[1].get("softcap") is not None or getattr(call.module, "sinks", None) is not None:
            continue
        changed = np.einsum("t,tij->ij", chosen, four)
        changed[:, :skip] = score[:, :skip]
        hidden = plain.scores[0, i].numpy() < -1e30
        weights = torch.from_numpy(np.where(hidden, -np.inf, changed)).softmax(-1)
        expected = weights @ value[0, head.key_head.head].double()
        found = got[layer].reshape(LENGTH, len(heads), -1)[:, i].double()
        assert (found - expected).norm() < 1e-4 * expected.norm()


@EVERY_FAMILY
def test_a_wide_window_changes_nothing_and_a_narrow_one_hides_what_is_far(name):
    model, _ = case(name)
    ids = tokens()
    plain, seen = logits(model, ids), []
    with watching(model, seen.append):
        logits(model, ids)
    per_key = {a.layer: a.call[0][2].shape[1] for a in seen}
    heads = [(layer, head) for layer, n in per_key.items() for head in range(n)]
    with intervene.windowed(model, dict.fromkeys(heads, LENGTH)):
        assert torch.equal(logits(model, ids), plain)
    with intervene.windowed(model, dict.fromkeys(heads, 1), sinks=0):
        alone = logits(model, ids)
    other = ids.clone()
    other[:, : LENGTH // 2] = tokens(1, LENGTH).flip(1)[:, : LENGTH // 2]
    with intervene.windowed(model, dict.fromkeys(heads, 1), sinks=0):
        assert torch.allclose(logits(model, other)[:, -1], alone[:, -1], atol=1e-6), "a window of 1 sees itself alone"
    assert not torch.allclose(alone, plain)


def test_a_window_is_what_attention_by_hand_says():
    model, _ = case("llama")
    calls: list[Attention] = []
    outputs: dict[int, torch.Tensor] = {}
    with watching(model, calls.append):
        logits(model, tokens())

    def keep(attention: Attention, output: torch.Tensor) -> None:
        outputs.setdefault(attention.layer, output)

    with intervene.windowed(model, {(0, 1): 6}, sinks=3), watching(model, lambda _: None, keep):
        logits(model, tokens())
    call = calls[0]
    plain = attention_weights(call, torch.arange(LENGTH)[None])
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (distance >= 6) & (torch.arange(LENGTH) >= 3)
    value = call.call[0][3][0]
    for head in range(4):
        scores = plain.scores[0, head].masked_fill(hidden & (head >= 2), -torch.inf)
        expected = scores.softmax(-1) @ value[head // 2]
        assert torch.allclose(outputs[0].reshape(LENGTH, 4, -1)[:, head], expected, atol=1e-5)


IN_FLEX = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore::DeprecationWarning")
"""Warnings of torch about flex attention as transformers calls it, on a CPU."""


def with_kernel(name: str, kernel: str):
    """A model of the family with this attention implementation, and a config of its own."""
    family = FAMILIES[name]
    return build(replace(family, config=deepcopy(family.config)), kernel)


@IN_FLEX
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_windows_of_several_heads_are_the_same_in_flex_attention(name):
    """Which reads one head's mask where it is given a tensor, and does not see its own mask in one."""
    ids, padding = tokens(2), torch.ones(2, LENGTH, dtype=torch.long)
    padding[1, 40:] = 0
    found = {}
    for kernel in ("sdpa", "flex_attention"):
        model = with_kernel(name, kernel)
        with intervene.windowed(model, {(0, 0): 6, (0, 1): 20, (2, 1): 3}, sinks=3), torch.no_grad():
            found[kernel] = model(ids, attention_mask=padding).logits[padding.bool()]
    difference = (found["sdpa"] - found["flex_attention"]).norm()
    assert difference < 1e-5 * (found["sdpa"] - logits(with_kernel(name, "sdpa"), ids)[padding.bool()]).norm()


@pytest.mark.parametrize("name", ["llama", "gemma2", "yarn scaling"])
def test_generation_with_a_cache_is_generation_without(name):
    model, folder = case(name)
    locked, ids = LockedModel.of(model, folder), tokens(1, 12)
    key_heads = {(layer, head // 2) for layer, head in locked.heads}
    contexts = (
        lambda: intervene.scaled(model, locked, of_all(locked, 0.2, 1, 1, 1)),
        lambda: intervene.windowed(model, dict.fromkeys(key_heads, 5)),
        lambda: intervene.without_drift(model, locked),
    )
    for context in contexts:
        with context():
            options = {"max_new_tokens": 12, "do_sample": False}
            cached = model.generate(ids, **options, use_cache=True)
            plain = model.generate(ids, **options, use_cache=False)
        assert torch.equal(cached, plain)


def test_without_position_attention_to_equal_contents_is_uniform():
    """Texts of one token: in the first layer every δ is zero, so without its position term nothing tells keys apart."""
    model = build(FAMILIES["llama"])
    ids = [np.full(LENGTH, 7) for _ in range(8)]
    folder = Path(mkdtemp()) / "run"
    documents = [Document(str(n), f"text {n}") for n in range(8)]
    capture(model, Corpus(documents, ids), folder, CaptureOptions(window=LENGTH, skip_first=0), {"id": "one token"})
    calls: list[Attention] = []
    with watching(model, calls.append):
        logits(model, torch.full((1, LENGTH), 7))
    without = torch.tensor([[0.0, 1.0, 1.0, 1.0]] * 4)
    layer = ScaledLayer.of(LockedModel.of(model, folder), 0, [0, 1, 2, 3], without)
    caught = {}

    def attend(_module, q, k, v, _mask, **options):
        caught["scores"] = q @ k.transpose(-1, -2) * options["scaling"]
        return torch.zeros(1, LENGTH, 4, v.shape[-1]), None

    layer.rewrite(calls[0])(attend)
    assert caught["scores"].abs().max() < 1e-4, "scores of equal contents without their position term are zero"


def test_planes_are_taken_out_and_the_control_takes_as_many_others():
    model, _ = case("llama")
    ids = tokens()
    plain = logits(model, ids)
    chosen = {(0, 1): [0, 2], (2, 3): [5]}
    control = intervene.random_planes(model, chosen, seed=3)
    assert {head: len(planes) for head, planes in control.items()} == {(0, 1): 2, (2, 3): 1}
    assert not any(set(control[head]) & set(planes) for head, planes in chosen.items())
    seen = []
    with intervene.without_planes(model, chosen), watching(model, seen.append):
        assert not torch.allclose(logits(model, ids), plain)
    with intervene.without_planes(model, {(0, 0): []}):
        assert torch.equal(logits(model, ids), plain)
    with (
        pytest.raises(CaptureError, match="expected planes 0 to 5 of head l00h01, got 6"),
        intervene.without_planes(model, {(0, 1): [6]}),
    ):
        pass


def test_drift_and_its_control_subtract_as_much():
    model, folder = case("llama")
    locked = LockedModel.of(model, folder)
    beta, mean = locked.means(1).drift([0, 1])
    head = open_run(folder).head(1, 2)
    assert np.allclose(beta[1], head.moments.total_k.cov_xt / head.moments.total_k.var_t, atol=1e-6)
    assert np.allclose(mean[1], head.moments.total_k.mean[-1], atol=1e-4)
    plain = logits(model, tokens())
    with intervene.without_drift(model, locked):
        straight = logits(model, tokens())
    with intervene.without_drift(model, locked, control=1):
        other = logits(model, tokens())
    assert not torch.allclose(straight, plain)
    assert not torch.allclose(straight, other)


def test_runs_of_other_models_are_refused():
    model, folder = case("llama")
    _, other = case("llama3 scaling")
    with pytest.raises(CaptureError, match="layer 0: the run has other rotary frequencies"):
        LockedModel.of(model, other)
    with pytest.raises(CaptureError, match="is a run of another model"):
        LockedModel.of(case("gemma2")[0], folder)
    fresh = build(FAMILIES["llama"])
    with torch.no_grad():
        next(fresh.parameters()).add_(0.1)
    with pytest.raises(CaptureError, match="other weights of this model"):
        LockedModel.of(fresh, folder)
    with (
        pytest.raises(CaptureError, match="has no head l09h00"),
        intervene.scaled(model, folder, {(9, 0): (0, 1, 1, 1)}),
    ):
        pass
    with (
        pytest.raises(CaptureError, match="expected key heads 0 to 1 in layer 1, got 7"),
        intervene.windowed(model, {(1, 7): 4}),
    ):
        pass
    with pytest.raises(CaptureError, match="expected a captured run"):
        LockedModel.of(model, 3)


def test_contexts_do_not_nest_and_errors_undo_them():
    model, folder = case("llama")
    plain = logits(model, tokens())
    with (
        pytest.raises(CaptureError, match="one intervention at a time"),
        intervene.windowed(model, {(0, 0): 4}),
        intervene.windowed(model, {(1, 0): 4}),
    ):
        pass
    with pytest.raises(RuntimeError, match="on purpose"), intervene.scaled(model, folder, {(0, 0): (0, 1, 1, 1)}):
        raise RuntimeError("on purpose")
    assert torch.equal(logits(model, tokens()), plain)


def test_left_padding_is_refused():
    model, folder = case("llama")
    ids = tokens(2, 20)
    positions = torch.stack([torch.arange(20), (torch.arange(20) - 5).clamp_min(0)])
    with intervene.scaled(model, folder, {(0, 0): (0, 1, 1, 1)}), pytest.raises(CaptureError, match="pad on the right"):
        model(ids, position_ids=positions)
