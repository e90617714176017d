"""The Fisher information of a term against its definition and against what taking some of the term away does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.cause import ablation, cuts, intervene
from qkscope.cause.ablation import MEASURES, NextTokens, costs, octaves
from qkscope.cause.effects import EffectOptions, EffectsJob
from qkscope.cause.fisher import check_differentiable, fisher_draws
from qkscope.cause.lockedmodel import LockedModel
from qkscope.errors import CaptureError
from tests.cause.test_intervene import LENGTH, case, tokens

HEAD = (1, 2)

pytestmark = pytest.mark.xdist_group("intervene llama")


@pytest.fixture
def locked() -> LockedModel:
    model, folder = case("llama")
    return LockedModel.of(model, folder)


def log_chances(locked: LockedModel, ids: torch.Tensor, term: int, factor: float) -> torch.Tensor:
    factors = tuple(factor if term == other else 1.0 for other in range(4))
    with intervene.scaled(locked.model, locked, {HEAD: factors}), torch.no_grad():
        return locked.model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("term", range(4))
def test_draws_are_unbiased_and_half_of_them_is_the_divergence(locked, term):
    ids, step = tokens(1, 24)[0], 0.05
    high, low = (log_chances(locked, ids, term, 1 + side * step) for side in (1, -1))
    plain = log_chances(locked, ids, term, 1.0)
    slope = (high - low) / (2 * step)
    exact = float((plain.exp() * slope.square()).sum(-1).mean())
    draws = fisher_draws(locked, [HEAD], ids[None], 300, 0)[:, 0, 0, term]
    assert abs(draws.mean() - exact) < 4 * draws.std() / len(draws) ** 0.5 + 0.01 * exact
    divergence = float((plain.exp() * (plain - low)).sum(-1).mean())
    assert divergence == pytest.approx(step**2 * exact / 2, rel=0.25)


def test_batches_give_each_document_its_own_draws_and_weights_stay_trainable(locked):
    ids = tokens(3, 20)
    together = fisher_draws(locked, locked.heads[:3], ids, 40, 1)
    assert together.shape == (40, 3, 3, 4)
    alone = fisher_draws(locked, locked.heads[:3], ids[1:2], 40, 1)
    ratio = together[:, 1].mean() / alone[:, 0].mean()
    assert 0.5 < ratio < 2
    assert all(parameter.requires_grad for parameter in locked.model.parameters())


def predictions(locked: LockedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log probabilities of the token after each, by the model's own logits."""
    with torch.no_grad():
        return locked.model(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize("known", [True, False], ids=["from hidden states", "from the model's own logits"])
def test_predictions_a_few_tokens_at_a_time_are_those_of_all_at_once(locked, monkeypatch, known):
    document = tokens(1, 40)[0]
    changes = {
        "window": lambda: intervene.windowed(locked.model, {(0, 0): 1}, sinks=0),
        "other": lambda: intervene.windowed(locked.model, {(1, 0): 2}, sinks=0),
    }
    whole = costs(locked.model, document, changes)
    draws = fisher_draws(locked, [HEAD], document[None], 3, 0)
    assert NextTokens.of(locked.model, document).losses(document).numpy() == pytest.approx(
        -predictions(locked, document).gather(-1, document[1:, None])[:, 0].numpy(), rel=1e-5
    )
    monkeypatch.setattr(ablation, "_LOGITS", 7 * 96)  # seven tokens of a vocabulary of 96
    if not known:
        monkeypatch.setattr(ablation, "output_head", lambda *_: None)
    in_parts = costs(locked.model, document, changes)
    assert all(in_parts[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-7) for name in changes)
    assert fisher_draws(locked, [HEAD], document[None], 3, 0) == pytest.approx(draws, rel=1e-3)


def test_costs_are_zero_for_no_change_and_add_up_over_octaves(locked):
    document = tokens(1, 40)[0]
    sums = costs(locked.model, document, {
        "nothing": lambda: intervene.windowed(locked.model, {(0, 0): 400}),
        "window": lambda: intervene.windowed(locked.model, {(0, 0): 1}, sinks=0),
    })  # fmt: skip
    assert sums["nothing"].shape == (6, len(MEASURES))
    assert np.allclose(sums["nothing"][:, :2], 0.0)
    plain = predictions(locked, document)
    with intervene.windowed(locked.model, {(0, 0): 1}, sinks=0):
        changed = predictions(locked, document)
    kl = (plain.exp() * (plain - changed)).sum(-1)
    assert sums["window"][:, 0].sum() == pytest.approx(float(kl.sum()), rel=1e-4)
    assert sums["window"][2, 0] == pytest.approx(float(kl[4:8].sum()), rel=1e-4)
    assert sums["window"][:, 3].sum() == 39
    assert octaves(9).tolist() == [0, 0, 1, 1, 2, 2, 2, 2, 3]


def test_a_killed_job_resumes_and_gives_the_same(locked, tmp_path, monkeypatch):
    documents = [tokens(1, 30)[0], tokens(2, 30)[1], tokens(1, 22)[0], tokens(2, 24)[1]]
    options = EffectOptions(passes=8, measure=2)

    def job() -> EffectsJob:
        return EffectsJob(locked, documents, options, tmp_path / "parts", locked.heads[:4])

    whole = EffectsJob(locked, documents, options, tmp_path / "other", locked.heads[:4]).run()
    calls = []

    def killed(*arguments, **more):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return ablation.costs(*arguments, **more)

    monkeypatch.setattr("qkscope.cause.effects.costs", killed)
    with pytest.raises(KeyboardInterrupt):
        job().run()
    told = []
    resumed = job()
    resumed.on_progress = lambda done, in_all: told.append((done, in_all))
    found = resumed.run()
    assert len(calls) == 5, "two documents were kept"
    assert np.array_equal(found.fisher, whole.fisher)
    assert all(np.array_equal(found.together[name][1], whole.together[name][1]) for name in whole.together)
    assert found.single.keys() == whole.single.keys()
    assert told[-1][0] == pytest.approx(told[-1][1])
    assert set(found.chosen.values()) == {"named"}
    assert set(found.chosen) == set(locked.heads[:4])


def test_a_run_with_other_means_does_not_resume_the_job_of_another(locked, tmp_path):
    """It may have the same tokens, with other sinks or layers."""
    ids = [np.random.default_rng(0).integers(3, 93, LENGTH) for _ in range(8)]
    folders = []
    for skip_first in (4, 8):
        documents = [Document(str(n), f"text {n}") for n in range(8)]
        options = CaptureOptions(window=LENGTH, skip_first=skip_first)
        folders.append(capture(locked.model, Corpus(documents, ids), tmp_path / f"run-{skip_first}", options, {}))
    jobs = [
        EffectsJob(LockedModel.of(locked.model, folder), [tokens(1, 30)[0]], EffectOptions(), tmp_path / "parts")
        for folder in folders
    ]
    found = [job._stored_or_computed("part", lambda n=n: {"x": np.array([n])})["x"][0] for n, job in enumerate(jobs)]
    assert found == [0, 1]


def test_what_cannot_be_had_is_refused(locked):
    with pytest.raises(CaptureError, match="no document has 16 tokens"):
        Corpus.of([np.arange(5)], None, locked.model).cut(100, locked.model)
    with pytest.raises(CaptureError, match="expected documents of 64 tokens or more, got one of 20"):
        cuts.cut_losses(locked.model, [tokens(1, 20)[0]], {}, 4)
    with pytest.raises(CaptureError, match="has no head l07h00"):
        EffectsJob(locked, [tokens(1, 20)[0]], EffectOptions(), locked.run.folder, [(7, 0)]).run()
    with pytest.raises(CaptureError, match="gamma"):
        EffectOptions(gamma=0)
    quantised = torch.nn.Linear(2, 2)
    quantised.weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(CaptureError, match="no gradient passes through this model"):
        check_differentiable(quantised)


def test_a_second_copy_costs_what_cut_heads_cannot_see(locked):
    ids = tokens(1, 80)[0]
    heads = {(layer, head): 8 for layer in range(4) for head in range(2)}
    losses = cuts.cut_losses(locked.model, [ids, ids.flip(0)], {"none": {}, "all": heads}, 4)
    assert losses["none", "plain"].shape == (2, 2)
    assert losses["none", "plain"][0, 1] == 79
    assert losses["none", "copy"][0, 1] == 39, "the tokens that follow the first of the second copy"
    copy = torch.cat([ids[:40], ids[:40]])
    nll = -predictions(locked, copy).gather(-1, copy[1:, None])[40:].sum()
    assert losses["none", "copy"][0, 0] == pytest.approx(float(nll), rel=1e-5)
    assert losses["all", "plain"][0, 0] != losses["none", "plain"][0, 0]
