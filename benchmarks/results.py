"""The results of all benchmarks as one table: what was done, against what, what came out, what was aimed for.

``results.json`` (this machine) and ``results-gpu.json`` (a GPU) are what the README shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

IN_PROCESS = Path(__file__).parent
CPU, GPU = IN_PROCESS / "results.json", IN_PROCESS / "results-gpu.json"


class Row(NamedTuple):
    """One line of the table."""

    work: str
    against: str
    found: str
    aim: str


def rows(cpu: dict[str, Any], gpu: dict[str, Any]) -> list[Row]:
    """Every measurement that has an aim."""
    rates = cpu["dataset"]["rates"]
    read, plain = rates["read only"], rates["plain"]
    bare, full = rates["read + both analyses"], rates["read + both analyses + intervals"]
    bare_run, full_run = (cpu["tables"]["rates"][f"{name} intervals"] for name in ("without", "with"))
    heads = cpu["growth"]["heads"]["points"]
    tokens = " / ".join(f"{one['tokens']:,}" for one in gpu["rows"])
    ratios = " / ".join(f"{one['ratio']:.3f}" for one in gpu["rows"])
    faster = f"{bare / plain:.1f}× / {full / plain:.1f}× faster"
    forward, capture = "the same forward pass", f"{cpu['capture']['ratio']:.3f}×"
    peaks = f"{heads[-1]['peak_mib']:.0f} / {heads[0]['peak_mib']:.0f} MiB"
    return [
        *_all_tables(cpu["tables"]["all"]),
        *_whole("3B shape, one GPU", gpu["whole"]),
        *_whole("135M shape, CPU", cpu["whole"]),
        Row("dataset → PCA and rotation tables, 2 workers", "reading the files", f"{read / bare:.2f}×", "1.7×"),
        Row("the same with intervals", "reading the files", f"{read / full:.2f}×", "2.0×"),
        Row("the same without / with intervals", "the plain way", faster, "6×"),
        Row("captured run of 1,024 heads → the same tables, per core", "—", f"{bare_run:.0f} heads/s", "300"),
        Row("the same with intervals", "—", f"{full_run:.0f} heads/s", "100"),
        Row("capture on the CPU, 135M shape, 2,048 tokens", forward, capture, "1.05×"),
        Row(f"capture on one GPU, 3B shape, {tokens} tokens", forward, f"{ratios}×", "1.02 / 1.01 / 1.01×"),
        Row("extra GPU memory for that", "—", f"{max(one['extra_gib'] for one in gpu['rows']):.1f} GiB", "3 GiB"),
        Row("`import qkscope`", "—", f"{cpu['start']['import']:.2f} s", "0.5 s"),
        Row("`qkscope --help`", "—", f"{cpu['start']['help']:.2f} s", "0.7 s"),
        Row(f"peak memory of {heads[-1]['size']} heads", f"of {heads[0]['size']} heads", peaks, "flat"),
    ]


def _all_tables(found: dict[str, dict[str, float]]) -> list[Row]:
    """The command, as a user types it."""
    return [
        Row(
            f"`qkscope analyze RUN`, all tables, {one['heads']} heads of d = {d}, two cores",
            "—",
            f"{one['heads'] / one['wall_s']:.1f} heads/s, {one['processor_s']:.0f} s of processor time",
            _TABLE_AIMS[d],
        )
        for d, one in found.items()
    ]


_TABLE_AIMS = {"64": "20 heads/s", "128": "34 s"}
_AIMS = {(16, 2048): "1.10×", (16, 8192): "2×", (128, 8192): "1.15×", (128, 2048): "1.4×", (512, 512): "1.4×"}


def _whole(shape: str, found: list[dict[str, Any]]) -> list[Row]:
    """Whole captures, until they are on disk."""
    return [
        Row(
            f"whole capture, {one['documents']} × {one['tokens']:,} tokens, {shape}",
            "its forward passes, batched",
            f"{one['ratio']:.2f}×, {one['size_mb']:.0f} MB",
            _AIMS[one["documents"], one["tokens"]],
        )
        for one in found
    ]


def markdown(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The table."""
    lines = ["| work | against | measured | target |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows(cpu, gpu))])


def machine(cpu: dict[str, Any], gpu: dict[str, Any]) -> str:
    """The machine of the measurements, in words."""
    m = cpu["machine"]
    here = f"{m['cores']} cores of {m['processor']}, {m['memory_gib']} GiB, Python {m['python']}, numpy {m['numpy']}"
    return f"{here}, torch {m['torch']}; GPU: {gpu['machine']}"


def load() -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the latest results."""
    return json.loads(CPU.read_text()), json.loads(GPU.read_text())
