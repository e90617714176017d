"""The pages that mkdocs builds into site/: those of docs/, and others made from README, docstrings, notebook and demo.

python -m tools.site [--check]

Without --check it writes build/docs, which mkdocs.yml reads. With it, it looks through site/ for what a browser would
fetch from elsewhere.
"""

import argparse
import ast
import base64
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES, SITE, REPORT = ROOT / "build" / "docs", ROOT / "site", ROOT / "demo" / "report"
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/NOTES.md": "benchmarks.md",
    "examples/tinyrope/README.md": "tinyrope-training.md",
    "examples/first_look.ipynb": "notebook.md",
}
"""Pages whose source is not in docs/."""
API: dict[str, dict[str, tuple[str, ...]]] = {
    "qkscope": {
        "Open or make a run": ("open", "capture_model", "Run", "Head"),
        "Export a run": ("export_run", "read_export"),
        "Tables": (
            *("analyze", "tables", "heads", "qk", "rotated", "position"),
            *("planes", "distance", "scores", "reach", "roles", "plasticity"),
            *("head_table", "pca", "rotation"),
        ),
        "Answers": ("top", "compare"),
        "Report": ("write_report",),
        "Hub": ("push", "pull", "PushOptions"),
        "Cause": ("effects", "cut", "cut_cache", "cut_costs"),
        "Errors and version": ("QkscopeError", "__version__"),
    },
    "qkscope.plot": {"Pictures": ("pc_plane", "ab_plane", "complement", "card", "map", "distance", "draw_heads")},
    "qkscope.intervene": {
        "Interventions": ("scaled", "windowed", "without_planes", "without_drift"),
        "Controls": ("random_planes",),
        "Types": ("LayerHead", "Factors"),
    },
}
"""The public names, in the order of the reference."""
SOURCES = {
    "qkscope": "src/qkscope/__init__.py",
    "qkscope.plot": "src/qkscope/plot.py",
    "qkscope.intervene": "src/qkscope/cause/intervene.py",
}
GROUPS = {
    "front": "Overview",
    "qk-pca": "Principal components",
    "qk-rotation": "Rotation model",
    "rope": "RoPE planes",
    "distance": "Distance",
    "plasticity": "Plasticity",
    "cause": "Cause",
    "audit": "Audit",
}
"""Folders of figures, in the order of the gallery."""
REMOTE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
CSS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
SCRIPT = re.compile(r"(?:\bfrom|\bimport|\bimportScripts|\bfetch)\b\s*\(?\s*[\"'`]((?:https?:)?//[^\"'`]+)")
FETCHED = ("stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest")
"""Kinds of <link> that a browser follows by itself."""


def write_pages() -> None:
    """Write everything that mkdocs reads, anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("theme"))
    for page in sorted((ROOT / "docs").glob("*.md")):
        (PAGES / page.name).write_text(relinked(page.read_text(), page.parent))
    for source, name in ELSEWHERE.items():
        path = ROOT / source
        made = notebook_markdown(path) if path.suffix == ".ipynb" else relinked(path.read_text(), path.parent)
        (PAGES / name).write_text(made)
    for module, groups in API.items():
        (PAGES / f"api-{module}.md").write_text(api_markdown(module, groups))
    (PAGES / "gallery.md").write_text(gallery_markdown())
    (PAGES / "demo.md").write_text(demo_markdown())
    from tools import llms  # which reads this module

    (PAGES / "llms.txt").write_text(llms.llms_text(llms.on_site))


def relinked(text: str, folder: Path) -> str:
    """Return the text with links to files of the repository changed to those of the site; other files are copied."""

    def link(found: re.Match[str]) -> str:
        path = os.path.relpath(folder / found[1], ROOT)
        if path.startswith("docs/"):
            return f"]({path.removeprefix('docs/')}"
        if path in ELSEWHERE:
            return f"]({ELSEWHERE[path]}"
        copy = PAGES / "files" / f"{path}.txt"  # so that browsers show it
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy)
        return f"]({copy.relative_to(PAGES)}"

    return re.sub(r"\]\(([^)#:\s]+)(?=[)#])", link, text)


def notebook_markdown(path: Path) -> str:
    """An executed notebook as a page; its pictures become files, and it is copied itself."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output, f"{cell['id']}-{n}.png") for n, output in enumerate(cell.get("outputs", []))]
    (PAGES / "files").mkdir(exist_ok=True)
    shutil.copy(path, PAGES / "files")
    return "\n\n".join([*parts, f"The notebook itself: [{path.name}](files/{path.name})."]) + "\n"


def _output(output: dict[str, Any], name: str) -> str:
    data = {kind: "".join(lines) for kind, lines in output.get("data", {"text/plain": output.get("text", "")}).items()}
    if "image/png" in data:
        (PAGES / "images" / name).write_bytes(base64.b64decode(data["image/png"]))
        return f"![The picture that the cell draws](images/{name})"
    if "text/html" in data:  # one line, without the frame's own style: the theme has one
        table = re.sub(r"<style.*?</style>|\n\s*", "", data["text/html"], flags=re.DOTALL)
        return table.replace(' border="1" class="dataframe"', "").replace(' style="text-align: right;"', "")
    return f"```text\n{data['text/plain'].rstrip()}\n```"


