"""Measurements while a model trains: the training does not notice, the study can be drawn, the cost is bounded."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from typer.testing import CliRunner

import qkscope
from qkscope.cli.main import app
from qkscope.errors import ConfigError
from qkscope.integrations import QkScopeCallback, TrainingStudy

STEPS, EVERY = 12, 4
TEXTS = [np.random.default_rng(seed).integers(3, 60, 80) for seed in range(8)]


@pytest.fixture(autouse=True)
def heard(monkeypatch) -> None:
    """Let log messages reach the test, whatever earlier commands set up."""
    monkeypatch.setattr(logging.getLogger("qkscope"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("qkscope"), "level", logging.INFO)


class Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 60, (48,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attention_dropout=0.2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(folder: Path, *callbacks: QkScopeCallback, report_to: str = "none") -> Trainer:
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=report_to, seed=7,
        use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, train_dataset=Tokens(), callbacks=list(callbacks))
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Trainer:
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def watched(tmp_path_factory, monkeypatch_module) -> tuple[Trainer, Path]:
    place = tmp_path_factory.mktemp("watched")
    monkeypatch_module.setenv("TENSORBOARD_LOGGING_DIR", str(place / "board"))
    callback = QkScopeCallback(TEXTS, every=EVERY, max_share=None, window=64, ends=False)
    return trained(place, callback, report_to="tensorboard"), place


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_the_loss_is_bit_identical_with_and_without_measurements(plain, watched):
    """Dropout draws random numbers in every step, so a capture that drew any would change all losses after it."""
    assert len(losses(plain)) == STEPS
    assert losses(plain) == losses(watched[0])
    states = [trainer.model.state_dict() for trainer in (plain, watched[0])]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.usefixtures("few_figures")
def test_runs_and_a_study_file_are_there_and_a_report_draws_them(watched, tmp_path):
    study = watched[1] / "qkscope"
    listed = yaml.safe_load((study / "study.yaml").read_text())["runs"]
    assert [item["step"] for item in listed] == [4, 8, 12]
    run = qkscope.open(study / listed[-1]["path"])
    assert len(qkscope.position(run)) == 8
    done = CliRunner().invoke(app, ["report", str(study / "study.yaml"), "-o", str(tmp_path / "report"), "-q"])
    assert done.exit_code == 0, done.output
    drawn = {str(path.parent.relative_to(tmp_path / "report")) for path in (tmp_path / "report").rglob("*.png")}
    assert any(name.endswith("07_position_signal") for name in drawn), drawn


def test_a_handful_of_numbers_are_logged_where_the_trainer_reports(watched):
    trainer, place = watched
    logged = [entry for entry in trainer.state.log_history if "qkscope/decay" in entry]
    assert [entry["step"] for entry in logged] == [4, 8, 12]
    run = qkscope.open(place / "qkscope" / "step-0000008")
    expected = float(qkscope.position(run, intervals=False)["decay"].mean())
    assert logged[1]["qkscope/decay"] == pytest.approx(expected, rel=1e-9)
    shares = {kind: logged[1][f"qkscope/class_{kind}"] for kind in set(qkscope.scores(run)["head_class"])}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {"qkscope/position_share", "qkscope/mass_sink", "qkscope/bias_full_window"} < set(logged[1])
    roles = qkscope.roles(run, intervals=False)
    assert logged[1]["qkscope/max_logit"] == pytest.approx(roles["max_logit"].max(), rel=1e-9)
    assert logged[1]["qkscope/entropy"] == pytest.approx(roles["entropy"].mean(), rel=1e-9)


def test_the_numbers_are_in_tensorboard_files(watched):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer, place = watched
    board = accumulator.EventAccumulator(str(place / "board"))
    board.Reload()
    tag = next(tag for tag in board.Tags()["scalars"] if tag.endswith("qkscope/decay"))
    assert [event.step for event in board.Scalars(tag)] == [4, 8, 12]
    logged = [entry["qkscope/decay"] for entry in trainer.state.log_history if "qkscope/decay" in entry]
    np.testing.assert_allclose([event.value for event in board.Scalars(tag)], logged, rtol=1e-6)


class Clock:
    """Time that passes only as told."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("qkscope.integrations.trainer.time.monotonic", lambda: self.now)


@pytest.fixture
def timed_study(tmp_path, monkeypatch):
    """A study whose clock is ours: a step takes 1 s, a measurement 3 s, a timed pass 0."""
    clock = Clock(monkeypatch)

    def capture(*given, **_):
        clock.now += 3.0
        return given

    monkeypatch.setattr("qkscope.integrations.trainer.capture_corpus", capture)
    monkeypatch.setattr("qkscope.integrations.trainer.logged", lambda _: {"x": 1.0})
    monkeypatch.setattr("qkscope.integrations.trainer.seconds_of_a_pass", lambda *_: 0.0)
    monkeypatch.setattr(TrainingStudy, "_write_study", lambda _: None)
    return TrainingStudy(tmp_path / "study", TEXTS, every=10, max_share=0.05, ends=False), clock


