"""A model in the middle of its training, for a moment: in evaluation mode, and afterwards as it was found."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from qkscope.capture.attention import backbone, plain_model


@contextmanager
def in_evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode within the block; after it, the mode of every module and all random states are as before."""
    modes = {module: module.training for module in plain_model(model).modules()}
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng():
        plain_model(model).eval()
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            random.setstate(of_python)
            np.random.set_state(of_numpy)  # noqa: NPY002


def seconds_of_a_pass(model: Any, ids: np.ndarray) -> float:
    """How long the decoder takes for one document without gradients, the first pass included."""
    decoder = backbone(model)
    weight: Any = decoder.get_input_embeddings().weight
    began = time.monotonic()
    with torch.no_grad():
        hidden = decoder(input_ids=torch.from_numpy(ids)[None].to(weight.device), use_cache=False).last_hidden_state
        float(hidden[0, -1, 0])  # waits for a GPU
    return time.monotonic() - began
