"""Models as people hold them: compiled, adapted, quantised, in training mode, spread over devices."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qkscope
from qkscope.capture.model import load_model, load_tokenizer
from qkscope.capture.options import ModelOptions
from qkscope.errors import CaptureError
from qkscope.files.runfolder import RunFolder
from tests.capture.conftest import save
from tests.capture.families import build, families
from tests.capture.test_run import all_bytes, do, same_moments

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # torch's compiler imports what torch deprecates
    pytest.mark.filterwarnings(
        "ignore:`is_gradient_checkpointing:FutureWarning"
    ),  # peft asks transformers in its old words
]


def same_run(a: Path, b: Path, rtol: float) -> None:
    for layer in RunFolder.open(a).raw["layers"]:
        one, other = (RunFolder.open(folder).layer(layer["layer"]) for folder in (a, b))
        same_moments(one.q, other.q, rtol)
        same_moments(one.k, other.k, rtol)


def test_a_compiled_model_gives_the_bytes_of_the_plain_one(model, ids, tmp_path):
    plain = do(model, ids[:4], tmp_path / "plain")
    compiled = do(torch.compile(model), ids[:4], tmp_path / "compiled")
    assert all_bytes(plain) == all_bytes(compiled)


@pytest.mark.slow
def test_a_model_whose_layers_are_compiled_gives_them_too(model, ids, tmp_path):
    plain = do(model, ids[:4], tmp_path / "plain")
    for layer in model.model.layers:
        layer.compile()
    assert all_bytes(plain) == all_bytes(do(model, ids[:4], tmp_path / "compiled"))


def test_a_model_with_adapters_is_captured_with_them(model, ids, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    chosen = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), chosen).eval()
    run = do(adapted, ids[:4], tmp_path / "adapted")
    merged = do(copy.deepcopy(adapted).merge_and_unload().eval(), ids[:4], tmp_path / "merged")
    same_run(run, merged, 1e-4)
    plain = do(model, ids[:4], tmp_path / "plain")
    with pytest.raises(AssertionError):
        same_run(run, plain, 1e-2)
    with qkscope.intervene.scaled(adapted, run, {(0, 0): (0.0, 1.0, 1.0, 1.0)}), torch.no_grad():
        adapted(torch.from_numpy(ids[0])[None])


def test_a_quantised_model_is_captured_as_it_computes(model, ids, tmp_path):
    torchao = pytest.importorskip("torchao")
    quantised = copy.deepcopy(model)
    torchao.quantization.quantize_(quantised, torchao.quantization.Int8WeightOnlyConfig())
    run = do(quantised, ids[:4], tmp_path / "int8")
    same_run(run, do(model, ids[:4], tmp_path / "plain"), 0.2)
    weights = [RunFolder.open(folder).raw["model"]["weights"] for folder in (run, tmp_path / "plain")]
    assert weights[0] != weights[1], "the digest is of the weights that compute"


def test_a_model_that_is_spread_by_hooks_is_captured(model, ids, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    plain = do(model, ids[:4], tmp_path / "plain")
    spread = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    same_run(plain, do(spread, ids[:4], tmp_path / "spread"), 1e-6)


def test_a_copy_for_several_processes_is_unwrapped(model, ids, tmp_path):
    plain = do(model, ids[:4], tmp_path / "plain")
    assert all_bytes(plain) == all_bytes(do(nn.DataParallel(model), ids[:4], tmp_path / "parallel"))


def test_a_model_in_training_mode_is_told_to_stop(ids, tmp_path):
    model = build(families()["llama"]).train()
    with pytest.raises(CaptureError, match=r"the model is in training mode.*; call model.eval\(\)"):
        do(model, ids[:2], tmp_path / "run")
    assert model.training


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), np.zeros(3), "a name"])
def test_what_is_no_model_is_told(thing, ids, tmp_path):
    with pytest.raises(CaptureError, match=f"expected a transformers model, got {type(thing).__name__}"):
        do(thing, ids[:2], tmp_path / "run")


def test_the_model_is_left_as_it_was(model, ids, tmp_path):
    model.requires_grad_(requires_grad=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random, hooks = torch.get_rng_state(), [len(m._forward_hooks) for m in model.modules()]
    do(model, ids[:4], tmp_path / "run")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_a_model_split_over_processes_is_refused(model, ids, tmp_path):
    """A model split like by tensor parallelism and FSDP, here over one process."""
    from torch import distributed
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        norm = model.model.norm
        mesh = init_device_mesh("cpu", (1,))
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
        with pytest.raises(CaptureError, match=r"split over several processes .* device_map='auto'"):
            do(model, ids[:4], tmp_path / "run")
    finally:
        distributed.destroy_process_group()
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_folder_with_an_adapter_is_captured_as_the_model_with_it(ids, tmp_path):
    peft = pytest.importorskip("peft")
    base = save(families()["llama"], tmp_path / "base")
    options = ModelOptions(str(base), dtype="float32", device="cpu")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(
        load_model(options), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(base)
    from_folder = load_model(replace(options, model=str(tmp_path / "adapter")))
    assert type(load_tokenizer(replace(options, model=str(tmp_path / "adapter")))) is type(load_tokenizer(options))
    with_adapter = do(from_folder, ids[:4], tmp_path / "with")
    same_run(with_adapter, do(adapted.eval(), ids[:4], tmp_path / "in-memory"), 1e-6)
    without = do(load_model(options), ids[:4], tmp_path / "without")
    q = [RunFolder.open(folder).layer(0).q.mean for folder in (with_adapter, without)]
    assert not np.allclose(*q, rtol=1e-3)
