"""Peak memory of a capture against the number of documents, each in a process of its own.

python -m benchmarks.memory
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tests.capture.conftest import WORDS, save
from tests.capture.families import families

PROBE = """
import resource, sys
from qkscope.cli.main import app
try:
    app(["capture", sys.argv[1], "--texts", sys.argv[2], "-o", sys.argv[3], "--sample", "500", "-q"])
except SystemExit as stop:
    assert not stop.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def main() -> None:
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as scratch:
        model = save(families()["llama"], Path(scratch) / "model")
        for n in (32, 128, 512):
            texts = Path(scratch) / f"texts-{n}"
            texts.mkdir()
            for number in range(n):
                (texts / f"{number:04d}.txt").write_text(" ".join(rng.choice(WORDS, 500)))
            command = [sys.executable, "-c", PROBE, model, texts, Path(scratch) / f"run-{n}"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{n:>4} documents: {done.stdout.strip()} MiB at peak", flush=True)


if __name__ == "__main__":
    main()
