"""SIGKILL at random moments of a capture or of an analysis; then the same command again, to the end.

    python -m tests.killing capture 20 MODEL TEXTS PLACE
    python -m tests.killing analyze 20 RUN PLACE

Every fourth time the second attempt is killed as well. An analysis writes over older tables, and after a kill each of
them must be the old one or the new one; as the writing is short, every second kill waits for it to begin. Prints how
far each kill let it come, and how many of the results are byte for byte those of a command that was left alone; exit
code 1 unless all are.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from tests.forking import all_bytes, has_ended, import_everything, start, timed, wait


def main(what: str, times: int, *places: str) -> int:
    import_everything()
    *given, place = places
    folder = Path(place)
    command = COMMANDS[what](*given)
    whole = min(timed([*command, str(folder / f"whole-{i}")], folder / "said") for i in range(2))
    expected, before = all_bytes(folder / "whole-0", but="summary.json"), dict[str, bytes]()
    if what == "analyze":
        timed([*command, str(folder / "before"), "--no-intervals"], folder / "said")
        before = all_bytes(folder / "before", but="summary.json")
    moments, same, states = random.Random(0), 0, Counter[str]()
    for number in range(times):
        target, sound = folder / "killed", True
        if before:
            shutil.copytree(folder / "before", target)
        for _ in range(1 + (number % 4 == 3)):
            process = start([*command, str(target)], folder / "said")
            if before and number % 2:
                while not any(target.glob(".*.tmp")) and not has_ended(process):
                    time.sleep(0.0002)
                time.sleep(moments.uniform(0.0, 0.01))
            else:
                time.sleep(moments.uniform(0.02, 1.0) * whole)
            os.kill(process, signal.SIGKILL)
            wait(process)
            states[state(target, what)] += 1
            sound &= not before or all(
                content in (before.get(name), expected[name])
                for name, content in all_bytes(target, but="summary.json").items()
                if not name.startswith(".")
            )
        timed([*command, str(target)], folder / "said")
        found = all_bytes(target, but="summary.json")
        same += sound and found == expected
        if found != expected:
            odd = {name for name in {*found, *expected} if found.get(name) != expected.get(name)}
            print(f"kill {number}: {', '.join(sorted(odd)[:5])} differ")
        shutil.rmtree(target)
    print(", ".join(f"{count}: {name}" for name, count in sorted(states.items())))
    print(f"{same} of {times} as if nothing had happened")
    return int(same < times)


COMMANDS = {
    "capture": lambda model, texts: [
        *["capture", model, "--texts", texts, "--threads", "1", "--documents-per-shard", "2", "--sample", "50"],
        *["--save-vectors", "0.2", "-q", "-o"],
    ],
    "analyze": lambda run: ["analyze", run, "--layers", "0", "--only", "pca,rotation", "--workers", "1", "-q", "-o"],
}


def state(folder: Path, what: str) -> str:
    """Describe the progress of a killed command."""
    if not folder.exists():
        return "nothing written"
    if what == "analyze":
        return "tables being written" if list(folder.glob(".*.tmp")) else "tables old or new"
    if (folder / "run.json").exists():
        return "finished or being tidied"
    if (folder / "moments").exists():
        return "being assembled"
    return "some shards done" if list(folder.glob("parts/0*")) else "no shard done"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
