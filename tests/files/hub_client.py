"""Commands that meet a Hub, each in a process of its own: forked from one that has imported all but the Hub's client.

The client reads its endpoint and cache from the environment when it is imported, so every command has to import it;
what is forked has done the rest already, which takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any


class Starter:
    """The process that is forked."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([sys.executable, "-m", __name__], stdin=pipe, stdout=pipe, text=True)

    def start(self, words: list[str], environment: dict[str, str], folder: Path, before: str = "") -> int:
        """Begin ``qkscope`` with these words, after some code; its process. It writes into the files out and err."""
        asked = {"words": words, "environment": environment, "folder": str(folder), "before": before}
        self._line(json.dumps(asked))
        return int(self._answer())

    def wait(self) -> int:
        """The exit code of the last command; minus the signal, if one ended it."""
        return int(self._answer())

    def stop(self) -> None:
        """End it."""
        self.process.communicate(timeout=20)

    def _line(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


def main() -> None:
    """Fork for every line that comes, and answer with a process and its exit code."""
    assert "huggingface_hub" not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _command(**json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _command(words: list[str], environment: dict[str, str], folder: str, before: str) -> Any:
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.clear()
        os.environ.update(environment)
        exec(before)
        from qkscope.cli.main import app

        app(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
