"""Check whether a long capture of short documents is stable: memory, open files, parts on disk, time per document.

    python -m benchmarks.soak                        # 20,000 documents of 16 to 40 tokens, one process
    python -m benchmarks.soak --documents 2000 --profile

Exit code 1 if, over the second half, memory grows by more than 1 MiB per 1,000 documents, or open files grow at all.
The model has two layers and random weights: what stays when the passes are cheap is what a capture adds per shard.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers as tf

from qkscope.capture.corpus import Corpus
from qkscope.capture.options import CaptureOptions, ExecutionOptions
from qkscope.capture.run import capture
from qkscope.capture.texts import Document
from qkscope.engine import IN_PROCESS
from qkscope.files.parts import PARTS
from qkscope.results.analyze import analyze, write_results
from qkscope.results.job import Job
from qkscope.runs.run import open_run

MOST_MIB, MOST_FILES = 1.0, 0.01
"""Growth per 1,000 documents from which on it is a leak."""
SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Sample:
    """The state of this process after some documents."""

    documents: int
    seconds: float
    """Since the first document."""
    cpu_seconds: float
    """The same, of this process alone: what others do on the machine does not count."""
    resident_mib: float
    open_files: int
    parts: int
    """Parts of the capture on disk."""


@dataclass
class Watch:
    """Takes a sample of this process every so many documents."""

    folder: Path
    every: int = 1000
    samples: list[Sample] = field(default_factory=list)
    _start: tuple[float, float] | None = field(default=None, init=False)

    def __call__(self, _done: float, _total: float, note: str = "") -> None:
        """Sample whenever the number of documents in the note ("8 of 320 documents") is a multiple."""
        self._start = self._start or (time.perf_counter(), time.process_time())
        documents = int(note.partition(" ")[0])
        if documents % self.every == 0:
            self.samples.append(self._sample(documents))

    def _sample(self, documents: int) -> Sample:
        assert self._start is not None
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Sample(
            documents,
            time.perf_counter() - self._start[0],
            time.process_time() - self._start[1],
            pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),  # noqa: PTH208  no open folder of its own that stays
            len(list((self.folder / PARTS).glob("0*"))),
        )


def build() -> tf.PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SHAPE, vocab_size=96, max_position_embeddings=64)
    return tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def soak(documents: int, folder: Path, every: int = 1000) -> list[Sample]:
    """Capture short made-up documents into a folder; a sample of this process every so many of them."""
    rng, watch = np.random.default_rng(0), Watch(folder, every)
    ids = [rng.integers(3, 96, rng.integers(16, 41)) for _ in range(documents)]
    names = [Document(f"d{number}", str(number)) for number in range(documents)]
    options = CaptureOptions(documents_per_shard=8, batch=1)
    capture(build(), Corpus(names, ids), folder, options, {"id": "random"}, ExecutionOptions(on_progress=watch))
    return watch.samples


def growth(samples: list[Sample], name: str) -> float:
    """Slope of a column per 1,000 documents, over the second half of the samples, by least squares."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    return 1000 * float(np.polyfit([at.documents for at in half], [getattr(at, name) for at in half], 1)[0])


def markdown(samples: list[Sample]) -> str:
    """One line per sample."""
    lines = [
        "| documents | ms per document | CPU ms | resident MiB | open files | parts |",
        "|---|---|---|---|---|---|",
    ]
    before = Sample(0, 0.0, 0.0, 0.0, 0, 0)
    for at in samples:
        since = (at.documents - before.documents) / 1000
        each, cpu = (at.seconds - before.seconds) / since, (at.cpu_seconds - before.cpu_seconds) / since
        rest = f"{at.resident_mib:.1f} | {at.open_files} | {at.parts}"
        lines.append(f"| {at.documents:,} | {each:.1f} | {cpu:.1f} | {rest} |")
        before = at
    return "\n".join(lines)


def tables(run: Path, folder: Path) -> float:
    """Seconds to analyse the run, in this process."""
    start = time.perf_counter()
    results = analyze([Job(open_run(str(run)))], target=IN_PROCESS)
    write_results(folder, results, wall_seconds=0.0)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--profile", action="store_true", help="Print where the time goes.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, start, profile = Path(scratch) / "run", time.perf_counter(), cProfile.Profile()
        if given.profile:
            profile.enable()
        samples = soak(given.documents, run)
        profile.disable()
        whole = time.perf_counter() - start
        print(markdown(samples))
        print(f"\ncaptured in {whole:.0f} s, {whole - samples[-1].seconds:.1f} s of it before and after the documents")
        if given.profile:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
        print(f"analysed in {tables(run, Path(scratch) / 'tables'):.1f} s")
    mib, files = growth(samples, "resident_mib"), growth(samples, "open_files")
    print(f"growth per 1,000 documents over the second half: {mib:+.2f} MiB, {files:+.2f} open files")
    return int(mib > MOST_MIB or files > MOST_FILES)


if __name__ == "__main__":
    sys.exit(main())
