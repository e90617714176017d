"""A manifest that nobody's capture wrote: refused with the place in it, before anything is allocated."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from qkscope.errors import DatasetError
from qkscope.files.manifest import WIDE_WINDOW, problem
from qkscope.files.runfolder import FORMAT, RunFolder

GOOD: dict[str, Any] = {
    "format": FORMAT,
    "window": 4096,
    "q_per_kv": 2,
    "stage": "post-rope",
    "model": {"id": "some/model"},
    "corpus": "abc",
    "options": {"buckets": 16, "sample": 500},
    "documents": [{"name": "a", "tokens": 100}],
    "layers": [
        {
            "layer": 0,
            "query_heads": [0, 1, 2, 3],
            "key_heads": [0, 1],
            "scaling": 0.125,
            "sliding_window": None,
            "rope": {"frequencies": [1.0, 0.1], "layout": "half", "start": 0, "sign": 1},
        }
    ],
}

BAD = [
    (("window",), 2**24, "window: 16777216 tokens, while the longest document has 100"),
    (("window",), 10**15, "window: input should be less than or equal to 16777216, got 1000000000000000"),
    (("window",), -1, "window: input should be greater than or equal to 1, got -1"),
    (("window",), "4096", "window: input should be a valid integer, got '4096'"),
    (("window",), True, "window: input should be a valid integer, got True"),
    (("window",), None, "window: input should be a valid integer, got None"),
    (("q_per_kv",), 0, "q_per_kv: input should be greater than or equal to 1, got 0"),
    (("stage",), "mid-rope", "stage: input should be 'post-rope' or 'pre-rope', got 'mid-rope'"),
    (("model",), [], "model: input should be a valid dictionary, got []"),
    (("options", "buckets"), 10**9, "options.buckets: input should be less than or equal to 4096, got 1000000000"),
    (("documents", 0, "tokens"), -5, "documents.0.tokens: input should be greater than or equal to 0, got -5"),
    (
        ("documents", 0, "positions"),
        [[0, 60], [70, 111]],
        "documents: document 0 has positions that are not those of 100 tokens in order",
    ),
    (
        ("documents", 0, "positions"),
        [[50, 100], [0, 50]],
        "documents: document 0 has positions that are not those of 100 tokens in order",
    ),
    (
        ("documents", 0, "positions"),
        [[4000, 4100]],
        "documents: the longest has 4100 tokens, more than the window of 4096",
    ),
    (("documents", 0, "positions"), [[0]], "documents.0.positions.0.1: field required"),
    (("layers",), [], "layers: list should have at least 1 item after validation, not 0, got []"),
    (("layers", 0, "layer"), 10**6, "layers.0.layer: input should be less than 10000, got 1000000"),
    (("layers", 0, "query_heads"), "all", "layers.0.query_heads: input should be a valid list, got 'all'"),
    (("layers", 0, "query_heads", 1), -1, "layers.0.query_heads.1: input should be greater than or equal to 0, got -1"),
    (("layers", 0, "key_heads"), [0], "layers: layer 0 is missing key head 1, which one of its query heads reads"),
    (("layers", 0, "scaling"), float("nan"), "layers.0.scaling: input should be a finite number, got nan"),
    (("layers", 0, "sliding_window"), 0, "layers.0.sliding_window: input should be greater than 0, got 0"),
    (
        ("layers", 0, "rope", "layout"),
        "../../etc",
        "layers.0.rope.layout: input should be 'half' or 'interleaved', got '../../etc'",
    ),
    (("layers", 0, "rope", "sign"), 2, "layers.0.rope.sign: input should be -1 or 1, got 2"),
    (
        ("layers", 0, "rope", "frequencies", 0),
        float("inf"),
        "layers.0.rope.frequencies.0: input should be a finite number, got inf",
    ),
]


def changed(place: tuple[str | int, ...], value: object) -> dict[str, Any]:
    manifest: Any = copy.deepcopy(GOOD)
    inner = manifest
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return manifest


def test_a_good_manifest_passes():
    assert problem(GOOD) is None
    assert problem(GOOD | {"window": WIDE_WINDOW, "something": "new"}) is None


@pytest.mark.parametrize(("place", "value", "said"), BAD)
def test_what_is_wrong_is_said_with_its_place(place, value, said):
    assert problem(changed(place, value)) == said


@pytest.mark.parametrize("key", ["window", "q_per_kv", "stage", "model", "corpus", "options", "documents", "layers"])
def test_what_is_missing_is_said(key):
    assert problem({name: value for name, value in GOOD.items() if name != key}) == f"{key}: field required"


def test_two_layers_of_one_number_are_refused():
    assert problem(GOOD | {"layers": GOOD["layers"] * 2}) == "layers: layer 0 appears twice"


def test_opening_says_it_with_the_file(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(GOOD | {"window": 0}))
    with pytest.raises(DatasetError, match=r"run\.json is not a valid manifest \(window: .*\); capture the run again"):
        RunFolder.open(tmp_path)


def test_depth_without_end_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(DatasetError, match="cannot be read"):
        RunFolder.open(tmp_path)
