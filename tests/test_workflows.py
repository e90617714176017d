"""The workflows of continuous integration: YAML that names what exists, with few permissions and pinned actions."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.test_docs import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+|[0-9a-f]{40})")


def jobs(path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["jobs"]


def steps(path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job.get("steps", ())]


def test_there_is_one_that_tests_and_one_that_publishes():
    assert [path.stem for path in WORKFLOWS] == ["publish", "test"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_is_there(path):
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    run = [step["run"] for step in steps(path) if "run" in step]
    made = {target for command in run for target in re.findall(r"\bmake ([\w-]+)", command)}
    assert made
    assert made <= targets
    assert [command for command in run if command.startswith(".") and not (ROOT / command).is_file()] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_may_only_read(path):
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert [action for action in used if not PINNED.fullmatch(action)] == []
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job or "uses" in job for job in jobs(path).values())


def test_only_the_job_that_publishes_gets_an_identity_and_it_builds_nothing():
    build, publish = (jobs(ROOT / ".github" / "workflows" / "publish.yml")[name] for name in ("build", "publish"))
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not any("run" in step for step in publish["steps"])


def test_every_python_of_the_classifiers_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert named
    assert set(named) <= set(jobs(ROOT / ".github" / "workflows" / "test.yml")["core"]["strategy"]["matrix"]["python"])
