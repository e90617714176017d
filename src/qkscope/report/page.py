"""HTML from templates: user input is escaped, nothing is loaded from the network, scripts are inside the page."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)
"""The page may run and show only what it contains, and may not use the network."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("qkscope.report", "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.globals["policy"] = CONTENT_POLICY
    environment.globals["asset"] = asset
    environment.filters["json"] = as_json
    return environment


def render(template: str, **values: Any) -> str:
    """A page from its template."""
    return _environment().get_template(template).render(**values)


def asset(name: str) -> Markup:
    """The text of a style sheet or script in the assets folder."""
    return Markup((files("qkscope.report") / "assets" / name).read_text(encoding="utf-8"))


def as_json(value: Any) -> Markup:
    """JSON that is safe inside a script element whatever its strings contain.

    >>> as_json({"label": "</script><b>"})
    Markup('{"label":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}')
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def data_url(png: bytes) -> str:
    """A PNG image as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
