"""report.pdf: the report as printed by an installed Chromium or Chrome."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from qkscope.errors import ConfigError, TableError
from qkscope.files.atomic import atomic_path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
SECONDS = 180
_QUIET = ("--headless", "--disable-gpu", "--disable-extensions", "--disable-background-networking", "--no-first-run",
          "--disable-sync", "--disable-component-update", "--disable-dev-shm-usage")  # fmt: skip


def browser() -> str:
    """The browser that prints; an error says how to do without one."""
    found = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if found is None:
        raise ConfigError("--pdf needs Chromium or Chrome, and none was found; install one, or print report.html")
    return found


def print_page(browser: str, page: Path, output: Path) -> None:
    """Print a page, with the browser's own profile left alone."""
    as_root = ("--no-sandbox",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory() as profile, atomic_path(output) as temporary:
        command = [browser, *_QUIET, *as_root, f"--user-data-dir={profile}", "--no-pdf-header-footer",
                   f"--print-to-pdf={temporary.resolve()}", page.resolve().as_uri()]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TableError(f"{browser} did not print {page} within {SECONDS} s; print it yourself") from None
        if not temporary.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise TableError(f"{browser} could not print {page} ({last}); print it yourself")
