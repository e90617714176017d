from pathlib import Path

import pytest
import yaml

from qkscope.capture.options import load_capture_config
from qkscope.errors import ConfigError
from qkscope.results.config import load_config, load_configs

ROOT = Path(__file__).parent.parent / "configs"
MODELS = [
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "llama3.2-1b",
    "llama3.2-3b",
    "llama3.2-11b",
    "ministral3-3b",
    "ministral3-8b",
    "ministral3-14b",
]
CHECKPOINTS = [
    "stage1-step-40000",
    "stage1-step-1200000",
    "stage1-step-2400000",
    "stage1-step-3440000",
    "stage2-step-4200000",
    "stage3-step-4720000",
    "lc-4k-to-32k-step-4000",
    "lc-4k-to-32k-step-20000",
    "lc-32k-to-64k-step-4000",
    "lc-32k-to-64k-step-20000",
]


@pytest.mark.parametrize("model", MODELS)
def test_each_model_has_a_config(model):
    config = load_config(ROOT / "attention-plasticity" / f"{model}.yaml")
    assert config.model == model
    assert config.data.dataset == "viktoroo/sniffed-qk"
    assert config.data.revision == f"{model}-longbench-pro-128k-plus"
    assert config.family in ("Qwen3", "Llama 3.2", "Ministral3")


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_each_checkpoint_has_a_config(checkpoint):
    config = load_config(ROOT / "smollm3-checkpoints" / f"{checkpoint}.yaml")
    assert config.model == f"smollm3-3b-{checkpoint}"
    assert config.data.revision == f"smollm3-3b-{checkpoint}-longbench-pro-128k-plus"
    assert config.family == "SmolLM3"


def test_there_are_no_others_and_a_folder_loads_them_all():
    assert {c.model for c in load_configs([ROOT / "attention-plasticity"])} == set(MODELS)
    assert len(load_configs([ROOT / "smollm3-checkpoints"])) == 10
    results = {str(c.output.results_dir) for c in load_configs([ROOT / "smollm3-checkpoints"])}
    assert results == {"results/smollm3_training_progress"}


@pytest.mark.parametrize("name", [*MODELS, *(f"smollm3-3b-{checkpoint}" for checkpoint in CHECKPOINTS)])
def test_each_published_capture_has_a_config_with_known_keys(name):
    said = load_capture_config(ROOT / "capture" / f"{name}.yaml")
    assert said["save_vectors"] == 1 / 8192
    assert said["vector_heads"] == 300
    assert "/" in said["model"]
    assert said["window"] in (4096, 32_768, 40_960, 65_536, 131_072)


def test_the_underscore_spelling_of_the_notes_is_accepted(monkeypatch):
    monkeypatch.chdir(ROOT.parent)
    assert load_configs([Path("configs/attention_plasticity/llama3.2-3b.yaml")])[0].model == "llama3.2-3b"


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


GOOD = {"model": "m", "data": {"dataset": "d"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD | {"modle": "x"}, "unknown key 'modle'; did you mean 'model'?"),
        ({"model": "m", "data": {"dataset": "d", "layer": [1]}}, "unknown key 'data.layer'; did you mean 'layers'?"),
        (GOOD | {"pca": {"zzz": 1}}, "unknown key 'pca.zzz'; valid keys are n_components, high, low"),
        ({"data": {"dataset": "d"}}, "model: Field required"),
        ({"model": "m"}, "data: Field required"),
        (GOOD | {"rotation": {"centering": "mean"}}, "rotation.centering: Input should be 'pooled' or 'within'"),
        (GOOD | {"pca": {"low": 0.9}}, "low (0.9) must not exceed high (0.7)"),
        (GOOD | {"pca": {"n_components": 0}}, "pca.n_components: Input should be greater than or equal to 1"),
        ({"model": "m", "data": {"dataset": "d", "layers": [-1]}}, "data.layers.0: Input should be greater than or"),
        ({"model": "m", "data": {"dataset": "d", "skip_first": -1}}, "data.skip_first: Input should be greater than"),
        (GOOD | {"workers": "many"}, "workers"),
        ("model: [", "is not valid YAML"),
        ("- a\n- b", "expected keys such as 'model', got list"),
        ("", "expected keys such as 'model', got NoneType"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_mistakes_are_named_with_file_and_key(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"modle": "x"}, "unknown key 'modle'; did you mean 'model'?"),
        ({"window": "abc"}, "window"),
        ({"window": 50.5}, "window"),
        ({"buckets": 0}, "buckets: Input should be greater than or equal to 1"),
        ({"batch": "many"}, "batch: Value error, expected batch auto or a number of documents, got 'many'"),
        ({"batch": 0}, "batch: Value error, expected batch auto or a number of documents, got '0'"),
        ({"pre_rope": "no"}, "pre_rope: Input should be a valid boolean"),
        ({"sampler": "loguniform"}, "sampler: Input should be 'uniform', 'log_uniform' or 'all'"),
        ({"layers": [1.0]}, "layers"),
        ({"heads": ["3"]}, "heads"),
        ({"heads": [10_000]}, "heads"),
        ({"save_vectors": 0}, "save_vectors: Input should be greater than 0"),
        ({"save_vectors": 1.5}, "save_vectors: Input should be less than or equal to 1"),
        ({"model": ""}, "model: String should have at least 1 character"),
        ({"vector_heads": -1}, "vector_heads: Input should be greater than or equal to 1"),
    ],
)
def test_mistakes_in_a_capture_are_named(tmp_path, content, message):
    with pytest.raises(ConfigError) as caught:
        load_capture_config(write(tmp_path, content))
    assert message in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing.yaml does not exist"):
        load_configs([tmp_path / "nothing.yaml"])
    with pytest.raises(ConfigError, match=r"holds no \.yaml file"):
        load_configs([tmp_path])
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "latin.yaml")


def test_defaults_are_the_published_ones(tmp_path):
    config = load_config(write(tmp_path, GOOD))
    assert (config.pca.n_components, config.pca.high, config.pca.low) == (10, 0.7, 0.3)
    assert (config.rotation.centering, config.rotation.pairing) == ("pooled", "independent")
    assert config.workers == "auto"
    assert config.data.skip_first == 0


def test_a_capture_takes_what_has_no_bound_as_it_is(tmp_path):
    content = {"seed": 2**31, "skip_first": 2**31, "layers": [0, 3], "heads": "0,4-7", "save_vectors": 1}
    options = load_capture_config(write(tmp_path, content))
    assert {name: options[name] for name in content} == content | {"heads": [0, 4, 5, 6, 7]}
    assert options["buckets"] == 16