def test_measurements_wait_until_they_are_within_their_share(timed_study):
    study, clock = timed_study
    network = model()
    for step in range(1, 501):
        clock.now += 1.0
        study.at(step, network)
        assert study.share <= 0.08  # the first is estimated at 2 s and takes 3
        if step > 100:
            assert study.share <= 0.05
    assert len(study.measured) == 8
    study.close(500, network)
    assert study.share <= 0.05


def test_the_first_and_the_last_step_are_measured_whatever_they_cost(timed_study, caplog):
    study, clock = timed_study
    study.ends = study._at_first = True
    for step in range(1, 36):
        clock.now += 1.0
        study.at(step, model())
    study.close(35, model())
    assert study.measured == [1, 35]
    assert study.skipped == 2  # that of step 30 is made at the end
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "the measurement of step 10 is put off: all measurements together may take at most 5.0% of the time "
        "(max_share)",
        "skipped 2 measurements that fell due, to keep within max_share; raise it, or every, or give fewer texts",
    ]


def test_nothing_is_skipped_that_fits(timed_study, caplog):
    study, clock = timed_study
    for step in range(1, 201):
        clock.now += 100.0
        study.at(step, model())
    study.close(200, model())
    assert (len(study.measured), study.skipped) == (20, 0)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_one_measurement_is_one(timed_study, caplog):
    study, clock = timed_study
    clock.now += 100.0
    study.at(10, model())
    with caplog.at_level("INFO", logger="qkscope"):
        study.skipped = 1
        study.close(10, model())
    assert "1 measurement in " in caplog.text
    assert "skipped 1 measurement that fell due, " in caplog.text


def test_a_resumed_study_does_not_begin_again(tmp_path):
    for steps in ((1, 2), (3, 4)):
        study = TrainingStudy(tmp_path / "study", TEXTS, every=100, window=64)
        for step in steps:
            study.at(step, model())
    assert [path.name for path in (tmp_path / "study").glob("step-*")] == ["step-0000001"]
    other = TrainingStudy(tmp_path / "other", TEXTS, every=100, window=64, ends=False)
    other.at(1, model())
    assert not other.measured


def test_without_a_share_every_step_that_is_due_is_measured(timed_study):
    study, clock = timed_study
    study.max_share = None
    for step in range(1, 51):
        clock.now += 1.0
        study.at(step, model())
    assert study.measured == [10, 20, 30, 40, 50]


def test_the_share_is_kept_and_said_in_a_real_loop(tmp_path, caplog):
    network, optimizer = model().train(), None
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    study = TrainingStudy(tmp_path / "study", TEXTS, every=1, max_share=0.5, window=64, ends=False)
    step = 0
    while len(study.measured) < 2 and step < 3000:
        step += 1
        loss = network(input_ids=torch.randint(3, 60, (4, 64)), labels=torch.randint(3, 60, (4, 64))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        study.at(step, network)
    assert len(study.measured) == 2
    assert network.training
    with caplog.at_level("INFO", logger="qkscope"):
        study.close(step, network)
    assert study.spent > 0  # whether it is within its bound depends on what else this machine does
    assert "2 measurements in" in caplog.text
    assert "at most 50.0%" in caplog.text


def test_random_states_of_python_and_numpy_are_left_alone(tmp_path):
    network = model()
    study = TrainingStudy(tmp_path / "study", TEXTS, every=1, max_share=None, window=64)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    before = random.getstate(), json.dumps(np.random.get_state()[1].tolist()), torch.get_rng_state()  # noqa: NPY002
    study.at(1, network)
    after = random.getstate(), json.dumps(np.random.get_state()[1].tolist()), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_a_training_that_goes_on_adds_to_its_study(tmp_path):
    for steps in ((4, 8), (12,)):
        study = TrainingStudy(
            tmp_path / "study", TEXTS, every=4, max_share=None, window=64, phase="pre-training", ends=False
        )
        for step in steps:
            study.at(step, model())
    listed = yaml.safe_load((tmp_path / "study" / "study.yaml").read_text())["runs"]
    assert [(item["step"], item["phase"]) for item in listed] == [(n, "pre-training") for n in (4, 8, 12)]


def test_what_goes_wrong_ends_the_measurements_not_the_training(tmp_path, caplog, plain):
    trainer = trained(tmp_path, QkScopeCallback([np.full(80, 99)], every=4, max_share=None))
    assert "measurements stopped: text 0 has token 99, but the model has tokens 0 to 63" in caplog.text
    assert losses(trainer) == losses(plain)


@pytest.mark.parametrize("wrong", [{"every": 0}, {"max_share": 0.0}, {"max_share": 1.5}])
def test_options_that_mean_nothing_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match="expected every ≥ 1 and 0 < max_share ≤ 1"):
        TrainingStudy(tmp_path, TEXTS, **wrong)