def api_markdown(module: str, groups: dict[str, tuple[str, ...]]) -> str:
    """A page of the reference: the module's first sentence, then its names."""
    about = ast.get_docstring(ast.parse((ROOT / SOURCES[module]).read_text())) or ""
    first = about.partition("\n\n")[0].removeprefix("qkscope: ")
    lines = [f"# {module}", first[0].upper() + first[1:]]
    for title, names in groups.items():
        lines += [f"## {title}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(lines) + "\n"


def gallery_markdown() -> str:
    """Every figure of the demo with what it shows and what it says; its picture is copied."""
    folders = sorted(path.parent for path in (REPORT / "figures").glob("*/*/figure.png"))
    groups = dict.fromkeys([*GROUPS, *(folder.parent.name for folder in folders)])
    lines = [
        "# Gallery",
        f"The {len(folders)} figures of the [demo](demo.md). [Report](report.md#figures) says which figures there are "
        "and when one is left out. Beside each `figure.png` are `figure.svg`, `data.csv` and a `README.md`.",
    ]
    for group in groups:
        figures = [folder for folder in folders if folder.parent.name == group]
        lines += [f"## {GROUPS.get(group, group)}"] * bool(figures)
        for folder in figures:
            name = f"gallery/{group}/{folder.name}.png"
            (PAGES / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "figure.png", PAGES / name)
            _, *said = re.split(r"^#+ (.+)$", (folder / "README.md").read_text(), flags=re.MULTILINE)
            parts = dict(zip(said[::2], said[1::2], strict=True))
            lines += [f"### {said[0]}", f"![{said[0]}]({name}){{ loading=lazy }}", parts["What it shows"].strip()]
            lines += [parts["In this data"].strip(), f"`figures/{group}/{folder.name}`"]
    return "\n\n".join(lines) + "\n"


def demo_markdown() -> str:
    """The two pages of the demo's report, copied and shown in frames."""
    lines = [
        "---\nhide: [toc]\n---",  # room for the frames
        "# Demo",
        "What `make demo` (or `qkscope demo`) writes: a report and an explorer of training checkpoints of the "
        "[bundled model family](tinyrope.md). Both are single files. The figures alone are in the "
        "[gallery](gallery.md).",
    ]
    (PAGES / "demo").mkdir()
    for name in ("report", "explorer"):
        shutil.copy(REPORT / f"{name}.html", PAGES / "demo")
        lines += [f"## The {name}", f"[Open the {name} on a page of its own](demo/{name}.html)."]
        lines += [
            f'<iframe class="demo" src="demo/{name}.html" title="The {name} of the demo" loading="lazy"></iframe>'
        ]
    return "\n\n".join(lines) + "\n"


class _Page(HTMLParser):
    """The remote references of a page, and whether its policy forbids them."""

    def __init__(self) -> None:
        super().__init__()
        self.remote: list[str] = []
        self.policy = False
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at the attributes that name files."""
        given = {name: value or "" for name, value in attrs}
        self.inside = tag
        self.policy |= given.get("http-equiv", "").lower() == "content-security-policy"
        followed = ["src", "poster", "data", *(["href", "xlink:href"] if tag in ("image", "use") else [])]
        if tag == "link" and set(given.get("rel", "").lower().split()) & set(FETCHED):
            followed.append("href")
        self.remote += [given[name] for name in followed if REMOTE.match(given.get(name, ""))]
        self.remote += [part for part in given.get("srcset", "").split() if REMOTE.match(part)]
        self.remote += CSS.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        """Look into style sheets and scripts within the page."""
        pattern = {"style": CSS, "script": SCRIPT}.get(self.inside)
        self.remote += pattern.findall(data) if pattern else []

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        """Leave style sheets and scripts."""
        self.inside = ""


def remote_references(site: Path) -> Iterator[str]:
    """Yield a line for each remote reference that browsers would fetch, and for each page that does not forbid them."""
    for path in sorted(path for path in site.rglob("*") if path.suffix in (".html", ".css", ".js")):
        page = _Page()
        if path.suffix == ".html":
            page.feed(path.read_text())
            if not page.policy:
                yield f"{path.relative_to(site)}: no Content-Security-Policy"
        else:
            page.remote = (CSS if path.suffix == ".css" else SCRIPT).findall(path.read_text())
        for reference in page.remote:
            yield f"{path.relative_to(site)}: {reference}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="look through site/ instead")
    if not parser.parse_args().check:
        write_pages()
        sys.exit()
    if bad := list(remote_references(SITE)):
        sys.exit("\n".join(["site/ would fetch from elsewhere, or does not forbid it:", *bad]))
    print(f"first page: {SITE / 'index.html'}")
