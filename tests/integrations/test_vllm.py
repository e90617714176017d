"""Capture inside vLLM beside the same weights outside of it.

vLLM wants packages of its own versions, so it is not one of the packages of the tests; ``make vllm`` installs it beside
them and runs this file.
"""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
vllm = pytest.importorskip("vllm", reason="make vllm installs it")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

import qkscope  # noqa: E402
from qkscope.capture.options import CaptureOptions  # noqa: E402
from qkscope.errors import CaptureError, ConfigError  # noqa: E402
from qkscope.integrations import capture_vllm  # noqa: E402
from tests.capture.families import families  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other versions
WINDOW = 192
FAMILIES = ["llama", "qwen3", "mistral", "yarn scaling"]
ENGINE = {"model_impl": "transformers", "enforce_eager": True, "dtype": "float32", "enable_prefix_caching": False}
ENGINE |= {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 1024}


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    documents = [rng.integers(3, 93, rng.integers(80, 230)) for _ in range(9)]
    return [*documents, documents[2]]  # one of them twice


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Models and their runs outside of vLLM, which changes classes of transformers for the rest of the process."""
    place = tmp_path_factory.mktemp("vllm")
    for name in FAMILIES:
        torch.manual_seed(0)
        config = families()[name].config
        config.head_dim = 32  # vLLM's attention on a CPU takes multiples of 32
        tf.AutoModelForCausalLM.from_config(config).save_pretrained(place / name / "model")
        model = tf.AutoModelForCausalLM.from_pretrained(place / name / "model", attn_implementation="sdpa").eval()
        qkscope.capture_model(
            model.float(), documents(), window=WINDOW, name="m", folder=place / name / "run", progress=False
        )
    return place


@contextmanager
def serving(model: Path, **options):
    """An engine, gone before there is another."""
    llm = vllm.LLM(str(model), **ENGINE | options)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=FAMILIES)
def place(request, models):
    """The run of a model outside, and an engine that serves it."""
    folder = models / request.param
    with serving(folder / "model") as llm:
        yield qkscope.open(folder / "run", model="m"), llm


@pytest.mark.parametrize("batch", [1, 4])
def test_tables_are_those_of_the_model_outside(place, batch):
    plain, llm = place
    run = capture_vllm(llm, documents(), window=WINDOW, name="m", options=CaptureOptions(batch=batch), progress=False)
    tables = qkscope.tables(run)
    for table, expected in qkscope.tables(plain).items():
        got = tables[table]
        for column in expected.select_dtypes("number"):
            a, b = (frame[column].to_numpy(float) for frame in (got, expected))
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=f"{table}.{column}")
            scale = np.nanmax(np.abs(b), initial=1e-6)
            # Standard errors and tests near their thresholds amplify what single precision rounds.
            assert np.nanmax(np.abs(a - b), initial=0) < 5e-3 * scale, f"{table}.{column}"
    manifest, outside = (one.source.run.raw for one in (run, plain))
    assert manifest["model"]["attention"] == "vllm"
    assert manifest["versions"]["vllm"]
    for key in ("tokens", "window", "q_per_kv", "layers"):
        assert manifest[key] == outside[key], key


def test_moments_and_loss_are_those_of_the_model_outside(place):
    plain, llm = place
    run = capture_vllm(llm, documents(), window=WINDOW, name="m", options=CaptureOptions(batch=10), progress=False)
    for layer in run.source.run.raw["layers"]:
        got, expected = (one.source.run.layer(layer["layer"]) for one in (run, plain))
        for kind in ("q", "k"):
            a, b = (getattr(moments, kind) for moments in (got, expected))
            spread = np.sqrt(np.einsum("...ii->...i", b.scatter))
            scale = spread[..., :, None] * spread[..., None, :]
            np.testing.assert_array_less(np.abs(a.scatter - b.scatter), 1e-5 * scale + 1e-12)
    losses = [one.source.run.raw["loss"]["mean"] for one in (run, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_engine_is_left_as_it_was(place):
    llm = place[1]
    prompt = [{"prompt_token_ids": documents()[0].tolist()}]
    params = vllm.SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    before = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    capture_vllm(llm, documents()[:2], window=64, progress=False)
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == before
    decoder = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.model
    assert "forward" not in vars(decoder)


def test_documents_that_do_not_fit_are_told(place):
    with pytest.raises(CaptureError, match="the engine reads at most 255 and predicts one more; choose a smaller"):
        capture_vllm(place[1], [np.arange(300) % 90 + 3], window=300, progress=False)
    with pytest.raises(ConfigError, match="images are captured without an engine"):
        capture_vllm(place[1], [{"input_ids": [1, 2]}], progress=False)
    with pytest.raises(ConfigError, match="leave out prefill"):
        capture_vllm(place[1], documents(), options=CaptureOptions(prefill=64), progress=False)


def test_engines_that_cannot_be_watched_are_told(models):
    folder = models / "llama" / "model"
    with (
        serving(folder, max_num_batched_tokens=64, enable_chunked_prefill=True) as chunked,
        pytest.raises(CaptureError, match=r"not a whole document; create it with .* of at least 100"),
    ):
        capture_vllm(chunked, [np.arange(100) % 90 + 3], window=100, progress=False)
    with (
        serving(folder, model_impl="vllm") as own,
        pytest.raises(CaptureError, match="LlamaForCausalLM is vLLM's own code"),
    ):
        capture_vllm(own, documents(), progress=False)
