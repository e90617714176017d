"""Draw the pictures of pages in README and docs from the demo, in Chromium.

python -m tools.screenshots [--demo demo]    # writes docs/images/{report,explorer,text,card}.png

Each picture records a digest of the templates, styles and scripts it was drawn with; a test compares it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
from pathlib import Path

from PIL import Image, PngImagePlugin
from playwright.sync_api import Page
from tests.browser.chromium import launch

ROOT = Path(__file__).parent.parent
IMAGES, ASSETS = ROOT / "docs" / "images", ROOT / "src" / "qkscope" / "report" / "assets"
DRAWN_WITH = "pages"
"""Key of the digest in a picture."""
NAMES = ("report", "explorer", "text", "card")
HEAD = "l04h01"


def pages_digest() -> str:
    """Digest of everything that decides what the pages look like."""
    files = sorted(path for path in ASSETS.iterdir() if path.suffix in (".j2", ".css", ".js"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()[:16]


def save(png: bytes, name: str) -> None:
    """Write a picture in its own colours, with the digest."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    notes = PngImagePlugin.PngInfo()
    notes.add_text(DRAWN_WITH, pages_digest())
    picture.save(IMAGES / f"{name}.png", optimize=True, pnginfo=notes)
    print(f"wrote {IMAGES / name}.png")


def _opened(page: Page, path: Path, hash_part: str = "") -> Page:
    page.goto(path.resolve().as_uri() + hash_part)
    page.wait_for_timeout(2500)
    return page


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=ROOT / "demo")
    demo = parser.parse_args().demo
    if not (demo / "report" / "report.html").exists():
        subprocess.run([sys.executable, "-m", "qkscope", "demo", "-o", str(demo)], check=True)
    with launch() as browser:
        if browser is None:
            sys.exit("this needs Chromium")
        page = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
        save(_opened(page, demo / "report" / "report.html").screenshot(), "report")
        save(_opened(page, demo / "report" / "explorer.html").screenshot(), "explorer")
        runs = page.locator("#run option").all_inner_texts()
        _opened(page, demo / "report" / "explorer.html", f"#{HEAD};run={runs[-1]}")
        save(page.locator("#text").screenshot(), "text")
        last = demo / "runs" / runs[-1]
    card = demo / "card.png"
    subprocess.run([sys.executable, "-m", "qkscope", "card", str(last), HEAD, "-o", str(card)], check=True)
    save(card.read_bytes(), "card")


if __name__ == "__main__":
    main()
