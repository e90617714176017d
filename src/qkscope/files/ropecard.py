"""What a dataset may say of its rotary encoding, in ``dataset.json`` under ``rope`` or on the command line.

{"theta": 500000}                                 frequencies θ^(−2m/dims), over all coordinates unless dims says less
{"frequencies": [1.0, 0.7, …], "layout": "interleaved", "start": 0, "sign": 1}
{"layers": {"0": {"theta": 10000}, "3": null}}    layer by layer; null: no rotary encoding
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from qkscope.core.rope import Layout, Rope
from qkscope.errors import DatasetError

_KEYS = ("theta", "dims", "frequencies", "layout", "start", "sign")


@dataclass(frozen=True)
class RopeCard:
    """The rotary encoding of every layer, as far as it is known."""

    everywhere: Mapping[str, Any] | None = None
    """Description for all layers."""
    layers: Mapping[int, Mapping[str, Any] | None] = field(default_factory=dict)
    """Descriptions of single layers; None: without rotary encoding."""

    @property
    def known(self) -> bool:
        """Whether anything was said."""
        return self.everywhere is not None or bool(self.layers)

    def nope(self, layer: int) -> bool | None:
        """Whether a layer is without rotary encoding; None if nothing was said of it."""
        if layer in self.layers:
            return self.layers[layer] is None
        return None if self.everywhere is None else False

    def of(self, layer: int, d: int) -> Rope | None:
        """The encoding of a layer whose vectors have length d; None where it has none or nothing is known."""
        said = self.layers.get(layer, self.everywhere) if layer in self.layers else self.everywhere
        if said is None:
            return None
        dims = int(said.get("dims") or d)
        given = said.get("frequencies")
        planes = dims // 2 if given is None else len(given)
        start = int(said.get("start", 0))
        if start + 2 * planes > d:
            raise DatasetError(
                f"the rotary encoding of layer {layer} turns coordinates {start} to {start + 2 * planes - 1}, and its "
                f"vectors have {d}; correct rope in dataset.json, or --rope-theta"
            )
        if given is None:
            frequencies = float(said["theta"]) ** (-2.0 * np.arange(planes) / dims)
        else:
            frequencies = np.array(given, dtype=float)
        return Rope(frequencies, said.get("layout", "half"), start, int(said.get("sign", 1)))


def parse_rotary(said: Any, where: str) -> RopeCard:
    """Check a description; ``where`` names its place in messages."""
    if said is None:
        return RopeCard()
    if not isinstance(said, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(said).__name__}")
    layers = said.get("layers")
    if layers is None:
        return RopeCard(_checked(said, where))
    if not isinstance(layers, dict) or not all(str(key).isdecimal() and len(str(key)) < 6 for key in layers):
        raise DatasetError(f"{where}: expected rope.layers to be an object with layer numbers as keys")
    rest = {key: value for key, value in said.items() if key != "layers"}
    each = {int(key): None if one is None else _checked(one, f"{where}, layer {key}") for key, one in layers.items()}
    return RopeCard(_checked(rest, where) if rest else None, each)


def _checked(said: Any, where: str) -> dict[str, Any]:
    if not isinstance(said, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(said).__name__}")
    odd = [key for key in said if key not in _KEYS]
    if odd:
        raise DatasetError(f"{where}: unknown key rope.{odd[0]}; valid keys are {', '.join(_KEYS)}, layers")
    if ("theta" in said) == ("frequencies" in said):
        raise DatasetError(f"{where}: expected rope to have either theta or frequencies")
    numbers = said.get("frequencies", [said.get("theta")])
    if not isinstance(numbers, list) or not 0 < len(numbers) <= 4096 or not all(map(_finite, numbers)):
        raise DatasetError(f"{where}: expected theta, or each of frequencies, to be a finite number")
    if "theta" in said and said["theta"] <= 1:
        raise DatasetError(f"{where}: expected rope.theta above 1, got {said['theta']}")
    for key, lowest in (("dims", 2), ("start", 0)):
        value = said.get(key, lowest)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= 65536:
            raise DatasetError(f"{where}: expected rope.{key} to be a whole number of {lowest} or more, got {value!r}")
    if said.get("layout", "half") not in get_args(Layout) or said.get("sign", 1) not in (1, -1):
        raise DatasetError(f"{where}: expected rope.layout to be {' or '.join(get_args(Layout))}, rope.sign 1 or -1")
    return dict(said)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
