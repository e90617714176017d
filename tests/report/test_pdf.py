"""The report on paper."""

from __future__ import annotations

import os
import re

import pytest
from typer.testing import CliRunner

from qkscope.cli.main import app
from qkscope.errors import TableError
from qkscope.report import page as pdf
from tests.browser.chromium import PROGRAM
from tests.helpers import small_dataset


def test_without_a_browser_it_is_said_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    dataset = small_dataset(tmp_path / "set", layers=1)
    done = CliRunner().invoke(app, ["report", str(dataset), "--pdf", "-o", str(tmp_path / "report")])
    assert done.exit_code == 2
    assert "--pdf needs Chromium or Chrome, and none was found; install one, or print report.html" in done.output
    assert not (tmp_path / "report" / "tables").exists()


def test_a_browser_that_prints_nothing_is_told(tmp_path):
    (tmp_path / "page.html").write_text("<p>page</p>")
    with pytest.raises(TableError, match=r"could not print .*page.html \(it said nothing\)"):
        pdf.print_page("true", tmp_path / "page.html", tmp_path / "page.pdf")
    assert not (tmp_path / "page.pdf").exists()


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None and not os.environ.get("CI"), reason="Chromium is not installed")
def test_a_report_is_printed(tmp_path):
    dataset = small_dataset(tmp_path / "set", layers=1)
    done = CliRunner().invoke(app, ["report", str(dataset), "--pdf", "-o", str(tmp_path / "report"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "report" / "report.pdf") in done.output.replace("\n", "")
    printed = (tmp_path / "report" / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 7 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 9, "8 with the fonts of CI"
