"""A model inside a serving engine: documents one after the other in one pass, each measured as if it were alone.

The engine here is as plain as can be; tests/integrations/test_vllm.py has a real one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import qkscope
from qkscope.api import capture_corpus
from qkscope.capture.corpus import Corpus
from qkscope.errors import CaptureError
from tests.capture.families import build, families, matrix, tf, torch

from qkscope.capture.call import RequestSpan, documents_of, request_output  # isort: skip
from qkscope.capture.options import CaptureOptions  # isort: skip
from qkscope.capture.serve import ServingEngine  # isort: skip

NAME = "flattened_for_tests"


class PlainEngine(ServingEngine):
    """Reads documents one after the other, so many tokens in one pass, each seeing only itself."""

    def __init__(self, model, tokens: int = 10**6, ahead: int = 0) -> None:
        self.model, self.decoder, self.tokens, self.ahead = model, model.model, tokens, ahead
        self.versions, self.longest, self.passes = {"plain engine": "1"}, 400, 0
        self._spans: list[RequestSpan] = []
        self.decoder.config._attn_implementation = NAME
        tf.modeling_utils.ALL_ATTENTION_FUNCTIONS[NAME] = self.attend

    def prefill(self, documents: Sequence[np.ndarray]) -> None:
        waiting = list(documents)
        while waiting:
            together, room = [], self.tokens
            while waiting and (not together or len(waiting[0]) <= room):
                together.append(waiting.pop(0))
                room -= len(together[-1])
            starts = np.cumsum([0, *map(len, together)]).tolist()
            self._spans = [RequestSpan(at, self.ahead, len(d)) for at, d in zip(starts, together, strict=False)]
            positions = np.concatenate([np.arange(len(d)) for d in together])
            ids = torch.from_numpy(np.concatenate(together))[None]
            with torch.no_grad():
                self.decoder(input_ids=ids, position_ids=torch.from_numpy(positions)[None], use_cache=False)
            self.passes += 1

    def spans(self) -> list[RequestSpan]:
        return self._spans

    def logits(self, hidden):
        return self.model.lm_head(hidden)

    def attend(self, _module, query, key, value, *_, scaling, **__):
        parts = [[x[:, :, span.columns] for x in (query, key, value)] for span in self._spans]
        options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
        done = [torch.nn.functional.scaled_dot_product_attention(*part, **options) for part in parts]
        return torch.cat(done, 2)[0].transpose(0, 1).flatten(1), None


@pytest.fixture(autouse=True)
def registry():
    yield
    tf.modeling_utils.ALL_ATTENTION_FUNCTIONS._local_mapping.pop(NAME, None)


def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    documents = [rng.integers(3, 93, rng.integers(80, 160)) for _ in range(7)]
    return [*documents, documents[2], documents[6]]  # two of them twice


def run_of(engine: PlainEngine, batch: int = 1):
    corpus, options = Corpus.of(documents(), None, engine.decoder), CaptureOptions(batch=batch)
    return capture_corpus(engine, engine.decoder, corpus, window=128, folder=None, name="m", options=options, bar=False)


@pytest.mark.parametrize("name", matrix(["llama", "qwen3", "yarn scaling", "glm4"], ["glm4"]))
@pytest.mark.parametrize(("batch", "tokens"), [(1, 10**6), (9, 10**6), (9, 400)])
def test_sums_are_those_of_the_model_alone(name, batch, tokens):
    model = build(families()[name])
    alone = qkscope.capture_model(model, documents(), window=128, name="m", progress=False)
    engine = PlainEngine(model, tokens)
    run = run_of(engine, batch)
    assert engine.passes < 2 * len(documents()) if batch > 1 else engine.passes >= len(documents())
    for layer in alone.source.run.raw["layers"]:
        got, expected = (one.source.run.layer(layer["layer"], undone=True) for one in (run, alone))
        for kind in ("q", "k"):
            a, b = getattr(got, kind), getattr(expected, kind)
            np.testing.assert_array_equal(a.n, b.n)
            np.testing.assert_allclose(a.mean, b.mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.unrotated_q, expected.unrotated_q, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(got.reach, expected.reach, rtol=1e-4, atol=1e-4)
    losses = [one.source.run.raw["loss"]["mean"] for one in (run, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    points = [one.head(1, 2).projections("k").sort_values(["example_id", "position"]) for one in (run, alone)]
    for column in ("example_id", "position"):
        np.testing.assert_array_equal(points[0][column], points[1][column])
    np.testing.assert_allclose(points[0]["pc0"].abs(), points[1]["pc0"].abs(), rtol=1e-3, atol=1e-3)
    assert run.source.run.raw["versions"]["plain engine"] == "1"
    assert "forward" not in vars(engine.decoder)


def test_a_part_of_a_document_is_told():
    with pytest.raises(
        CaptureError, match=r"from position 64 on, not a whole document; create it with .* at least 128"
    ):
        run_of(PlainEngine(build(families()["llama"]), ahead=64))


def test_equal_documents_are_read_in_turn():
    sent = [np.arange(5), np.arange(3), np.arange(5)]
    flat = np.concatenate([np.arange(5), np.arange(3)])
    spans = [RequestSpan(0, 0, 5), RequestSpan(5, 0, 3)]
    assert documents_of(spans, flat, sent) == [0, 1]
    assert documents_of(spans[:1], flat, sent, read=[0, 1]) == [2]
    with pytest.raises(CaptureError, match="not a whole document"):
        documents_of(spans[:1], flat, sent, read=[0, 1, 2])


@pytest.mark.parametrize("shape", [(9, 6), (1, 9, 6), (1, 9, 2, 3)])
def test_the_output_of_a_request_however_it_is_laid_out(shape):
    output = torch.arange(54.0).reshape(shape)
    part = request_output(output, RequestSpan(4, 0, 3))
    assert part.reshape(1, 3, 6).tolist() == output.reshape(9, 6)[None, 4:7].tolist()
