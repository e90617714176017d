"""SIGINT or SIGTERM at random moments of a command, from its first line to its last; then the same command again.

    python -m tests.interrupting analyze 200 PLACE

``capture``, ``effects``, ``reach`` and ``report`` are tried in the same way. The command works on a run of tinyrope,
which is captured into PLACE, or captures it again, or draws its tables. Signals go to the process alone or, as from a
terminal, to its workers too. Each must end it with exit code 0, 130 or 143 and one line, and leave no process. After
every tenth the command runs to its end in the same folder, which must then be, byte for byte, that of a command that
was left alone. Prints how many ended in which way; exit code 1 unless all are as they must be.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.forking import all_bytes

FAMILY = Path(__file__).parents[1] / "src" / "qkscope" / "data" / "tinyrope"
MODEL = [str(FAMILY / "checkpoints" / "pretrain-step-0020"), "--tokenizer", str(FAMILY / "tokenizer"), "--threads", "1"]
EXPECTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
LONGEST_SECONDS = 120.0
"""Longest time that a command may take; one that does not end is killed, and counted as wrong."""
ENDING_SECONDS = 20.0
"""Longest time that workers may outlive their parent."""


def main(what: str, times: int, place: str) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    folder = Path(place)
    command = prepared(what, folder)
    target = folder / "interrupted"
    seconds, code = ended(started([*command, target], folder / "said"))
    if code:
        raise RuntimeError(f"{what} ended with {code}: {(folder / 'said').read_text()}")
    usual = lines(folder / "said")
    expected = all_bytes(target, but="summary.json")
    shutil.rmtree(target)
    moments, ways, wrong = random.Random(place), Counter[str](), 0
    for number in range(times):
        sent = (signal.SIGINT, signal.SIGTERM)[number % 2]
        process = started([*command, target], folder / "said")
        time.sleep(moments.uniform(0.0, seconds))
        send(process, sent, to_all=number % 4 > 1)
        _, code = ended(process)
        said = [line for line in lines(folder / "said") if line not in usual]
        is_stopped = code == EXPECTED[sent] and len(said) == 1 and said[0].startswith("stopped; ")
        ways[f"{sent.name} {code} {' '.join(said)[:80]}"] += 1
        if not (is_stopped or (code == 0 and not said)) or survivors(process.pid):
            wrong += 1
            print(f"interrupt {number} ({sent.name}): exit code {code}", *said, sep="\n", flush=True)
        if number % 10 == 9 or number == times - 1:
            ended(started([*command, target], folder / "said"))
            found = all_bytes(target, but="summary.json")
            if found != expected:
                wrong += 1
                odd = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
                print(f"interrupt {number}: other bytes after rerunning: {', '.join(odd[:5])}", flush=True)
            shutil.rmtree(target)
    print("\n".join(f"{count}: {way}" for way, count in sorted(ways.items())))
    print(f"{times} interrupts, {wrong} wrong")
    return int(wrong > 0)


def prepared(what: str, folder: Path) -> list[str]:
    """Capture a run of two documents; return the command on it, without its output folder."""
    for name, texts in {"texts": ["1821-Monroe-1", "1825-Adams-1"], "others": ["1902-Roosevelt-1"]}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for text in texts:
            (folder / name / f"{text}.txt").write_text((FAMILY / "texts" / f"{text}.txt").read_text()[:3000])
    run = str(folder / "run")
    capture = ["capture", *MODEL, "--texts", str(folder / "texts"), "--window", "256", "-q", "-o", run]
    subprocess.run([sys.executable, "-m", "qkscope", *capture], check=True)
    results = str(folder / "results")
    if what == "report":
        tables = ["analyze", run, "--layers", "0-1", "--only", "pca", "--no-intervals", "-q", "-o", results]
        subprocess.run([sys.executable, "-m", "qkscope", *tables], check=True)
    return {
        "capture": [*capture[:-2], "--documents-per-shard", "1", "--workers", "2", "-o"],
        "analyze": ["analyze", run, "--layers", "0-3", "--workers", "2", "-q", "-o"],
        "effects": [
            *["effects", MODEL[0], run, *MODEL[1:], "--texts", str(folder / "others")],
            *["--passes", "2", "--measure", "2", "-q", "-o"],
        ],
        "reach": ["reach", run, "--cut", "64", "--workers", "2", "-q", "-o"],
        "report": ["report", results, "--workers", "1", "-q", "-o"],
    }[what]


def started(command: list[str | Path], said: Path) -> subprocess.Popen[bytes]:
    """A command in a process and a session of its own, once it is at its first line."""
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "qkscope", *map(str, command)], stderr=file, stdout=file, start_new_session=True
        )
    while process.poll() is None and not handles_signals(process.pid):
        time.sleep(0.0005)
    return process


def handles_signals(process: int) -> bool:
    """Return whether a process has a handler of its own for SIGTERM, which Python does not have."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return any(line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1 for line in lines)


def send(process: subprocess.Popen[bytes], number: signal.Signals, *, to_all: bool) -> None:
    """Send a signal, to the process alone or also to those that it started."""
    if process.poll() is None:
        (os.killpg if to_all else os.kill)(process.pid, number)


def ended(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """Wait for the end of a process; how long that took and the exit code, −9 if it was killed for not ending."""
    began = time.monotonic()
    try:
        process.wait(LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    return time.monotonic() - began, process.wait()


def lines(said: Path) -> list[str]:
    """What a command said, with every number as 0: lines that it always says, of torch say, are known by that."""
    return re.sub(r"\d+", "0", said.read_text()).splitlines()


def survivors(session: int) -> bool:
    """Return whether a process of this session lives on."""
    until = time.monotonic() + ENDING_SECONDS
    while time.monotonic() < until:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
