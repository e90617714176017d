"""Load a model and its tokenizer from a Hub id, a folder or a GGUF file; resolve devices; read a model in training."""

from __future__ import annotations

import hashlib
import os
import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qkscope.capture.options import ModelOptions
from qkscope.capture.sums.gramsums import trusted, warm_up
from qkscope.capture.watch import backbone, head_size, plain_model, self_attentions
from qkscope.errors import CaptureError
from qkscope.files.readers import read_json

MOST_LAYERS = 10_000
ROPE = "rope_parameters"
"""Entry of a config with the parameters of the rotary encoding, in some models by layer type."""
ADAPTER_FILE = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """Load only the tokenizer."""
    path_or_id, arguments = location(options)
    with _errors_as_one_line(options), parsed_once():
        if options.tokenizer:
            return AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=options.trust_remote_code)
        if adapted(options) is not None and (Path(options.model) / "tokenizer_config.json").exists():
            return AutoTokenizer.from_pretrained(options.model)
        return AutoTokenizer.from_pretrained(path_or_id, **arguments)


def load_model(options: ModelOptions) -> PreTrainedModel:
    """Load only the model, in evaluation mode."""
    path_or_id, arguments = location(options)
    with _errors_as_one_line(options), parsed_once():
        config = AutoConfig.from_pretrained(path_or_id, **arguments)
        for key, value in (options.config_overrides or {}).items():
            _override(config, key, value)
        refuse_absurd(config)
        _refuse_foreign_kernels(options, config)
        device = resolved_device(options.device)
        device_arguments = {"device_map": "auto" if device == "balanced" else device}
        if options.attn is not None:
            device_arguments["attn_implementation"] = options.attn
        dtype = resolved_dtype(options.dtype, device)
        _warm_up(config, device, dtype)
        loaded: Any = model_class(config).from_pretrained(
            path_or_id, config=config, dtype=dtype, output_loading_info=True, **device_arguments, **arguments
        )
        model: PreTrainedModel = loaded[0]
        _refuse_missing(options, loaded[1])
        if adapted(options) is not None:
            model.load_adapter(options.model)
    forget_parsed()
    model.train(False)
    if getattr(model.config, "_commit_hash", None) is None:
        model.config._commit_hash = _commit(options)
    return model


def _refuse_foreign_kernels(options: ModelOptions, config: PretrainedConfig) -> None:
    """Raise an error if the attention implementation is code that would be downloaded from the Hub and run."""
    names = [options.attn, *(part._attn_implementation for part in (config, config.get_text_config(decoder=True)))]
    for name in names:
        if isinstance(name, str) and re.search(r"[/:]", name):
            raise CaptureError(
                f"the attention implementation {name!r} is code on the Hub, which is not run; use --attn sdpa or eager"
            )


def _warm_up(config: PretrainedConfig, device: str, dtype: torch.dtype | str) -> None:
    """Compile the reduction kernel while weights are loaded; this takes seconds on a machine's first run."""
    d = head_size(config.get_text_config())
    if device.startswith("cuda") and dtype in (torch.bfloat16, torch.float16) and d:
        gpu = torch.device(device) if ":" in device else torch.device("cuda", torch.cuda.current_device())
        warm_up(gpu, dtype, d)


def _commit(options: ModelOptions) -> str | None:
    """Return the commit of a Hub model, from the cache it was loaded from; None for a folder or a file."""
    if Path(options.model).exists() or options.model.endswith(".gguf"):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(options.model, "config.json", revision=options.revision)
    match = re.search(r"/snapshots/([0-9a-f]{40})/", cached) if isinstance(cached, str) else None
    return None if match is None else match[1]


def model_class(config: Any) -> Any:
    """Return the auto class that loads a model: for causal language models, masked language models, or others."""
    architecture = str((getattr(config, "architectures", None) or [""])[0])
    if architecture.endswith("ForMaskedLM") and type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        return AutoModelForMaskedLM
    auto_map = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in auto_map:
        return AutoModelForCausalLM
    return AutoModel


