"""The house: few doors in the hall, imports without cycles, one name for one thing, commands that load little."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest
from tools import walk

import qkscope
from tests.capture.conftest import save
from tests.capture.families import families
from tests.helpers import small_dataset

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "qkscope"
PAGE = ROOT / "docs" / "architecture.md"
MOST_MODULES = 10
DECLARED = {"qkscope.analyses", "qkscope.analyses.options"}
"""What the command line reads of analyses: their options."""
MOST_STEPS, MOST_UPWARD = 27, 5
"""Kinds of step of ``analyze`` today: a new one has to be wanted."""


def test_few_modules_stand_in_the_hall():
    assert len(list(SOURCE.glob("*.py"))) <= MOST_MODULES


def test_no_package_is_named_like_a_public_function():
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert not packages & set(qkscope.__all__)


def test_no_module_imports_itself_by_way_of_others():
    """Imports for types alone count too; the one that pyproject.toml lists, made when a method is called, does not."""
    graph = grimp.build_graph("qkscope")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (upward,) = [entry for contract in contracts for entry in contract.get("ignore_imports", [])]
    importer, imported = upward.split(" -> ")
    graph.remove_import(importer=importer, imported=imported)
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    assert not [module for module, others in reached.items() if module in others]
    assert not [(a, b) for a, others in reached.items() for b in others if a in reached.get(b, ())]


def loaded_by(folder: Path, *command: object) -> set[str]:
    """Top-level packages, and modules of ours, that a command has loaded when it is done."""
    code = (
        "import json, sys; from qkscope.cli.main import app\n"
        f"app({list(map(str, command))!r}, standalone_mode=False)\n"
        "names = {name if name.startswith('qkscope.') else name.split('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_captures_load_no_analysis(tmp_path):
    model = save(families()["llama"], tmp_path / "model")
    (tmp_path / "a.txt").write_text("w01 w02 w03 w04 w05 w06 w07 w08 w09 w10 " * 5)
    drawing = {"matplotlib"}
    captured = loaded_by(tmp_path, "capture", model, "--texts", "a.txt", "--shard", "1/1", "-o", "share", "--quiet")
    assert "torch" in captured
    assert not captured & drawing
    assert ours(captured, "analyses", "results", "figures", "report") == DECLARED
    merged = loaded_by(tmp_path, "merge", "share", "-o", "run", "--quiet")
    assert not merged & (drawing | {"torch", "transformers"})
    assert ours(merged, "analyses", "results", "figures", "report") == DECLARED


def test_analyses_load_nothing_that_draws(tmp_path):
    small_dataset(tmp_path / "data", layers=1)
    loaded = loaded_by(tmp_path, "analyze", "data", "-o", "out", "--workers", "1", "--points", "2", "--quiet")
    assert "qkscope.analyses.pca" in loaded
    assert not loaded & {"matplotlib", "jinja2", "torch", "transformers"}
    assert not ours(loaded, "figures", "report")


def ours(loaded: set[str], *rooms: str) -> set[str]:
    """Modules of these rooms."""
    return {name for name in loaded if name.split(".")[:2] in [["qkscope", room] for room in rooms]}


def test_workers_start_without_statistics():
    """scipy.stats takes as long to import as all the rest, in every worker."""
    code = "import sys, qkscope.results.analyze; sys.exit('scipy.stats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def walked() -> str:
    command = [sys.executable, "-m", "tools.walk", "capture", "analyze"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_way_of_a_head_is_short_and_goes_down(walked):
    line = next(line for line in walked.splitlines() if line.startswith("analyze: "))
    steps, upward = (int(word) for word in line.replace(",", "").split() if word.isdecimal())
    assert steps <= MOST_STEPS
    assert upward <= MOST_UPWARD


def test_the_page_shows_the_way_as_it_is(walked):
    page = PAGE.read_text()
    for name in ("capture", "analyze"):
        way = walked[walked.index(f"{name}: ") :].split("\n\n")[0].strip()
        assert way in page, "write it again with: python -m tools.walk --write"


def test_levels_are_those_of_the_contract():
    assert max(walk.levels().values()) + 1 == 9
    rooms = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix in ("", ".py")}
    assert rooms - {"__pycache__", "py.typed", "__init__", "__main__", "_version"} == set(walk.levels())
    rows = re.findall(r"^\| ([1-9]) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert {room: int(level) - 1 for level, names in rows for room in re.findall(r"`(\w+)`", names)} == walk.levels()


def test_the_page_names_files_and_functions_that_exist():
    page = PAGE.read_text().partition("## Where to look")[2].partition("<!-- walk -->")[0]
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    named = set(re.findall(r"`([\w.]+(?:/[\w.]+)*)`", page))
    files = {name for name in named if name.endswith(".py")}
    assert [name for name in sorted(files) if not any(SOURCE.rglob(name))] == []
    functions = {name for name in named if re.fullmatch(r"_?[a-z]+(_[a-z]+)+|[A-Z][a-z]+[A-Z]\w+", name)}
    assert {"open_run", "do_task", "AnalysisResult"} <= functions
    assert [name for name in sorted(functions) if not re.search(rf"\b(def|class) {name}\b", source)] == []


@pytest.mark.parametrize("folder", ["benchmarks", "tools", "examples"])
def test_what_no_test_runs_imports_names_that_exist(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("qkscope", "benchmarks", "tools")):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    found = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                    assert found, f"{path}: {node.module} has no {alias.name}"


def test_docstrings_open_with_what_a_thing_is():
    openers = re.compile(r"(What|Whether|How|Those|There|Its|As many)\b|…")
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [(path, node) for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    documented = [(path, ast.get_docstring(node) or "") for path, node in nodes if isinstance(node, defined)]
    assert [(path.name, text.partition("\n")[0]) for path, text in documented if openers.match(text)] == []
