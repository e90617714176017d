"""Commands in processes of their own that start at once: forked from one that has imported everything already.

What is forked has one thread and has opened nothing, so a fork is as good as a new process here, and takes
milliseconds where torch and transformers take seconds to import.
"""

from __future__ import annotations

import os
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


def all_bytes(folder: Path, *, but: str = "") -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != but)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