def load_quietly() -> None:
    """Disable progress bars of weight loading, from now on."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf_utils: Any = modeling_gguf_pytorch_utils  # its bar is not disabled by the line above
    if hasattr(gguf_utils, "tqdm"):
        gguf_utils.tqdm = partial(gguf_utils.tqdm, disable=True)


def adapted(options: ModelOptions) -> ModelOptions | None:
    """Return the base model of a local folder with an adapter (PEFT); None for anything else."""
    folder = Path(options.model)
    if not (folder / ADAPTER_FILE).is_file() or (folder / "config.json").exists():
        return None
    try:
        base = read_json(folder / ADAPTER_FILE)["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        base = None
    if not isinstance(base, str) or not base:
        raise CaptureError(f"{options.model} is an adapter, but its {ADAPTER_FILE} does not name its base model")
    return replace(options, model=base, revision=None)


def location(options: ModelOptions) -> tuple[str, dict[str, Any]]:
    """Return location and arguments for ``from_pretrained``; for an adapter, those of its base model."""
    options = adapted(options) or options
    # Not None: transformers would then ask the user.
    arguments: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    arguments |= {"revision": options.revision} if options.revision else {}
    if not options.model.endswith(".gguf"):
        if options.model.startswith(("/", "./", "../", "~")) and not Path(options.model).exists():
            raise CaptureError(f"{options.model} does not exist; give a Hub id, a folder or a GGUF file")
        if options.revision and Path(options.model).is_dir():
            raise CaptureError(
                f"{options.model} is a local folder, and local folders have no revisions; leave out --revision"
            )
        return options.model, arguments
    path = Path(options.model)
    if not path.is_file():
        raise CaptureError(f"{options.model} does not exist; give a Hub id, a folder or a GGUF file")
    if find_spec("gguf") is None:
        raise CaptureError(f"reading {path.name} needs the package gguf; install it with: pip install 'qkscope[gguf]'")
    return str(path.parent), arguments | {"gguf_file": path.name}


@contextmanager
def _errors_as_one_line(options: ModelOptions) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except BaseException as error:  # transformers raises errors of many kinds on a bad config
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        if type(error).__name__ == "UnpicklingError":  # torch advises to load it anyway; we do not
            reason = "a weights file contains objects other than tensors and is not loaded; convert it to safetensors"
        raise CaptureError(f"{options.model} cannot be loaded ({reason})") from None


def is_panic(error: BaseException) -> bool:
    """True if compiled code of a library panicked."""
    return type(error).__name__ == "PanicException"


def _refuse_missing(options: ModelOptions, loading: dict[str, Any]) -> None:
    """Raise an error if weights are missing from the files: they would be random, and no later check would notice."""
    missing = sorted(map(str, loading.get("missing_keys", ())))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CaptureError(
            f"{options.model} is missing weights that its config requires ({missing[0]}{more}); download it again, or "
            "correct its config or --config-overrides"
        )


def describe_model(model: PreTrainedModel) -> dict[str, Any]:
    """Return the manifest's description of the model."""
    decoder = backbone(model)
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": str(decoder.config._attn_implementation),
        "layers": len(self_attentions(model)),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "commit": getattr(model.config, "_commit_hash", None),
        "weights": _digest(model),
    }


def _digest(model: PreTrainedModel) -> str:
    """Return a digest of the weights, from a few values of each; of weights not in memory, from name and shape."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":
            flat = _numbers(parameter).flatten()
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the values of a parameter; of a quantised one, dequantised."""
    values: torch.Tensor = parameter.detach()
    return values.dequantize() if type(values) is not torch.Tensor and hasattr(values, "dequantize") else values


def check_tokens(ids: Iterable[np.ndarray], vocabulary: int) -> None:
    """Raise an error if a token is not in the model's vocabulary."""
    ends = [(int(tokens.min()), int(tokens.max())) for tokens in ids]
    highest = max(high for _, high in ends)
    if highest >= vocabulary or min(low for low, _ in ends) < 0:
        raise CaptureError(
            f"the tokenizer gives token {highest}, but the model's vocabulary has {vocabulary} tokens; "
            "give the model's own with --tokenizer"
        )


def refuse_absurd(config: Any) -> None:
    """Raise an error if a config has too many layers: building such a model would never end."""
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise CaptureError(f"expected at most {MOST_LAYERS} for num_hidden_layers in the model's config, got {layers}")


