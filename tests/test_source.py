"""The source must not run what a file says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = sorted(Path("src/qkscope").rglob("*.py"))
BETWEEN_OUR_PROCESSES = {Path("src/qkscope/engine/workers.py")}
"""Errors are pickled on their way from a worker to its parent; no file is."""
STARTS_A_BROWSER = {Path("src/qkscope/report/page.py")}
"""``report --pdf`` has the user's own browser print our own page."""

READS_TENSORS = {Path("src/qkscope/integrations/exports/torchfiles.py")}
"""Exports are read back by torch as tensors, numbers and text alone."""


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Every call in a file, by its dotted name."""
    return [
        (ast.unparse(node.func), node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", SOURCE, ids=str)
def test_no_file_is_executed(path):
    names = [name for name, _ in calls(path)]
    forbidden = {
        "eval",
        "exec",
        "compile",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "torch.load",
        "os.system",
    }
    forbidden |= {"np.load", "pd.read_pickle", "pickle.load", "joblib.load", "subprocess.run", "subprocess.Popen"}
    if path in STARTS_A_BROWSER:
        forbidden -= {"subprocess.run"}
        started = [call for name, call in calls(path) if name == "subprocess.run"]
        assert len(started) == 1
        assert "shell" not in {keyword.arg for keyword in started[0].keywords}
    if path in READS_TENSORS:
        forbidden -= {"torch.load"}
        (load,) = [call for name, call in calls(path) if name == "torch.load"]
        assert {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}["weights_only"] == "True"
    assert not forbidden & set(names)
    if path not in BETWEEN_OUR_PROCESSES:
        assert not {"pickle", "dill", "shelve", "marshal", "joblib", "cloudpickle"} & imports(path)


def test_code_of_a_model_is_run_only_when_the_user_says_so():
    for path in SOURCE:
        for name, call in calls(path):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("trust_remote_code", "False") in ("False", "options.trust_remote_code"), (path, name)


def test_nothing_listens():
    """The report and the explorer are files; there is no server to attack."""
    servers = {"http.server", "socketserver", "flask", "fastapi", "uvicorn", "aiohttp", "tornado"}
    assert not any(servers & imports(path) for path in SOURCE)
