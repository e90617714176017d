"""Sizes that files claim: each number that says how much there is, made huge or zero, one at a time, for every reader.

    python -m tests.sizes [--gib 2] [--footers 300]

The process may have so many GiB of addresses more than it has after its imports. A reader that asks for more, or that
ends with anything but an error of ours in one line, is a finding. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import resource
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzzing import TARGETS, check, seeds

HUGE = (0, -1, 2**31, 2**33, 2**40, 2**53 + 1, 2**63 - 1, 10**19, 10**40)
NUMBER = re.compile(rb"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
FOOTER_BYTES = (0x00, 0x7F, 0x80, 0xFF)
BOMB_GROUPS, BOMB_ROWS = 60, 2**20


def variants(target: str, footers: int) -> Iterator[bytes]:
    """Good inputs of a reader with one size changed."""
    for seed in seeds(target):
        if seed[:4] == b"PAR1":
            yield from of_parquet(seed, footers)
            yield bomb(seed)
        elif target == "layer":
            yield from of_safetensors(seed)
        else:
            yield from of_text(seed)


def of_text(seed: bytes) -> Iterator[bytes]:
    """Each number of a text replaced."""
    for match in NUMBER.finditer(seed):
        for size in (*map(str, HUGE), "1e308", "1e400"):
            yield seed[: match.start()] + size.encode() + seed[match.end() :]


def of_safetensors(seed: bytes) -> Iterator[bytes]:
    """The length of the header, and each shape and offset in it, replaced."""
    (length,) = struct.unpack("<Q", seed[:8])
    header, data = json.loads(seed[8 : 8 + length]), seed[8 + length :]
    for size in HUGE:
        if 0 <= size < 2**64:
            yield struct.pack("<Q", size) + seed[8:]
    for name, entry in header.items():
        for field in ("shape", "data_offsets"):
            for place in range(len(entry.get(field, ()))):
                for size in HUGE:
                    changed = json.loads(json.dumps(header))
                    changed[name][field][place] = size
                    yield with_header(changed, data)
        if "shape" in entry:  # nothing at all, of a huge shape
            changed = json.loads(json.dumps(header))
            changed[name] |= {"shape": [0, *[2**30] * (len(entry["shape"]) - 1)], "data_offsets": [0, 0]}
            yield with_header(changed, data)


def with_header(header: dict[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def of_parquet(seed: bytes, footers: int) -> Iterator[bytes]:
    """Bytes of the footer, in which counts and sizes are, replaced; and its length."""
    (length,) = struct.unpack("<I", seed[-8:-4])
    begin, rng = len(seed) - 8 - length, random.Random(0)
    for size in (0, 1, length - 1, length + 1, 2**31 - 1, 2**32 - 1):
        yield seed[:-8] + struct.pack("<I", size) + seed[-4:]
    for _ in range(footers):
        at, count = begin + rng.randrange(length), rng.randrange(1, 6)
        yield seed[:at] + bytes(rng.choice(FOOTER_BYTES) for _ in range(count)) + seed[at + count :]


@cache
def bomb(seed: bytes) -> bytes:
    """The first row of a table, so many millions of times; it takes a few KB."""
    table = pq.read_table(io.BytesIO(seed))
    many = pa.table(
        {
            name: pa.concat_arrays([table[name].chunk(0)[:1]]).take(pa.repeat(pa.scalar(0), BOMB_ROWS))
            for name in table.column_names
        }
    )
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, many.schema, compression="zstd") as writer:
        for _ in range(BOMB_GROUPS):
            writer.write_table(many)
    return buffer.getvalue()


def limit_addresses(gib: float) -> None:
    """Let this process have so many GiB of addresses more than it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--footers", type=int, default=300)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    pd.options.mode.copy_on_write = True
    pa.set_cpu_count(1)
    inputs = {target: list(variants(target, given.footers)) for target in TARGETS}
    limit_addresses(given.gib)
    findings = Counter[str]()
    for target, variants_of in inputs.items():
        for number, data in enumerate(variants_of):
            try:
                check(target, data)
            except BaseException as error:
                findings[target] += 1
                print(f"{target} {number}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{target}: {len(variants_of)} inputs, {findings[target]} findings")
    return int(bool(findings.total()))


if __name__ == "__main__":
    sys.exit(main())