def _override(config: Any, key: str, value: Any) -> None:
    """Set an entry of a config; entries of a dict are merged into the present ones.

    A rotary parameter may stand alone, such as rope_theta, and counts for every layer type unless one is named.
    """
    target = config.get_text_config(decoder=True)
    rope = getattr(target, ROPE, None) or {}
    by_type = bool(rope) and all(isinstance(entry, dict) for entry in rope.values())
    if any(key in entry for entry in (rope.values() if by_type else [rope])) and not hasattr(target, key):
        key, value = ROPE, {key: value}
    if not isinstance(key, str) or not hasattr(target, key):
        raise CaptureError(f"the model's config has no entry {key!r}")
    if key == ROPE and by_type and isinstance(value, dict) and not set(value) & set(rope):
        value = dict.fromkeys(rope, value)
    setattr(target, key, _merged(key, getattr(target, key), value))


def _merged(name: str, old: Any, new: Any) -> Any:
    """Return the new value, or both dicts in one; an error if text stands where a number was."""
    if isinstance(old, int | float) and not isinstance(old, bool) and isinstance(new, str):
        raise CaptureError(f"--config-overrides: expected {name} to be a number such as {old:g}, got {new!r}")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {key: _merged(key, old.get(key), value) for key, value in new.items()}


def resolved_device(requested: str) -> str:
    """Return the device, with ``auto`` resolved for this machine."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested.startswith("cuda") and not torch.cuda.is_available():
        raise CaptureError(f"--device {requested} needs a GPU, but torch finds none; leave out --device to use the CPU")
    if re.fullmatch(r"cpu|cuda(:\d{1,2})?|balanced|mps|xpu(:\d{1,2})?", requested) is None:
        raise CaptureError(f"unknown device {requested!r}; use cpu, cuda, cuda:1 …, balanced or auto")
    return requested


def resolved_dtype(requested: str, device: str) -> Any:
    """Return the torch dtype; on a GPU, ``auto`` is left to transformers."""
    if requested == "auto":
        return torch.float32 if device == "cpu" else "auto"
    if requested not in DTYPES:
        raise CaptureError(f"unknown dtype {requested!r}; use {', '.join(DTYPES)} or auto")
    return DTYPES[requested]


@contextmanager
def parsed_once() -> Iterator[None]:
    """Make ``gguf.GGUFReader`` return the file that was parsed last, within the block, if it is opened again."""
    try:
        import gguf
    except ImportError:  # needed for GGUF files only
        yield
        return
    original: Any = gguf.GGUFReader

    def reader(path: os.PathLike[str] | str, mode: str = "r") -> Any:
        if mode != "r":
            return original(path, mode)
        status = Path(path).stat()
        return _parsed(original, str(Path(path).resolve()), status.st_mtime_ns, status.st_size)

    gguf.GGUFReader = reader  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def forget_parsed() -> None:
    """Release the file that was parsed last."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(plain: Any, path: str, *_: int) -> Any:
    return plain(path)


@dataclass(frozen=True)
class Gpu:
    """One GPU and its free memory now."""

    name: str
    free_gib: float
    total_gib: float
    kernel: bool
    """True if the reduction kernel runs on it and agrees with torch."""


def gpus() -> list[Gpu]:
    """Return every GPU that torch sees."""
    devices = []
    for number in range(torch.cuda.device_count()):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        kernel = trusted(torch.device("cuda", number), torch.bfloat16, 128)
        devices.append(Gpu(torch.cuda.get_device_name(number), free, total, kernel))
    return devices


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Set evaluation mode within the block; then restore the mode of every module and all random states."""
    modes = {module: module.training for module in plain_model(model).modules()}
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        plain_model(model).eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def seconds_of_a_pass(model: Any, ids: np.ndarray) -> float:
    """Return the seconds of the decoder for one document without gradients; the first pass is included."""
    decoder = backbone(model)
    weight: Any = decoder.get_input_embeddings().weight
    start = time.monotonic()
    with torch.no_grad():
        hidden = decoder(input_ids=torch.from_numpy(ids)[None].to(weight.device), use_cache=False).last_hidden_state
        float(hidden[0, -1, 0])  # waits for a GPU
    return time.monotonic() - start
