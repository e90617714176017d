"""The documents agree with the code."""

import doctest
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from tools import dist, llms
from tools.notebook import NOTEBOOK, build, execute
from tools.readme import PAGES, ROOT, updated

import qkscope
from qkscope.results.schema import TABLES
from tests.results.test_compare import compared, documents, folder


@pytest.mark.parametrize("page", PAGES)
def test_columns_and_measurements_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    assert text == updated(text), "run: python -m tools.readme"


def modules_of_the_tree() -> list[str]:
    """Paths relative to src/qkscope, from names that are indented by two per folder."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = text.split("<!-- tree -->")[1].split("<!-- end of tree -->")[0]
    folders: list[str] = []
    modules = []
    for indent, name in re.findall(r"^( *)([\w/]+(?:\.py|/))", tree, re.MULTILINE):
        folders[len(indent) // 2 :] = [name]
        if name.endswith(".py"):
            modules.append("".join(folders[1:]))
    return modules


def test_the_tree_of_the_architecture_page_is_the_tree():
    named = modules_of_the_tree()
    source = ROOT / "src" / "qkscope"
    there = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert sorted(set(named)) == sorted(named), "a module is named twice"
    assert set(named) <= there
    assert {path for path in there - set(named) if not path.endswith("__init__.py")} == set()


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in pages():
        for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def test_the_readme_leads_to_every_page():
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name}" not in readme] == []


def test_pages_stand_alone():
    for page in pages():
        assert not re.search(r"(^|[\s(`])(/tmp|/home|/root|/work|/Users|\.\./shared)/", page.read_text()), page.name


class _Fenced(doctest.DocTestParser):
    """Examples in Markdown: a fence ends the output above it."""

    def parse(self, string, name="<string>"):
        return super().parse(re.sub(r"^```.*$", "", string, flags=re.MULTILINE), name)


@pytest.mark.slow
def test_the_examples_of_the_python_page_run():
    pytest.importorskip("torch")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    page = str(ROOT / "docs" / "python.md")
    failed, attempted = doctest.testfile(page, module_relative=False, parser=_Fenced(), optionflags=flags)
    assert attempted > 30
    assert failed == 0


def test_the_first_snippet_of_the_readme_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    snippet, *_ = dist.snippets()
    assert len(snippet.strip().splitlines()) < 10
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == "flat", "random weights tell no keys apart"
    assert (tmp_path / "report" / "report.html").is_file()


def test_the_second_snippet_of_the_readme_runs_on_a_run_of_its_models_shape(tmp_path, monkeypatch):
    """Use random weights and fewer layers in place of the model that the README captures."""
    transformers = pytest.importorskip("transformers")
    shape = {"num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3}  # the heads of SmolLM2-135M
    config = transformers.LlamaConfig(hidden_size=72, intermediate_size=72, vocab_size=64, **shape)
    texts = np.random.default_rng(0).integers(0, 64, (8, 64))
    monkeypatch.chdir(tmp_path)
    qkscope.capture_model(
        transformers.LlamaForCausalLM(config).eval(), texts, window=64, folder="runs/smollm2", progress=False
    )
    names: dict[str, Any] = {}
    exec(compile(dist.snippets()[1], "README.md", "exec"), names)
    assert len(names["rotated"]) == 54
    assert sum(names["head"].parts.values()) == pytest.approx(1)


def test_llms_txt_is_that_of_the_navigation():
    text = llms.FILE.read_text()
    assert text == llms.llms_text(llms.in_repository), "run: python -m tools.llms"
    linked = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", text, re.MULTILINE)
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(linked)
    assert [path for path in linked if not (ROOT / path).is_file()] == []


def test_the_llms_txt_of_the_site_has_every_page_of_the_navigation():
    linked = re.findall(r"\]\(([^)]+)\): \S", llms.llms_text(llms.on_site))
    named = re.findall(r"^ +- [^:]+: (.+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert linked == [f"{name}.html" for name in named if name != "index"]


def test_the_method_page_defines_every_column():
    method = (ROOT / "docs" / "method.md").read_text()
    sections = set(re.findall(r"^## (\d+)", method, re.MULTILINE))
    for table, columns in TABLES.items():
        for column in columns:
            assert column.section in sections
            base = re.sub(r"_(se|low|high|mean|median)$", "", column.name)
            assert re.search(rf"`{base}`", method), f"{table}.{base}"


def test_the_method_page_describes_every_column_of_a_comparison():
    method = (ROOT / "docs" / "method.md").read_text()
    section = method[method.index("**Two runs head by head**") : method.index("## 8.")]
    rng = np.random.default_rng(0)
    found = compared(folder("a", documents(rng)), folder("b", documents(rng)))
    for name in (*found.table, *found.summary):
        assert f"`{name}`" in section, name


def test_the_notebook_installs_from_a_wheel_and_not_from_an_index():
    cells = "\n".join(cell.source for cell in build().cells)
    assert re.findall(r"^ *[%!] *pip install.*$", cells, re.MULTILINE) == ['    %pip install --quiet "{package}"']
    assert "package = f'qkscope[capture] @ file://" in cells
    assert not re.search(r"pip install[^'\n]* qkscope", cells)


def test_the_committed_notebook_was_executed_from_its_source():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert [c.source for c in committed.cells] == [c.source for c in build().cells]
    code = [c for c in committed.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(committed))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the Jupyter stack warns about itself
def test_the_notebook_runs(tmp_path: Path):
    executed = execute(tmp_path)
    printed = "".join(o.get("text", "") for c in executed.cells for o in c.get("outputs", []))
    assert "l04h01 position: position 64%" in printed
    assert (tmp_path / "first_look.png").stat().st_size > 10_000


def test_pictures_of_pages_are_those_of_the_pages_of_today():
    """They are drawn by ``python -m tools.screenshots``, which records what they were drawn with."""
    pytest.importorskip("playwright")
    from PIL import Image
    from tools.screenshots import DRAWN_WITH, IMAGES, NAMES, pages_digest

    for name in NAMES:
        with Image.open(IMAGES / f"{name}.png") as picture:
            assert picture.info.get(DRAWN_WITH) == pages_digest(), f"{name}.png is stale: python -m tools.screenshots"
