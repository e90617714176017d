"""Write llms.txt, a list of the documentation for programs that read (llmstxt.org), from the navigation of mkdocs.yml.

python -m tools.llms

That of the repository leads to the sources of pages; tools/site.py writes one for the site, which leads to its pages.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator

import yaml

from tools.site import API, ELSEWHERE, ROOT

FILE = ROOT / "llms.txt"
ABOUT = {
    "models.md": "every model class of transformers: captured, or refused for which reason",
    "notebook.md": "a notebook that measures a bundled checkpoint: parts of the scores, two heads, all heads",
    "tinyrope-training.md": "how the bundled model family was trained",
    "benchmarks.md": "what was tried for speed, expected and found",
    "changelog.md": "what changed in which version",
    "demo.md": "the report and the explorer of the bundled model family",
    "gallery.md": "every figure, with what it shows",
    **{f"api-{module}.md": f"reference of the module {module}" for module in API},
}
"""Pages that README.md's table does not describe."""


class _Loader(yaml.SafeLoader):
    """YAML with Python's tags left out."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def llms_text(link: Callable[[str], str | None]) -> str:
    """Name, summary and sections of links; ``link`` gives the address of a page, or None to leave it out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    lines = [f"# {project['name']}", "", f"> {project['description']}", "", introduction()]
    descriptions = described()
    for section, entries in (item for part in navigation[1:] for item in part.items()):
        listed = [(title, page, address) for title, page in pages(entries) if (address := link(page)) is not None]
        links = [f"- [{title}]({address}): {descriptions[page]}" for title, page, address in listed]
        lines += ["", f"## {section}", "", *links] if links else []
    return "\n".join(lines) + "\n"


def introduction() -> str:
    """Return the first paragraph of README.md."""
    return textwrap.fill((ROOT / "README.md").read_text().split("\n\n")[1].replace("**", ""), 120)


def described() -> dict[str, str]:
    """Return a line about each page: from README.md's table, else from ABOUT."""
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    plain = {path: re.sub(r" \(\[.*?\]\(.*?\)\)", "", text) for path, text in rows}
    return ABOUT | {ELSEWHERE.get(path, path.removeprefix("docs/")): text for path, text in plain.items()}


def pages(entries: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Titles and files of a section of the navigation."""
    return (item for entry in entries for item in entry.items())


def in_repository(page: str) -> str | None:
    """The source of a page; None if it is made when the site is built."""
    source = next((source for source, name in ELSEWHERE.items() if name == page), f"docs/{page}")
    return source if (ROOT / source).exists() else None


def on_site(page: str) -> str:
    """The page as mkdocs builds it."""
    return page.replace(".md", ".html")


if __name__ == "__main__":
    FILE.write_text(llms_text(in_repository))
