"""The dark version of a drawing: the same artists in other colours, so that nothing is prepared or laid out again."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import Collection
from matplotlib.colors import Colormap, ListedColormap, to_hex, to_rgba, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.figures.style import CLASSES, DRIFT, FACE, FAMILIES, PHASES, SEPARATION, K, Q, readable_on

GROUND = "#14181c"
"""The ground of the pages in the dark."""
_LIGHTEST = 0.96
_GROUND_LIGHTNESS = 0.094
_PALETTES = (
    (HEAD_CLASSES.values(), ("#9cc7e6", "#e86a5c", "#3f7fb0", "#b8902c", "#767c84", "#33383e")),
    (CLASSES.values(), ("#9cc7e6", "#4f87aa", "#e2745c", "#b8902c", "#767c84")),
    (FAMILIES, ("#e69f00", "#1fb68c", "#a98ad6", "#56b4e9", "#b8923c", "#d68cb6", "#a8adb3", "#c98f3a")),
    (PHASES, ("#8ba4e0", "#d98c3f", "#5fae92", "#5f7fae", "#e06a48", "#b094da", "#b9a44c", "#6fa39a")),
    ((Q, K, DRIFT, SEPARATION), ("#4a90c8", "#ffb4ae", "#b98431", "#6f9a63")),
)
DARK = {light: dark for palette, in_the_dark in _PALETTES for light, dark in zip(palette, in_the_dark, strict=True)}
"""Colours of the palette in the dark; every other colour keeps its hue, and its lightness is mirrored."""


def darkened(drawing: Figure) -> Figure:
    """Recolour every artist of a drawing for a dark ground, in place."""
    for mappable in _mappables(drawing):
        mappable.set_cmap(_mirrored_map(mappable.get_cmap()))
    for artist in drawing.findobj():
        _recolour(artist)
    drawing.patch.set_facecolor(GROUND)
    return drawing


def dark(colour: Any) -> tuple[float, float, float, float]:
    """A colour in the dark, with its transparency.

    >>> to_hex(dark("white")), to_hex(dark("#981428"))
    ('#14181c', '#ffb4ae')
    """
    red, green, blue, alpha = to_rgba(colour)
    named = DARK.get(to_hex((red, green, blue)))
    if named is not None:
        return to_rgba(named, alpha)
    if min(red, green, blue) > 0.99:
        return to_rgba(GROUND, alpha)
    return tuple(mirrored(np.array([[red, green, blue, alpha]]))[0].tolist())


def mirrored(colours: np.ndarray) -> np.ndarray:
    """Rows of RGBA with hue and, as far as it goes, chroma kept, and lightness mirrored: white becomes the ground."""
    rgb = colours[:, :3]
    high, low = rgb.max(1, keepdims=True), rgb.min(1, keepdims=True)
    lightness, chroma = (high + low) / 2, high - low
    turned = _GROUND_LIGHTNESS + (1 - lightness) * (_LIGHTEST - _GROUND_LIGHTNESS)
    largest = 1 - np.abs(2 * turned - 1)  # chroma that a colour of this lightness can have
    scale = np.minimum(1.0, largest / np.maximum(chroma, 1e-9))
    return np.hstack([np.clip(turned + (rgb - lightness) * scale, 0, 1), colours[:, 3:]])


def _mirrored_map(colours: Colormap) -> Colormap:
    return ListedColormap(mirrored(colours(np.linspace(0, 1, 256))), name=f"{colours.name} in the dark")


def _mappables(drawing: Figure) -> list[ScalarMappable]:
    """Everything that is coloured by a map: images, clouds, and colour bars, which follow their image if it has one."""
    return [m for m in drawing.findobj() if isinstance(m, ScalarMappable) and m.get_array() is not None]


def _recolour(artist: Artist) -> None:
    if isinstance(artist, Text):
        face = getattr(artist, FACE, None)
        artist.set_color(dark(artist.get_color()) if face is None else readable_on(dark(face)))
        box = artist.get_bbox_patch()
        if box is not None:
            _set(box, "facecolor", "edgecolor")
    elif isinstance(artist, Line2D):
        _set(artist, "color", "markerfacecolor", "markeredgecolor")
    elif isinstance(artist, Patch):
        _set(artist, "facecolor", "edgecolor")
    elif isinstance(artist, Collection) and artist.get_array() is None:
        for name in ("facecolor", "edgecolor"):
            colours = getattr(artist, f"get_{name}")()
            if len(colours):
                getattr(artist, f"set_{name}")(_all_dark(to_rgba_array(colours)))
    elif isinstance(artist, Axes):
        for axis in (artist.xaxis, artist.yaxis):
            axis.set_tick_params(color=dark("#333333"), labelcolor=dark("#222222"), grid_color=dark("#e4e4e4"))
    for effect in artist.get_path_effects() or ():
        strokes = getattr(effect, "_gc", {})
        if "foreground" in strokes:
            strokes["foreground"] = dark(strokes["foreground"])


def _set(artist: Artist, *names: str) -> None:
    """Recolour; all colours are read first, since some follow others."""
    colours = {name: getattr(artist, f"get_{name}")() for name in names}
    for name, colour in colours.items():
        if not (isinstance(colour, str) and colour == "none") and to_rgba(colour)[3] > 0:
            getattr(artist, f"set_{name}")(dark(colour))


def _all_dark(colours: np.ndarray) -> np.ndarray:
    """Rows of RGBA in the dark; of few different ones, those of the palette are looked up."""
    different, index = np.unique(colours, axis=0, return_inverse=True)
    if len(different) > 64:
        return mirrored(colours)
    return np.array([dark(tuple(colour)) for colour in different.tolist()])[index.reshape(-1)]
