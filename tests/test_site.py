"""The documentation site: its navigation, its links, and that it fetches nothing from elsewhere."""

from pathlib import Path

import pytest
import yaml
from tools import site

import qkscope


class _Loader(yaml.SafeLoader):
    """YAML with Python's tags left out."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
POLICY = '<meta http-equiv="Content-Security-Policy" content="default-src \'self\'">'


def pages(part) -> list[str]:
    if isinstance(part, str):
        return [part]
    return [page for inside in (part.values() if isinstance(part, dict) else part) for page in pages(inside)]


def test_the_navigation_names_every_page_once_and_nothing_else():
    named = pages(yaml.load((site.ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])
    made = {*site.ELSEWHERE.values(), *(f"api-{module}.md" for module in site.API), "gallery.md", "demo.md"}
    assert sorted(named) == sorted(made | {page.name for page in (site.ROOT / "docs").glob("*.md")})


def test_the_reference_has_every_public_name():
    named = {name for names in site.API["qkscope"].values() for name in names}
    assert named | {"plot", "intervene"} == set(qkscope.__all__)
    for module, groups in site.API.items():
        source = (site.ROOT / site.SOURCES[module]).read_text()
        assert [name for names in groups.values() for name in names if name not in source] == []


def test_links_are_those_of_the_site(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "PAGES", tmp_path)
    text = "[a](docs/method.md#1-combined-qk-pca) ![b](docs/images/report.png) [c](LICENSE) [d](#speed) [e](https://x.org/y)"
    assert site.relinked(text, site.ROOT) == (
        "[a](method.md#1-combined-qk-pca) ![b](images/report.png) [c](files/LICENSE.txt) [d](#speed) [e](https://x.org/y)"
    )
    assert (tmp_path / "files" / "LICENSE.txt").is_file()
    assert site.relinked("[a](cause.md) [b](../README.md)", site.ROOT / "docs") == "[a](cause.md) [b](index.md)"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://x.org/a.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//x.org/a.css">'),
        ("a.html", "<img src='http://x.org/a.png'>"),
        ("a.html", '<img srcset="a.png 1x, https://x.org/a.png 2x">'),
        ("a.html", "<style>p { background: url(https://x.org/a.png) }</style>"),
        ("a.html", '<p style="background: url(https://x.org/a.png)">'),
        ("a.css", '@import "https://x.org/a.css";'),
        ("a.css", "@font-face { src: url('https://x.org/a.woff2') }"),
        ("a.js", 'import a from "https://x.org/a.js"'),
        ("a.js", 'fetch("https://x.org/a.json")'),
    ],
)
def test_a_remote_reference_is_found(tmp_path: Path, name, text):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / name).write_text(POLICY + text if name.endswith("html") else text)
    (found,) = site.remote_references(tmp_path)
    assert found.startswith(f"deep/{name}: ")
    assert "//x.org/a." in found


def test_links_to_click_and_local_files_are_no_remote_references(tmp_path: Path):
    text = (
        '<a href="https://x.org">x</a> <link rel="next" href="b.html"> <img src="a.png"> <script src="a.js"></script>'
    )
    (tmp_path / "a.html").write_text(POLICY + text)
    assert list(site.remote_references(tmp_path)) == []
    (tmp_path / "b.html").write_text(text)
    assert list(site.remote_references(tmp_path)) == ["b.html: no Content-Security-Policy"]


def test_warnings_of_the_build_are_errors():
    recipe = (site.ROOT / "Makefile").read_text().partition("\ndocs:")[2].partition("\n\n")[0]
    assert "mkdocs build --strict\n" in recipe  # and no --quiet, which hides warnings from --strict
    assert "tools.site --check" in recipe
