"""What the documents say is what the code does."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from tools.notebook import NOTEBOOK, build, execute
from tools.readme import PAGES, ROOT, updated

from qkscope.results.schema import TABLES


@pytest.mark.parametrize("page", PAGES)
def test_columns_and_measurements_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    assert text == updated(text), "run: python -m tools.readme"


def test_the_readme_tree_is_the_tree():
    text = (ROOT / "README.md").read_text()
    tree = text.split("<!-- tree -->")[1].split("<!-- end of tree -->")[0]
    named = set(re.findall(r"([a-z_]+\.py)", tree))
    there = {p.name for p in (ROOT / "src" / "qkscope").rglob("*.py")} - {"__init__.py", "__main__.py"}
    assert named == there


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_method_page_defines_every_column():
    method = (ROOT / "docs" / "method.md").read_text()
    sections = set(re.findall(r"^## (\d)", method, re.MULTILINE))
    for table, columns in TABLES.items():
        for column in columns:
            assert column.section in sections
            base = re.sub(r"_(se|low|high|mean|median)$", "", column.name)
            assert re.search(rf"`{base}`", method), f"{table}.{base}"


def test_the_committed_notebook_was_executed_from_its_source():
    committed = nbformat.read(NOTEBOOK, as_version=4)
    assert [c.source for c in committed.cells] == [c.source for c in build().cells]
    code = [c for c in committed.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert not re.search(r"/(tmp|home|root|work|Users)/", json.dumps(committed))


@pytest.mark.filterwarnings("default")  # the Jupyter stack warns about itself
def test_the_notebook_runs(tmp_path: Path):
    executed = execute(tmp_path)
    printed = "".join(o.get("text", "") for c in executed.cells for o in c.get("outputs", []))
    assert "heads favour later keys" in printed
    assert (tmp_path / "first_look.png").stat().st_size > 10_000
