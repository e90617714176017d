"""Two processes capture into one folder at the same moment.

    python -m tests.racing 50 MODEL TEXTS PLACE

One must do it, the other must be told who does, and the run must be that of a process alone.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.forking import all_bytes, import_everything, start, timed, wait


def main(times: int, model: str, texts: str, place: str) -> int:
    import_everything()
    folder = Path(place)
    command = ["capture", model, "--texts", texts, "--threads", "1", "--documents-per-shard", "4", "-q", "-o"]
    timed([*command, str(folder / "alone")], folder / "said")
    expected = all_bytes(folder / "alone")
    told = good = 0
    for _ in range(times):
        target, said = folder / "both", [folder / "said-0", folder / "said-1"]
        processes = [start([*command, str(target)], one) for one in said]
        codes = [wait(process) for process in processes]
        if sorted(codes) == [0, 2]:
            winner, loser = processes[codes.index(0)], said[codes.index(2)].read_text()
            holder = rf"process {winner} on \S+, since [-\d]+ [:\d]+ UTC"
            place_name, advice = re.escape(str(target)), "wait until it ends, or choose another folder"
            words = rf"error: {place_name} is in use by {holder}; {advice}\n"
            told += re.fullmatch(words, loser) is not None
        good += all_bytes(target) == expected
        shutil.rmtree(target)
    print(f"{told} of {times} second processes were told who holds the folder; {good} of {times} runs are sound")
    return int(not told == good == times)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:5]))
