"""Signals end a command in one line, wherever they find it: each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

START = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored, if a shell started the tests

def stop():
    os.kill(os.getpid(), {number})

from qkscope.cli.signals import one_line_when_stopped

class Swallows:
    def __del__(self):
        stop()

class Later:
    def __del__(self, stop=stop):
        stop()
"""
WORK = """
    from qkscope.cli.common import errors_as_lines, set_up_logging
    set_up_logging(quiet=True, verbose=False)
"""
DURING = WORK + "    with errors_as_lines('no table was changed'):\n        {}\n        print('went on')\n"
CASES = {
    "before the command line is imported": ("    stop()", "nothing was done"),
    "while it works": (DURING.format("stop()"), "no table was changed"),
    "in a module that is being imported and catches everything": (
        DURING.format("import catches_everything"),
        "no table was changed",
    ),
    "where Python drops exceptions": (DURING.format("Swallows()"), "no table was changed"),
    "in a library that raises an error of its own instead": (
        DURING.format("other_error(stop)"),
        "no table was changed",
    ),
    "again, while files are closed": (DURING.format("twice(stop)"), "no table was changed"),
    "after the work": (DURING.format("pass") + "    stop()", "the command had already ended"),
    "while Python ends": (DURING.format("atexit.register(stop)"), "the command had already ended"),
}
LIBRARY = """
def other_error(stop):
    try:
        stop()
    except KeyboardInterrupt:
        raise ImportError("no such extension") from None

def twice(stop):
    try:
        stop()
    finally:
        stop()
"""


def ended(tmp_path, body, number):
    (tmp_path / "catches_everything.py").write_text(
        f"import os\ntry:\n    os.kill(os.getpid(), {int(number)})\nexcept BaseException:\n    pass\n"
    )
    script = tmp_path / "script.py"
    script.write_text(f"{START.format(number=int(number))}{LIBRARY}\nwith one_line_when_stopped():\n{body}\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr, done.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name", CASES)
def test_one_line_and_an_exit_code(tmp_path, name, number, code):
    body, line = CASES[name]
    assert ended(tmp_path, body, number)[:2] == (code, f"stopped; {line}\n")


def test_a_signal_at_the_very_end_changes_nothing(tmp_path):
    body = WORK + "    import builtins\n    builtins.last = Later()\n    print('done')"
    assert ended(tmp_path, body, signal.SIGTERM) == (0, "", "done\n")


def test_a_signal_that_the_caller_ignores_is_ignored(tmp_path):
    body = "    print('done')"
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from qkscope.cli.signals import one_line_when_stopped\n"
        f"with one_line_when_stopped():\n    os.kill(os.getpid(), signal.SIGINT)\n{body}\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "done\n")


@pytest.mark.parametrize("name", ["run", "pca_analyze", "rotate_analyze", "pca_visualize", "rotate_visualize"])
def test_every_installed_command_listens_before_it_imports(tmp_path, name):
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib, os, signal\nfrom qkscope import __main__ as commands\n"
        "commands.import_module = lambda name: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"commands.{name}()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (143, "stopped; nothing was done\n")
