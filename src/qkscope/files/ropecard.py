"""Description of a dataset's rotary encoding, in ``dataset.json`` under ``rope`` or on the command line.

{"theta": 500000}                                 frequencies θ^(−2m/dims), over all coordinates unless dims is smaller
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
    """Descriptions of single layers; None: no rotary encoding."""

    @property
    def known(self) -> bool:
        """Whether any layer is described."""
        return self.everywhere is not None or bool(self.layers)

    def nope(self, layer: int) -> bool | None:
        """Whether a layer has no rotary encoding; None if the layer is not described."""
        if layer in self.layers:
            return self.layers[layer] is None
        return None if self.everywhere is None else False

    def of(self, layer: int, d: int) -> Rope | None:
        """The encoding of a layer whose vectors have length d; None if it has none or is not described."""
        description = self.layers.get(layer, self.everywhere) if layer in self.layers else self.everywhere
        if description is None:
            return None
        dims = int(description.get("dims") or d)
        listed = description.get("frequencies")
        planes = dims // 2 if listed is None else len(listed)
        start = int(description.get("start", 0))
        if start + 2 * planes > d:
            raise DatasetError(
                f"the rotary encoding of layer {layer} rotates coordinates {start} to {start + 2 * planes - 1}, but "
                f"its vectors have length {d}; correct rope in dataset.json, or --rope-theta"
            )
        if listed is None:
            frequencies = float(description["theta"]) ** (-2.0 * np.arange(planes) / dims)
        else:
            frequencies = np.array(listed, dtype=float)
        return Rope(frequencies, description.get("layout", "half"), start, int(description.get("sign", 1)))


def parse_rotary(description: Any, where: str) -> RopeCard:
    """Check a description; ``where`` names its location in messages."""
    if description is None:
        return RopeCard()
    if not isinstance(description, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(description).__name__}")
    layers = description.get("layers")
    if layers is None:
        return RopeCard(_checked(description, where))
    if not isinstance(layers, dict) or not all(str(key).isdecimal() and len(str(key)) < 6 for key in layers):
        raise DatasetError(f"{where}: expected rope.layers to be an object with layer numbers as keys")
    rest = {key: value for key, value in description.items() if key != "layers"}
    by_layer = {
        int(key): None if entry is None else _checked(entry, f"{where}, layer {key}") for key, entry in layers.items()
    }
    return RopeCard(_checked(rest, where) if rest else None, by_layer)


def _checked(description: Any, where: str) -> dict[str, Any]:
    if not isinstance(description, dict):
        raise DatasetError(f"{where}: expected rope to be an object, got {type(description).__name__}")
    unknown = [key for key in description if key not in _KEYS]
    if unknown:
        raise DatasetError(f"{where}: unknown key rope.{unknown[0]}; valid keys are {', '.join(_KEYS)}, layers")
    if ("theta" in description) == ("frequencies" in description):
        raise DatasetError(f"{where}: expected rope to have exactly one of theta and frequencies")
    numbers = description.get("frequencies", [description.get("theta")])
    if not isinstance(numbers, list) or not 0 < len(numbers) <= 4096 or not all(map(_finite, numbers)):
        raise DatasetError(f"{where}: expected rope.theta, or each of rope.frequencies, to be a finite number")
    if "theta" in description and description["theta"] <= 1:
        raise DatasetError(f"{where}: expected rope.theta above 1, got {description['theta']}")
    for key, lowest in (("dims", 2), ("start", 0)):
        value = description.get(key, lowest)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= 65536:
            raise DatasetError(f"{where}: expected rope.{key} to be an integer of at least {lowest}, got {value!r}")
    if description.get("layout", "half") not in get_args(Layout) or description.get("sign", 1) not in (1, -1):
        raise DatasetError(f"{where}: expected rope.layout to be {' or '.join(get_args(Layout))}, rope.sign 1 or -1")
    return dict(description)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
