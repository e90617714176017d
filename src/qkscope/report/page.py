"""HTML from templates: user input is escaped, nothing is loaded from the network, scripts are inside the page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qkscope.errors import ConfigError, TableError
from qkscope.files.atomic import atomic_path

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


def data_url(picture: bytes, form: str) -> str:
    """A picture of this form, such as png, as a data URL."""
    return f"data:image/{form};base64,{base64.b64encode(picture).decode('ascii')}"


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
SECONDS = 180
_QUIET = ("--headless", "--disable-gpu", "--disable-extensions", "--disable-background-networking", "--no-first-run",
          "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage")  # fmt: skip


def browser() -> str:
    """The browser that prints; if there is none, the error says what to do instead."""
    executable = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if executable is None:
        raise ConfigError("--pdf needs Chromium or Chrome, and none was found; install one, or print report.html")
    return executable


def print_page(browser: str, page: Path, output: Path) -> None:
    """Print a page to pdf without touching the browser's own profile."""
    as_root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory() as profile, atomic_path(output) as temporary:
        command = [browser, *_QUIET, *as_root, f"--user-data-dir={profile}", "--no-pdf-header-footer",
                   f"--print-to-pdf={temporary.resolve()}", page.resolve().as_uri()]  # fmt: skip
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TableError(f"{browser} did not print {page} within {SECONDS} s; print it yourself") from None
        if not temporary.exists():
            last = (process.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise TableError(f"{browser} could not print {page} ({last}); print it yourself")
