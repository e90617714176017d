"""The examination names what would fail, and the way out."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from qkscope.cli import doctor
from qkscope.cli.main import app


def lines(folder) -> dict[str, str]:
    return {finding.name.strip(): str(finding) for finding in doctor.examine(folder)}


def test_a_sound_installation_has_no_problem(tmp_path):
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == "0 problems"
    assert version("numpy") in lines(tmp_path)["numpy"]
    assert str(tmp_path) in lines(tmp_path)["free disk"]


def test_what_is_not_installed_is_named_with_the_way_to_it(tmp_path, monkeypatch):
    def found(name: str) -> str:
        if name in ("torch", "scipy"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "version", found)
    said = lines(tmp_path)
    assert said["scipy"] == "! scipy                 not installed; install it with: pip install qkscope"
    assert said["torch"].endswith("pip install 'qkscope[capture]' for qkscope capture and qkscope demo")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "1 problem")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_a_problem(tmp_path):
    tmp_path.chmod(0o500)
    assert "is not a writable directory" in lines(tmp_path)["output folder"]


def test_a_file_in_place_of_the_folder_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    assert lines(tmp_path / "file")["output folder"].endswith("is not a writable directory; choose another")


def test_little_disk_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1e9)
    assert lines(tmp_path)["free disk"].startswith("- ")


def test_a_hub_that_is_switched_off_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "only what is in the cache can be read" in lines(tmp_path)["hub"]
