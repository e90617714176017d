"""Commands in processes of their own that start at once: forked from one that has imported everything already.

What is forked has one thread and has opened nothing, so a fork is as good as a new process here, and takes
milliseconds where torch and transformers take seconds to import. A process that has threads, as that of tests has,
asks another to fork for it: ``ForkServer``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path


def import_everything() -> None:
    import torch
    import transformers  # noqa: F401

    import qkscope.capture.run
    import qkscope.cli.main
    import qkscope.report.report
    import qkscope.results.analyze  # noqa: F401

    torch.set_num_threads(1)


def start(arguments: list[str], said: Path) -> int:
    """Run ``qkscope`` with these arguments; what it says goes into a file. Returns the process's number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        from qkscope.cli.main import app

        app(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(process: int) -> int:
    """The exit code; minus the signal, if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def timed(arguments: list[str], said: Path) -> float:
    """Run to the end, and how long it took."""
    began = time.monotonic()
    code = wait(start(arguments, said))
    if code:
        raise RuntimeError(f"{' '.join(arguments)} ended with {code}: {said.read_text()}")
    return time.monotonic() - began


class ForkServer:
    """A process that forks commands; ``close`` ends it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.forking"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, arguments: list[str], said: Path, killed_after: float | None = None) -> int:
        """The exit code of a command; −9 if it still ran after so many seconds, and was killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([arguments, str(said), killed_after]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """Run the commands that are asked for, one after the other."""
    import_everything()
    for line in sys.stdin:
        arguments, said, killed_after = json.loads(line)
        process, until = start(arguments, Path(said)), time.monotonic() + (killed_after or 0.0)
        while killed_after is not None and time.monotonic() < until and not has_ended(process):
            time.sleep(0.002)
        if killed_after is not None:
            os.kill(process, signal.SIGKILL)  # not waited for yet, so nobody else has its number
        print(wait(process), flush=True)


def has_ended(process: int) -> bool:
    """Return whether a child has ended; on a busy machine this may happen before its writing was seen."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def all_bytes(folder: Path, *, but: str = "") -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != but)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


if __name__ == "__main__":
    serve()
