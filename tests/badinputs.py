"""Bad and hostile inputs: how each is made, the command that reads it, its exit code and every line of the error.

``python -m tests.badinputs`` writes docs/errors.md from this table; tests/test_badinputs.py checks it.
In the messages, {place} is the folder that contains everything, and … stands for the words of a library.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from qkscope.core.rows import Rows
from qkscope.files.checksums import write_checksums
from qkscope.files.vectors import read_rows, write_rows
from qkscope.headids import TERMS, HeadId
from qkscope.results.side import PASSAGES

HEAD = "l00h01q"
ANALYZE = ("analyze", "{place}/data", "--only", "pca,rotation", "--workers", "1", "-o", "{place}/out")
RUN = ("analyze", "{place}/run", "--only", "pca,rotation", "--workers", "1", "-o", "{place}/out")
WITH_PLASTICITY = ("analyze", "{place}/run", "--only", "pca,rotation,plasticity", "--workers", "1", "-o", "{place}/out")
CAPTURE_JSON = ("capture", "{place}/model", "--texts", "{place}/texts/b.json", "-o", "{place}/new")
CAPTURE = ("capture", "{place}/model", "--texts", "{place}/texts", "-o", "{place}/new")


@dataclass(frozen=True)
class Case:
    """One bad input."""

    what: str
    """Description, for the table in the docs."""
    breaks: Callable[[Path], object]
    """Makes the bad input, in a folder with a good dataset, run, model, texts and tables."""
    command: tuple[str, ...]
    code: int
    says: tuple[str, ...]
    """All lines that name a failure."""
    lost: tuple[str, ...] = ()
    """Heads that are missing from the tables; all others must be there, unchanged."""
    changed: tuple[str, ...] = ()
    """Heads whose rows rightly differ."""


def nothing(_: Path) -> None:
    pass


# ---- ways to break a head ------------------------------------------------------------------------


def file(place: Path, head: str = HEAD) -> Path:
    return place / "data" / head / "data.parquet"


def rows(change: Callable[[Rows], Rows], head: str = HEAD) -> Callable[[Path], None]:
    def breaks(place: Path) -> None:
        write_rows(file(place, head), change(read_rows(file(place, head), HeadId.parse(head))))

    return breaks


def column(name: str, values: Callable[[pa.Table], pa.Array]) -> Callable[[Path], None]:
    def breaks(place: Path) -> None:
        table = pq.read_table(file(place), partitioning=None)
        pq.write_table(table.set_column(table.column_names.index(name), name, values(table)), file(place))

    return breaks


def table(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda place: pq.write_table(change(pq.read_table(file(place), partitioning=None)), file(place))


def positions(change: Callable[[np.ndarray], Any]) -> Callable[[Path], None]:
    return column("position", lambda t: pa.array(change(t["position"].to_numpy().astype(np.int64))))


def content(path: str, data: str | bytes | Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def breaks(place: Path) -> None:
        target = place / path
        target.parent.mkdir(parents=True, exist_ok=True)
        before = target.read_bytes() if target.is_file() else b""
        target.write_bytes(data(before) if callable(data) else data.encode() if isinstance(data, str) else data)

    return breaks


def said(path: str, **changes: object) -> Callable[[Path], None]:
    """Change entries of a JSON file; double underscores in a name separate nested keys."""

    def breaks(place: Path) -> None:
        whole = json.loads((place / path).read_text())
        for name, value in changes.items():
            inner, *keys = whole, *name.split("__")
            for key in keys[:-1]:
                inner = inner[int(key) if key.isdecimal() else key]
            inner[keys[-1]] = value
        (place / path).write_text(json.dumps(whole))
        if path == "run/run.json":  # what is wrong is what it says, not that it was changed
            write_checksums(place / "run")

    return breaks


def passage_of_another_folder(place: Path) -> None:
    """Put a passage into the tables of a run, as if it was copied there."""
    passage = pd.DataFrame({"layer": [0], "head": 0, "q_token": 0, "k_token": 0, "unit": 1.0} | dict.fromkeys(TERMS, 0))
    PASSAGES.write(place / "tables-run", passage.assign(model="run", text="a"))


def other_weights_at_64(place: Path) -> None:
    """Make a run that is named as another at a window of 64, with other weights."""
    shutil.copytree(place / "run", place / "run-at-64")
    manifest = json.loads((place / "run" / "run.json").read_text())
    manifest["model"]["weights"] = "0" * 16
    (place / "run-at-64" / "run.json").write_text(json.dumps(manifest))


def words_in(path: Path, name: str) -> None:
    """Replace a column of a parquet file by text."""
    found = pq.read_table(path)
    words = pa.array(["word"] * len(found))
    pq.write_table(found.set_column(found.column_names.index(name), name, words), path)


def filled(path: Path, name: str, value: float) -> None:
    """Replace all numbers of a column of a parquet file by one."""
    found = pq.read_table(path)
    same = pa.array([value] * len(found))
    pq.write_table(found.set_column(found.column_names.index(name), name, same), path)


def bomb(path: str, column: str) -> Callable[[Path], None]:
    """A small parquet file that unpacks to half a GiB."""

    def breaks(place: Path) -> None:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        rows = pa.table({column: pa.array(np.zeros(2**21, dtype=np.int64))})
        with pq.ParquetWriter(place / path, rows.schema, compression="zstd") as writer:
            for _ in range(32):
                writer.write_table(rows)

    return breaks


def pipe(place: Path) -> None:
    file(place).unlink()
    os.mkfifo(file(place))


def fifo(path: str) -> Callable[[Path], None]:
    """A named pipe instead of a file."""

    def breaks(place: Path) -> None:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).unlink(missing_ok=True)
        os.mkfifo(place / path)

    return breaks


def link(path: str) -> Callable[[Path], None]:
    """A link instead of a folder of the run to be captured."""

    def breaks(place: Path) -> None:
        content("new/progress.json", "{}")(place)
        (place / path).symlink_to(place / "texts")

    return breaks


def weights(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], None]:
    file_ = "model/model.safetensors"
    return lambda place: save_file(change(load_file(place / file_)), place / file_, metadata={"format": "pt"})


def wide(place: Path) -> None:
    """A run whose files all say that it is of 16 M tokens."""
    said("run/run.json", window=2**24, documents__0__tokens=2**23, options__reach_queries=0)(place)
    for path in (place / "run" / "moments").iterdir():
        save_file({name: array for name, array in load_file(path).items() if name != "reach"}, path)
    write_checksums(place / "run")


def pickled(place: Path) -> None:
    """Weights that would run a command if they were unpickled."""
    import torch

    class Command:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {place / 'executed'}",)

    (place / "model" / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Command()}, place / "model" / "pytorch_model.bin")


def code(place: Path) -> None:
    """A model that comes with its own code."""
    said(
        "model/config.json", model_type="unheard-of", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    )(place)
    (place / "model" / "own.py").write_text(f"open({str(place / 'executed')!r}, 'w')")


def still(r: Rows) -> Rows:
    """Every vector twice, at two positions: nothing drifts."""
    n = len(r) // 2
    return Rows(np.repeat(r.x[:n], 2, axis=0), np.tile([0, 100], n), np.arange(2 * n) // 2)


def tensors(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], None]:
    layer = "run/moments/layer-001.safetensors"

    def breaks(place: Path) -> None:
        save_file(change(load_file(place / layer)), place / layer)
        write_checksums(place / "run")

    return breaks


FAILED = f"failed: data {HEAD}: "
OTHERS = "1 of 4 heads failed; the others are in {place}/out"


def head(what: str, breaks: Callable[[Path], object], why: str) -> Case:
    return Case(what, breaks, ANALYZE, 1, (f"{FAILED}{why}", OTHERS), (HEAD,))


def key_head(what: str, breaks: Callable[[Path], object], why: str, at: str) -> Case:
    both = ("l00h00q", HEAD)
    lines = [f"failed: data {name}: {why} [{at.format(name)}]" for name in both]
    return Case(what, breaks, ANALYZE, 1, (*lines, "2 of 4 heads failed; the others are in {place}/out"), both)


def error(what: str, breaks: Callable[[Path], object], command: tuple[str, ...], why: str) -> Case:
    return Case(what, breaks, command, 2, (f"error: {why}",))


def layer(what: str, breaks: Callable[[Path], object], why: str, command: tuple[str, ...] = RUN) -> Case:
    """Layer 1 of a run; its four heads are lost."""
    lost = tuple(f"l01h0{number}q" for number in range(4))
    lines = [f"failed: run {name}: {{place}}/run/moments/layer-001.safetensors {why}" for name in lost]
    return Case(what, breaks, command, 1, (*lines, "4 of 8 heads failed; the others are in {place}/out"), lost)


def all_heads(what: str, breaks: Callable[[Path], object], command: tuple[str, ...], why: str) -> Case:
    """Every head of the dataset fails, so nothing is written."""
    reasons = [why.format(key=f"l00h0{n // 2}k", last=510 if n == 0 else 511) for n in range(4)]
    lines = [f"failed: data l00h0{n}q: {reason} [l00h0{n}q/data.parquet]" for n, reason in enumerate(reasons)]
    return Case(what, breaks, command, 2, (*lines, "error: no head could be analysed; {place}/out is unchanged"))


HEADS = [
    head(
        "a truncated file",
        content(f"data/{HEAD}/data.parquet", lambda b: b[:-100]),
        "the file cannot be read as parquet (…); download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a file that is not parquet",
        content(f"data/{HEAD}/data.parquet", b"junk"),
        "the file cannot be read as parquet (…); download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "an empty file",
        content(f"data/{HEAD}/data.parquet", b""),
        "the file cannot be read as parquet (…); download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a file with its middle overwritten",
        content(f"data/{HEAD}/data.parquet", lambda b: b[:200] + bytes(len(b) - 400) + b[-200:]),
        "the file cannot be read as parquet (…); download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a named pipe",
        pipe,
        "the path is not a regular file; download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a small file that fills the memory",
        bomb("data/l00h01q/data.parquet", "position"),
        "the file cannot be read as parquet (it unpacks to 0.5 GiB from … bytes; if that is expected, set QKSCOPE_MOST_GIB higher); download or capture it again [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a file without rows",
        table(lambda t: t.slice(0, 0)),
        "the file has no rows; capture this head again or leave it out [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a single row", rows(lambda r: r.take(np.array([0]))), "expected at least 2 rows, got 1 [l00h01q/data.parquet]"
    ),
    head(
        "all rows at one position",
        rows(lambda r: Rows(r.x, np.full(len(r), 7), r.example_id)),
        "all 200 rows have position 7, so nothing can correlate with position [l00h01q/data.parquet]",
    ),
    head(
        "vectors that are all NaN",
        rows(lambda r: Rows(np.full_like(r.x, np.nan), r.position, r.example_id)),
        "expected at least 2 rows, got 0 after dropping 200 non-finite ones [l00h01q/data.parquet]",
    ),
    head(
        "vectors that are all null",
        column("vector", lambda t: pa.nulls(len(t), t["vector"].type)),
        "expected at least 2 rows, got 0 after dropping 200 non-finite ones [l00h01q/data.parquet]",
    ),
    head(
        "vectors that are shorter than the keys",
        rows(lambda r: Rows(r.x[:, :5], r.position, r.example_id)),
        "its vectors have length 5, those of its key head l00h00k have 8 [l00h01q/data.parquet]",
    ),
    head(
        "vectors of length 1",
        rows(lambda r: Rows(r.x[:, :1], r.position, r.example_id)),
        "expected vectors of length 2 or more, got 1 [l00h01q/data.parquet]",
    ),
    head(
        "vectors of different lengths",
        column("vector", lambda t: pa.array([[1.0] * (2 + i % 2) for i in range(len(t))])),
        "expected all vectors to have the same length, got lengths 2, 3 [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "vectors of text",
        column("vector", lambda t: pa.array([["a", "b"]] * len(t))),
        "expected 'vector' to contain floats, got string [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "vectors of integers",
        column("vector", lambda t: pa.array([[1, 2]] * len(t))),
        "expected 'vector' to contain floats, got int64 [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "numbers instead of vectors",
        column("vector", lambda t: pa.array(np.ones(len(t)))),
        "expected 'vector' to be a list of floats, got double [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "values that are far too large",
        column("vector", lambda t: pa.array([[1e300] * 8] * len(t))),
        "contains values beyond ±1e+60, larger than in any attention vector [l00h01q/data.parquet]",
    ),
    head(
        "a missing column",
        table(lambda t: t.drop_columns("position")),
        "expected the columns example_id, position, vector; got bucket, example_id, vector, sliding_window, token_str [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "a repeated column",
        table(lambda t: t.append_column("position", t["position"])),
        "the column position appears more than once [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "positions of more than 32 bits",
        positions(lambda p: np.where(np.arange(len(p)) == 5, 2**63 - 1, p)),
        "expected 'position' within 32 bits, got 2 to 9223372036854775807 [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "negative positions",
        positions(lambda p: p - 1000),
        "expected 'position' of at least 0, got -998 [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "positions that are fractions",
        positions(lambda p: p + 0.5),
        "expected 'position' to be integers, got double [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "positions that are text",
        positions(lambda p: p.astype(str)),
        "expected 'position' to be integers, got string [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "positions that are null",
        positions(lambda p: [None] * len(p)),
        "expected 'position' to be integers, got null [{place}/data/l00h01q/data.parquet]",
    ),
    head(
        "document numbers that are text",
        column("example_id", lambda t: pa.array(["a"] * len(t))),
        "expected 'example_id' to be integers, got string [{place}/data/l00h01q/data.parquet]",
    ),
    Case(
        "a head without any drift",
        lambda p: [rows(still, h)(p) for h in ("l00h00q", "l00h00k")],
        ANALYZE,
        1,
        (
            "failed: data l00h00q: no linear drift with position at all, so axis a is undefined [l00h00q/data.parquet]",
            "1 of 4 heads failed; the others are in {place}/out",
        ),
        ("l00h00q",),
        (HEAD,),
    ),
    key_head(
        "a missing key head",
        lambda p: shutil.rmtree(p / "data" / "l00h00k"),
        "its key head l00h00k is missing (with 2 query heads per key head; set data.q_per_kv or --q-per-kv if that is wrong)",
        "{}/data.parquet",
    ),
    key_head(
        "a key head that is not parquet",
        content("data/l00h00k/data.parquet", b"junk"),
        "its key head l00h00k cannot be used: the file cannot be read as parquet (…); download or capture it again",
        "{{place}}/data/l00h00k/data.parquet",
    ),
    all_heads(
        "a window shorter than the positions",
        nothing,
        (*ANALYZE, "--window", "100"),
        "has positions up to {last}, beyond the window of 100; use a larger window",
    ),
    all_heads(
        "a window far longer than the positions",
        nothing,
        (*ANALYZE, "--window", "16777216"),
        "a window of 16,777,216 tokens for 200 rows at positions up to {last}; give the real --window",
    ),
    all_heads(
        "a window too long for the frequency search",
        nothing,
        (*ANALYZE, "--window", "99999999"),
        "a window of 99,999,999 tokens exceeds the limit of 16,777,216 for the frequency search",
    ),
]
DATASETS = [
    error(
        "a run on object storage",
        nothing,
        ("analyze", "s3://bucket/run", "-o", "{place}/out"),
        "s3://bucket/run is not a folder; copy it to one, or give a Hub id or an hf:// URL",
    ),
    error(
        "results on object storage",
        nothing,
        ("analyze", "{place}/run", "-o", "s3://bucket/out"),
        "s3://bucket/out is not a folder: object storage has neither renames nor locks; write to a local folder, and copy it there, also while it is being written",
    ),
    error(
        "a capture on object storage",
        nothing,
        ("capture", "{place}/model", "--texts", "{place}/texts", "-o", "s3://bucket/run"),
        "s3://bucket/run is not a folder: object storage has neither renames nor locks; write to a local folder, and copy it there, also while it is being written",
    ),
    error(
        "shares on object storage",
        nothing,
        ("merge", "s3://bucket/share", "-o", "{place}/out"),
        "s3://bucket/share is not a folder; copy it to one",
    ),
    error(
        "a folder that does not exist",
        nothing,
        ("analyze", "{place}/nowhere", "-o", "{place}/out"),
        "{place}/nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    ),
    error(
        "a file instead of a folder",
        content("afile", "x"),
        ("analyze", "{place}/afile", "-o", "{place}/out"),
        "{place}/afile is not a folder; give a dataset folder, a Hub id or an hf:// URL",
    ),
    error(
        "a folder without heads",
        lambda p: (p / "none").mkdir(),
        ("analyze", "{place}/none", "-o", "{place}/out"),
        "{place}/none contains no heads; expected files such as l05h13q/data.parquet",
    ),
    error(
        "a folder of two datasets",
        lambda p: shutil.copytree(p / "data" / HEAD, p / "data" / "more" / HEAD),
        ANALYZE,
        "{place}/data contains 2 datasets (., more); give the path of one of them",
    ),
    error(
        "two files for one head",
        lambda p: shutil.copytree(p / "data" / HEAD, p / "data" / "l000h001q"),
        ANALYZE,
        "two files for head l00h01q: l000h001q/data.parquet and l00h01q/data.parquet; remove one",
    ),
    all_heads(
        "queries without keys",
        lambda p: [shutil.rmtree(x) for x in (p / "data").glob("*k")],
        ANALYZE,
        "its key head {key} is missing (with 2 query heads per key head; set data.q_per_kv or --q-per-kv if that is wrong)",
    ),
    error(
        "a dataset.json that is not JSON",
        content("data/dataset.json", "{"),
        ANALYZE,
        "{place}/data/dataset.json cannot be read as JSON (…); correct or remove it",
    ),
    error(
        "a pipe instead of dataset.json",
        fifo("data/dataset.json"),
        ANALYZE,
        "{place}/data/dataset.json cannot be read as JSON (it is not a regular file); correct or remove it",
    ),
    error(
        "a dataset.json that is a list",
        content("data/dataset.json", "[]"),
        ANALYZE,
        "{place}/data/dataset.json: expected a JSON object with q_per_kv, window, scaling",
    ),
    error(
        "a dataset.json nested without end",
        content("data/dataset.json", "[" * 100_000),
        ANALYZE,
        "{place}/data/dataset.json cannot be read as JSON (…); correct or remove it",
    ),
    error(
        "a dataset.json with a negative window",
        said("data/dataset.json", window=-5),
        ANALYZE,
        "{place}/data/dataset.json: expected window to be a positive int, got -5",
    ),
    error(
        "a dataset.json with q_per_kv true",
        said("data/dataset.json", q_per_kv=True),
        ANALYZE,
        "{place}/data/dataset.json: expected q_per_kv to be a positive int, got True",
    ),
    error(
        "a dataset without a clear q_per_kv",
        lambda p: [
            (p / "data" / "dataset.json").unlink(),
            shutil.rmtree(p / "data" / "l00h00q"),
            shutil.rmtree(p / "data" / "l00h03q"),
        ],
        ANALYZE,
        "cannot determine the number of query heads per key head: the highest indices give 3 query heads and 2 key heads; set data.q_per_kv or --q-per-kv; 2 would fit",
    ),
    error(
        "a rotary encoding that is not an object",
        said("data/dataset.json", rope=5),
        ANALYZE,
        "{place}/data: dataset.json: expected rope to be an object, got int",
    ),
    error(
        "a rotary encoding with unknown keys",
        said("data/dataset.json", rope={"base": 5}),
        ANALYZE,
        "{place}/data: dataset.json: unknown key rope.base; valid keys are theta, dims, frequencies, layout, start, sign, layers",
    ),
    error(
        "a rotary encoding with theta and frequencies",
        said("data/dataset.json", rope={"theta": 1e4, "frequencies": [1.0]}),
        ANALYZE,
        "{place}/data: dataset.json: expected rope to have exactly one of theta and frequencies",
    ),
    error(
        "a rotary encoding with infinite theta",
        content("data/dataset.json", '{"q_per_kv": 2, "rope": {"theta": Infinity}}'),
        ANALYZE,
        "{place}/data: dataset.json: expected rope.theta, or each of rope.frequencies, to be a finite number",
    ),
]
RUNS = [
    error(
        "a run without its manifest",
        lambda p: (p / "run" / "run.json").unlink(),
        RUN,
        "{place}/run is a captured run without its run.json; copy or capture the run again",
    ),
    error(
        "a run that is not finished",
        lambda p: (p / "run" / "run.json").rename(p / "run" / "progress.json"),
        RUN,
        "capture unfinished in {place}/run; rerun the same capture command to resume",
    ),
    error(
        "a manifest that is not JSON",
        content("run/run.json", lambda b: b[:100]),
        RUN,
        "{place}/run/run.json cannot be read (…); capture the run again",
    ),
    error(
        "a pipe instead of a manifest",
        fifo("run/run.json"),
        ("verify", "{place}/run"),
        "{place}/run/run.json cannot be read (it is not a regular file); capture the run again",
    ),
    error(
        "a pipe instead of checksums",
        fifo("run/checksums.json"),
        ("verify", "{place}/run"),
        "{place}/run/checksums.json cannot be read (it is not a regular file); copy the run again",
    ),
    error(
        "documents longer than the window",
        said("run/run.json", window=16),
        RUN,
        "{place}/run/run.json is not a valid manifest (documents: the longest has 87 tokens, more than the window of 16); capture the run again",
    ),
    error(
        "a repeated head",
        said("run/run.json", layers__0__query_heads=[0, 0, 1, 1]),
        RUN,
        "{place}/run/run.json is not a valid manifest (layers: expected the query heads of layer 0 in order, each once, got [0, 0, 1, 1]); capture the run again",
    ),
    error(
        "a manifest of another format",
        said("run/run.json", format=1),
        RUN,
        "{place}/run/run.json: expected format 3, got 1; capture the run again",
    ),
    error(
        "a manifest nested without end",
        content("run/run.json", "[" * 100_000),
        RUN,
        "{place}/run/run.json cannot be read (…); capture the run again",
    ),
    error(
        "a window far longer than any document",
        said("run/run.json", window=2**24),
        RUN,
        "{place}/run/run.json is not a valid manifest (window: 16777216 tokens, while the longest document has 87); capture the run again",
    ),
    Case(
        "a window that the sample does not fill",
        wide,
        RUN,
        2,
        (
            *(
                f"failed: run l0{n // 4}h0{n % 4}q: a window of 16,777,216 tokens for 100 rows at positions up to 84; capture the run again [{{place}}/run/sample]"
                for n in range(8)
            ),
            "error: no head could be analysed; {place}/out is unchanged",
        ),
    ),
    error(
        "a window above the limit",
        said("run/run.json", window=10**15),
        RUN,
        "{place}/run/run.json is not a valid manifest (window: input should be less than or equal to 16777216, got 1000000000000000); capture the run again",
    ),
    error(
        "more buckets than the limit",
        said("run/run.json", options__buckets=10**9),
        RUN,
        "{place}/run/run.json is not a valid manifest (options.buckets: input should be less than or equal to 4096, got 1000000000); capture the run again",
    ),
    error(
        "frequencies that are not finite",
        said("run/run.json", layers__0__rope__frequencies=[float("inf")]),
        RUN,
        "{place}/run/run.json is not a valid manifest (layers.0.rope.frequencies.0: input should be a finite number, got inf); capture the run again",
    ),
    error(
        "a repeated layer",
        said("run/run.json", layers__1__layer=0),
        RUN,
        "{place}/run/run.json is not a valid manifest (layers: layer 0 appears twice); capture the run again",
    ),
    error(
        "queries without their key head",
        said("run/run.json", layers__0__key_heads=[0]),
        RUN,
        "{place}/run/run.json is not a valid manifest (layers: layer 0 is missing key head 1, which one of its query heads reads); capture the run again",
    ),
    layer(
        "a truncated layer",
        content("run/moments/layer-001.safetensors", lambda b: b[:500]),
        "cannot be read as a layer's moments (…); capture the run again",
    ),
    layer(
        "a pipe instead of a layer",
        fifo("run/moments/layer-001.safetensors"),
        "cannot be read as a layer's moments (it is not a regular file); capture the run again",
    ),
    layer(
        "a rotary encoding beyond the vectors",
        said("run/run.json", layers__1__rope__start=9),
        "is not valid (its manifest rotates coordinates beyond the vector length of 12); capture the run again",
    ),
    layer(
        "a missing layer",
        lambda p: (p / "run" / "moments" / "layer-001.safetensors").unlink(),
        "cannot be read as a layer's moments (…); capture the run again",
    ),
    layer(
        "a layer of another shape",
        tensors(lambda t: t | {"q.n": t["q.n"][:2]}),
        "cannot be read as a layer's moments (the shapes of q do not match: n (2, 8), mean (4, 8, 13), scatter (4, 8, 13, 13)); capture the run again",
    ),
    layer(
        "a layer of 1.4 KB that asks for 149 GiB",
        tensors(
            lambda t: {k: np.zeros((0, 10**10), v.dtype) if k.endswith(".scatter") else v[:0] for k, v in t.items()}
        ),
        "cannot be read as a layer's moments (an array of shape (0, 10000000000) holds no triangles); capture the run again",
    ),
    layer(
        "a layer with a missing tensor",
        tensors(lambda t: {k: v for k, v in t.items() if k != "k.mean"}),
        "cannot be read as a layer's moments (…); capture the run again",
    ),
    layer(
        "means in single precision",
        tensors(lambda t: t | {"q.mean": t["q.mean"].astype(np.float32)}),
        "cannot be read as a layer's moments (q.mean: expected float64, got float32); capture the run again",
    ),
    layer(
        "sums in double precision",
        tensors(lambda t: t | {"q.scatter": t["q.scatter"].astype(np.float64)}),
        "cannot be read as a layer's moments (q.scatter: expected float32, got float64); capture the run again",
    ),
    layer(
        "pairs of keys beyond the window",
        tensors(lambda t: t | {"spread.pairs": t["spread.pairs"] + 10**6}),
        "is not valid (spread.pairs: expected pairs of positions below … for 16 buckets); capture the run again",
        WITH_PLASTICITY,
    ),
    layer(
        "pairs of keys that are not in the sample",
        tensors(lambda t: t | {"spread.pairs": t["spread.pairs"] + np.array([1000, 0, 0], np.int32)}),
        "has pairs of keys that are not in the run's sample; capture the run again",
        WITH_PLASTICITY,
    ),
    layer(
        "variances of fewer pairs than there are",
        tensors(lambda t: t | {"spread.along_pairs": t["spread.along_pairs"][..., :-1].copy()}),
        "is not valid (spread.along_pairs: …); capture the run again",
        WITH_PLASTICITY,
    ),
    layer(
        "moments that are not finite",
        tensors(lambda t: t | {"q.mean": t["q.mean"] * np.nan}),
        "is not valid (q.mean contains non-finite values); capture the run again",
    ),
    layer(
        "a packed triangle of the wrong size",
        tensors(lambda t: t | {"q.scatter": t["q.scatter"][..., :-1].copy()}),
        "cannot be read as a layer's moments (the shapes of q do not match: n (4, 8), mean (4, 8, 13), scatter (4, 8, 12, 12)); capture the run again",
    ),
    Case(
        "a missing head of the sample",
        lambda p: shutil.rmtree(p / "run" / "sample" / "l01h00q"),
        RUN,
        1,
        (
            "failed: run l01h00q: its sample cannot be read: l01h00q: the dataset has no file for this head [{place}/run/sample]",
            "1 of 8 heads failed; the others are in {place}/out",
        ),
        changed=("l01h00q",),
    ),
    error(
        "options that a captured run fixes",
        nothing,
        (*RUN, "--window", "99"),
        "{place}/run is a captured run, whose window was fixed at capture; remove that option",
    ),
]
OPTIONS = [
    error(
        "layers that do not exist",
        nothing,
        (*ANALYZE, "--layers", "0,9"),
        "data has no layer 9; its layers are 0",
    ),
    error(
        "layers that are not numbers",
        nothing,
        (*ANALYZE, "--layers", "x-2"),
        "expected numbers and ranges such as 0,4-7, got 'x-2'",
    ),
    error(
        "a descending range",
        nothing,
        (*ANALYZE, "--layers", "5-2"),
        "expected ascending ranges that end below 10000, got '5-2'",
    ),
    error(
        "a range above the limit",
        nothing,
        (*ANALYZE, "--heads", "0-99999999999"),
        "expected numbers and ranges such as 0,4-7, got '0-99999999999'",
    ),
    error(
        "an unknown analysis",
        nothing,
        (*ANALYZE, "--only", "magic"),
        "unknown analysis 'magic'; choose from pca, rotation, position, planes, distance, plasticity, scores, reach, roles",
    ),
    error(
        "one label for two models",
        nothing,
        ("analyze", "{place}/data", "{place}/data", "-o", "{place}/out"),
        "several sources have the label data; give each source its own label",
    ),
    error(
        "tables of another run under the same label",
        said("tables-run/summary.json", models__run__dataset__digest="0" * 64),
        ("analyze", "{place}/run", "--only", "plasticity", "-o", "{place}/tables-run"),
        "{place}/tables-run has qk, heads, rotated of run from another run; write elsewhere, or give one of them another label",
    ),
    error(
        "effects of other weights under the same label",
        said("tables-run/summary.json", models__run__measured={"effects": {"weights": "0" * 16}}),
        ("analyze", "{place}/run", "-o", "{place}/tables-run"),
        "{place}/tables-run has effects of run from another run; write elsewhere, or give one of them another label",
    ),
    error(
        "effects beside tables of other weights",
        said("tables-run/summary.json", models__run__dataset__weights="0" * 16),
        ("effects", "{place}/model", "{place}/run", "--texts", "{place}/texts", "-o", "{place}/tables-run"),
        "{place}/tables-run has tables of run from a run of other weights; write elsewhere, or give one of them another label",
    ),
    error(
        "a passage copied from another results folder",
        passage_of_another_folder,
        ("top", "{place}/tables-run"),
        "{place}/tables-run has rows of run in passage that summary.json does not record: they were changed, or copied from another folder; move passage away, or write them again",
    ),
    error(
        "another run in place of a run at another window",
        other_weights_at_64,
        ("card", "{place}/run", "l00h01", "--window", "64", "-o", "{place}/card.png"),
        "{place}/run-at-64 is a run of other weights than {place}/run, not the same at another window; rename it, or leave it out",
    ),
    error(
        "too few labels",
        nothing,
        ("analyze", "{place}/data", "{place}/run", "--model", "m", "-o", "{place}/out"),
        "--model was given 1 times for 2 datasets; give it once for each",
    ),
    error(
        "an unknown engine",
        nothing,
        (*ANALYZE, "--engine", "slurm"),
        "unknown engine 'slurm'; use local or ray",
    ),
    error(
        "a Ray address without --engine ray",
        nothing,
        (*ANALYZE, "--ray-address", "auto"),
        "--ray-address needs --engine ray",
    ),
    error(
        "points of heads that do not exist",
        nothing,
        (*ANALYZE, "--points", "l09h09"),
        "expected all, a number or heads of data such as l05h13,l00h02, got 'l09h09'",
    ),
    error(
        "a file instead of the output folder",
        content("afile", "x"),
        (*ANALYZE[:-1], "{place}/afile"),
        "cannot write to {place}/afile ({place}/afile is not a writable directory); choose another",
    ),
    error(
        "a table that qkscope did not write",
        content("out/qk.csv", "my own"),
        ANALYZE,
        "{place}/out/qk.csv exists without qk.parquet, so it was not written by qkscope; move it away or write elsewhere",
    ),
    error(
        "a table of another version",
        lambda p: [(p / "out").mkdir(), pq.write_table(pa.table({"model": ["m"]}), p / "out" / "heads.parquet")],
        ANALYZE,
        "{place}/out/heads.parquet was not written by this version (heads: unexpected or missing columns: active_planes, active_share, amplification and 236 more); move it away or write elsewhere",
    ),
    error(
        "a list of renames that qkscope did not write",
        content("out/.renames.json", '{".qk.csv.1.tmp": "../../elsewhere"}'),
        ANALYZE,
        "{place}/out/.renames.json was not written by qkscope; move it away",
    ),
    error(
        "a pipe instead of a list of renames",
        fifo("out/.renames.json"),
        ANALYZE,
        "{place}/out/.renames.json was not written by qkscope; move it away",
    ),
    error(
        "a table with text instead of numbers",
        lambda p: [shutil.copytree(p / "tables-data", p / "out"), words_in(p / "out" / "rotated.parquet", "r_k_a")],
        ANALYZE,
        "{place}/out/rotated.parquet was not written by this version (column r_k_a must contain numbers); move it away or write elsewhere",
    ),
    error(
        "a table with a number that no analysis gives",
        lambda p: [
            shutil.copytree(p / "tables-data", p / "out"),
            filled(p / "out" / "rotated.parquet", "r_k_a", 1e308),
        ],
        ANALYZE,
        "{place}/out/rotated.parquet was not written by this version (column r_k_a contains 1e+308); move it away or write elsewhere",
    ),
    error(
        "a small table that fills the memory",
        bomb("out/rotated.parquet", "model"),
        ANALYZE,
        "{place}/out/rotated.parquet was not written by this version (it unpacks to 0.5 GiB from … bytes; if that is expected, set QKSCOPE_MOST_GIB higher); move it away or write elsewhere",
    ),
    error(
        "a table with a layer that no model has",
        lambda p: filled(p / "tables-data" / "rotated.parquet", "layer", 2 * 10**9),
        ("report", "{place}/tables-data", "-o", "{place}/report"),
        "{place}/tables-data/rotated.parquet: column layer contains 2000000000; layers and heads are counted from 0, up to 10,000",
    ),
    error(
        "a summary with a number of thirty digits",
        content("out/summary.json", '{"models": {"m": {"n_tokens": 1' + "0" * 30 + "}}}"),
        ANALYZE,
        "{place}/out/summary.json cannot be read (ValueError('a number of 31 digits')); move it away or write elsewhere",
    ),
    error(
        "a summary with a number that is not finite",
        content("out/summary.json", '{"models": {"m": {"loss": 1e400}}}'),
        ANALYZE,
        "{place}/out/summary.json cannot be read (ValueError('the number 1e400')); move it away or write elsewhere",
    ),
    error(
        "axes with text instead of numbers",
        lambda p: [shutil.copytree(p / "tables-data", p / "out"), words_in(p / "out" / "axes.parquet", "layer")],
        ANALYZE,
        "{place}/out/axes.parquet: column layer must contain numbers; it was not written by qkscope, move it away",
    ),
    error(
        "a summary that is not JSON",
        content("out/summary.json", "{"),
        ANALYZE,
        "{place}/out/summary.json cannot be read (…); move it away or write elsewhere",
    ),
    error(
        "a pipe instead of a summary",
        fifo("out/summary.json"),
        ANALYZE,
        "{place}/out/summary.json cannot be read (…); move it away or write elsewhere",
    ),
    error(
        "a folder instead of a table",
        lambda p: (p / "out" / "rotated.csv").mkdir(parents=True),
        ANALYZE,
        "{place}/out/rotated.csv or .parquet is a folder; move it away or write elsewhere",
    ),
]
CONFIG = ("pca-analyze", "--config", "{place}/c.yaml")
CONFIGS = [
    error("a config that does not exist", nothing, CONFIG, "{place}/c.yaml does not exist"),
    error(
        "a folder without configs",
        lambda p: (p / "none").mkdir(),
        (*CONFIG[:-1], "{place}/none"),
        "{place}/none holds no .yaml file",
    ),
    error("a config that is not YAML", content("c.yaml", "a: [1"), CONFIG, "{place}/c.yaml is not valid YAML (…)"),
    error(
        "a config that tries to run code",
        content("c.yaml", "model: !!python/object/apply:os.system [echo]"),
        CONFIG,
        "{place}/c.yaml is not valid YAML (…)",
    ),
    error(
        "a config that is not UTF-8", content("c.yaml", b"\xff\xfe\x00"), CONFIG, "{place}/c.yaml cannot be read (…)"
    ),
    error(
        "a config that is a list",
        content("c.yaml", "- 1"),
        CONFIG,
        "{place}/c.yaml: expected keys such as 'model', got list",
    ),
    error(
        "an empty config", content("c.yaml", ""), CONFIG, "{place}/c.yaml: expected keys such as 'model', got NoneType"
    ),
    error(
        "a config with a misspelt key",
        content("c.yaml", "model: m\nfamily: f\ndata: {datset: x}"),
        CONFIG,
        "{place}/c.yaml: data.dataset: Field required; unknown key 'data.datset'; did you mean 'dataset'?",
    ),
    error(
        "a config with text instead of a number",
        content("c.yaml", "model: m\nfamily: f\ndata: {dataset: x, max_samples: many}"),
        CONFIG,
        "{place}/c.yaml: data.max_samples: Input should be a valid integer",
    ),
    error(
        "tables into a link that leads nowhere",
        lambda p: (p / "out").symlink_to(p / "gone"),
        ANALYZE,
        "cannot write to {place}/out (it is a link to {place}/gone, which does not exist); choose another",
    ),
    error(
        "a folder in place of the report's page",
        lambda p: (p / "report" / "report.html").mkdir(parents=True),
        ("report", "{place}/tables-data", "-o", "{place}/report"),
        "{place}/report/report.html is a folder; move it away or choose another --output",
    ),
    error(
        "a page of somebody else's in place of the report's",
        content("report/report.html", "<h1>Thesis</h1>"),
        ("report", "{place}/tables-data", "-o", "{place}/report"),
        "{place}/report/report.html was not written by qkscope; move it away or choose another --output",
    ),
    error(
        "a page of somebody else's in place of the explorer",
        content("thesis.html", "<h1>Thesis</h1>"),
        ("view", "{place}/tables-data", "--no-open", "-o", "{place}/thesis.html"),
        "{place}/thesis.html was not written by qkscope; move it away or choose another --output",
    ),
    error(
        "a study of runs that do not exist",
        content("s.yaml", "runs: [{path: nowhere}]"),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    ),
    error(
        "a study file that is a named pipe",
        lambda place: os.mkfifo(place / "s.yaml"),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/s.yaml cannot be read (it is not a regular file)",
    ),
    error(
        "a study file that never ends",
        lambda place: (place / "s.yaml").symlink_to("/dev/zero"),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/s.yaml cannot be read (it is not a regular file)",
    ),
    error(
        "a study file of 17 MB",
        lambda place: (place / "s.yaml").write_text("runs: [] #" + 17_000_000 * "x"),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/s.yaml cannot be read (it has more than 16,777,216 bytes)",
    ),
    error(
        "a study file whose key would rename the terminal",
        content("s.yaml", '"\\e]0;owned\\a": 1\nruns: [{path: x}]'),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/s.yaml: …\\x1b]0;owned\\x07…",
    ),
    error(
        "a study without runs",
        content("s.yaml", "runs: []"),
        ("report", "{place}/s.yaml", "-o", "{place}/report"),
        "{place}/s.yaml: runs: List should have at least 1 item after validation, not 0",
    ),
    error(
        "a table of heads without its columns",
        content("foreign/rotated.csv", "a,b\n1,2\n"),
        ("report", "{place}/foreign", "-o", "{place}/report"),
        "{place}/foreign/rotated.csv has no column layer, head, which is required",
    ),
    error(
        "a table of heads with text instead of numbers",
        content("foreign/rotated.csv", "model,layer,head,r_q_a\nm,one,two,three\n"),
        ("report", "{place}/foreign", "-o", "{place}/report"),
        "{place}/foreign/rotated.csv: column layer must contain integers (…)",
    ),
    error(
        "a folder without tables to verify",
        nothing,
        ("verify", "{place}/run", "--tables", "{place}/texts"),
        "{place}/texts contains no tables",
    ),
]
CAPTURES = [
    error(
        "no texts", nothing, ("capture", "{place}/model", "-o", "{place}/new"), "a capture needs a MODEL and --texts"
    ),
    error(
        "texts that do not exist",
        nothing,
        ("capture", "{place}/model", "--texts", "{place}/nowhere", "-o", "{place}/new"),
        "{place}/nowhere matches no file, folder or glob",
    ),
    error(
        "a folder without texts",
        lambda p: (p / "none").mkdir(),
        ("capture", "{place}/model", "--texts", "{place}/none", "-o", "{place}/new"),
        "no text found at {place}/none; expected .txt, .md, .jsonl, .parquet files",
    ),
    error(
        "a passage that does not exist",
        nothing,
        (*CAPTURE, "--passage", "{place}/nowhere.txt"),
        "--passage {place}/nowhere.txt cannot be read (No such file or directory); give a text file",
    ),
    error(
        "a passage without text",
        lambda p: (p / "empty.txt").write_text(" \n"),
        (*CAPTURE, "--passage", "{place}/empty.txt"),
        "--passage {place}/empty.txt has no text; write a sentence or two into it",
    ),
    error(
        "a passage that is not text",
        lambda p: (p / "latin.txt").write_bytes(b"caf\xe9"),
        (*CAPTURE, "--passage", "{place}/latin.txt"),
        "--passage {place}/latin.txt is not UTF-8 text; convert it",
    ),
    error(
        "a passage of one word",
        lambda p: (p / "word.txt").write_text("w01"),
        (*CAPTURE, "--passage", "{place}/word.txt"),
        "the passage has 1 token; give a text of 3 or more",
    ),
    error(
        "a passage of a capture before the rotation",
        lambda p: (p / "own.txt").write_text("w01 w02 w03"),
        (*CAPTURE, "--passage", "{place}/own.txt", "--pre-rope"),
        "--passage shows scores after the rotation, which --pre-rope never sees; leave one out",
    ),
    error(
        "weights in a pickle that holds more than tensors",
        pickled,
        CAPTURE,
        "{place}/model cannot be loaded (a weights file contains objects other than tensors and is not loaded; convert it to safetensors)",
    ),
    error(
        "a tokenizer whose template asks for a token that it does not have",
        said(
            "model/tokenizer.json",
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            },
        ),
        CAPTURE,
        "the tokenizer fails (…); give another with --tokenizer",
    ),
    error(
        "attention by code from the Hub",
        nothing,
        (*CAPTURE, "--attn", "someone/kernel"),
        "the attention implementation 'someone/kernel' is code on the Hub, which is not run; use --attn sdpa or eager",
    ),
    error(
        "a config that asks for attention by code from the Hub",
        said("model/config.json", attn_implementation="someone/kernel:run"),
        CAPTURE,
        "the attention implementation 'someone/kernel:run' is code on the Hub, which is not run; use --attn sdpa or eager",
    ),
    error(
        "a small file of texts that fills the memory",
        bomb("texts/b.parquet", "text"),
        CAPTURE,
        "{place}/texts/b.parquet cannot be read (it unpacks to 0.5 GiB from … bytes; if that is expected, set QKSCOPE_MOST_GIB higher); leave it out",
    ),
    error(
        "a text of more than a GiB",
        lambda p: [content("texts/b.txt", "w01")(p), os.truncate(p / "texts" / "b.txt", 2**30 + 1)],
        CAPTURE,
        "{place}/texts/b.txt cannot be read (it exceeds the 1 GiB limit); leave it out",
    ),
    error(
        "texts that are not UTF-8",
        content("texts/b.txt", b"\xff\xfe\xfa"),
        CAPTURE,
        "{place}/texts/b.txt is not UTF-8 text; convert it, or leave it out",
    ),
    error(
        "a JSON line without its field",
        content("texts/b.jsonl", '{"text": "w01"}\n{"other": 1}\n'),
        CAPTURE,
        "{place}/texts/b.jsonl, line 2: expected a JSON object with a field 'text', got …; choose with --field",
    ),
    error(
        "a JSON file that is not an array",
        content("texts/b.json", '{"text": "w01"}'),
        CAPTURE_JSON,
        "{place}/texts/b.json: expected a JSON array of texts, or of objects with a field 'text'",
    ),
    error(
        "messages without a role",
        content("texts/b.json", '[{"messages": [{"content": "w01"}]}]'),
        CAPTURE_JSON,
        "{place}/texts/b.json, entry 0: expected messages, each with a role and a content that are text",
    ),
    error(
        "conversations for a tokenizer without a chat template",
        content("texts/b.json", '[{"messages": [{"role": "user", "content": "w01"}]}]'),
        CAPTURE_JSON,
        "the texts are conversations, but the tokenizer has no chat template; give plain texts",
    ),
    error(
        "an adapter that does not say of which model",
        lambda p: [(p / "model" / "config.json").unlink(), content("model/adapter_config.json", "{}")(p)],
        CAPTURE,
        "{place}/model is an adapter, but its adapter_config.json does not name its base model",
    ),
    error(
        "a JSON line nested without end",
        content("texts/b.jsonl", "[" * 100_000 + "\n"),
        CAPTURE,
        "{place}/texts/b.jsonl, line 1: expected a JSON object with a field 'text'",
    ),
    error(
        "a JSON line whose text is a number",
        content("texts/b.jsonl", '{"text": 5}\n'),
        CAPTURE,
        "{place}/texts/b.jsonl, line 1: expected text, got int; choose the field of the text with --field",
    ),
    error(
        "a JSON line with half a character",
        content("texts/b.jsonl", '{"text": "\\ud800"}\n'),
        CAPTURE,
        "{place}/texts/b.jsonl, line 1: expected text, got half of a surrogate pair; leave it out",
    ),
    error(
        "a parquet of texts without its column",
        lambda p: pq.write_table(pa.table({"body": ["w01"]}), p / "texts" / "b.parquet"),
        CAPTURE,
        "{place}/texts/b.parquet: expected one column 'text', got body; choose a column with --field",
    ),
    error(
        "a parquet of texts that is not parquet",
        content("texts/b.parquet", b"junk"),
        CAPTURE,
        "{place}/texts/b.parquet cannot be read (…); leave it out",
    ),
    error(
        "documents that are too short",
        lambda p: [(p / "texts" / "a.txt").write_text("w01 w02")],
        CAPTURE,
        "no document has two tokens after the first 4; use longer texts or a smaller --skip-first",
    ),
    error(
        "a model that does not exist",
        nothing,
        ("capture", "{place}/nowhere", "--texts", "{place}/texts", "-o", "{place}/new"),
        "{place}/nowhere does not exist; give a Hub id, a folder or a GGUF file",
    ),
    error(
        "a GGUF file that does not exist",
        nothing,
        ("capture", "{place}/no.gguf", "--texts", "{place}/texts", "-o", "{place}/new"),
        "{place}/no.gguf does not exist; give a Hub id, a folder or a GGUF file",
    ),
    error(
        "a GGUF file that is not GGUF",
        content("no.gguf", b"junk" * 100),
        ("capture", "{place}/no.gguf", "--texts", "{place}/texts", "-o", "{place}/new"),
        "{place}/no.gguf cannot be loaded (…)",
    ),
    error(
        "weights that are not safetensors",
        content("model/model.safetensors", b"junk" * 100),
        CAPTURE,
        "{place}/model cannot be loaded (…)",
    ),
    error(
        "missing weights",
        weights(lambda t: {k: v for k, v in t.items() if "layers.1.self_attn.q_proj" not in k}),
        CAPTURE,
        "{place}/model is missing weights that its config requires (model.layers.1.self_attn.q_proj.weight); download it again, or correct its config or --config-overrides",
    ),
    error(
        "overrides that need missing weights",
        nothing,
        (*CAPTURE, "--config-overrides", "{{num_hidden_layers: 6}}"),
        "{place}/model is missing weights that its config requires (…); download it again, or correct its config or --config-overrides",
    ),
    error("a model with its own code", code, CAPTURE, "{place}/model cannot be loaded (…)"),
    error(
        "query heads that are not a multiple of key heads",
        said("model/config.json", num_key_value_heads=3),
        CAPTURE,
        "{place}/model cannot be loaded (…)",
    ),
    error(
        "a tokenizer of another model",
        said("model/tokenizer.json", model__vocab__w01=5000),
        CAPTURE,
        "the tokenizer gives token 5000, but the model's vocabulary has 96 tokens; give the model's own with --tokenizer",
    ),
    error(
        "a model's config that is not JSON",
        content("model/config.json", "{"),
        CAPTURE,
        "{place}/model cannot be loaded (…)",
    ),
    error(
        "a model of a hundred million layers",
        nothing,
        (*CAPTURE, "--config-overrides", "{{num_hidden_layers: 100000000}}"),
        "expected at most 10000 for num_hidden_layers in the model's config, got 100000000",
    ),
    error(
        "overrides of entries that do not exist",
        nothing,
        (*CAPTURE, "--config-overrides", "{{nope: 1}}"),
        "the model's config has no entry 'nope'",
    ),
    error(
        "overrides with text where a number belongs",
        nothing,
        (*CAPTURE, "--config-overrides", "{{rope_theta: abc}}"),
        "--config-overrides: expected rope_theta to be a number such as 10000, got 'abc'",
    ),
    error(
        "a window of a cut that was not tabulated",
        nothing,
        ("reach", "{place}/run", "--cut", "48", "-o", "{place}/out"),
        "reach is known for windows of 32; got 48",
    ),
    error(
        "more first tokens than a window",
        nothing,
        ("reach", "{place}/run", "--cut", "32", "--sinks", "33", "-o", "{place}/out"),
        "a cut to 32 tokens cannot keep the first 33; give --sinks of 32 or less",
    ),
    error(
        "options of a measurement without it",
        nothing,
        ("reach", "{place}/run", "--cut", "32", "--window", "256", "-o", "{place}/out"),
        "--window belongs to --measure; give the model with --measure and --cut",
    ),
    error(
        "a plan of no measurement",
        nothing,
        ("reach", "{place}/run", "--plan", "-o", "{place}/out"),
        "--plan says how long --measure would take; give the model and --texts",
    ),
    error(
        "a card at a window that the run was not captured at",
        nothing,
        ("card", "{place}/run", "l00h01", "--window", "7", "-o", "{place}/card.png"),
        "the windows that the run was captured at: 87; expected one of them, got 7",
    ),
    error(
        "a column of text to rank heads by",
        nothing,
        ("top", "{place}/tables-run", "--by", "head_class"),
        "head_class is text, not a number; give a number such as part_position, part_key, part_query, part_content",
    ),
    error(
        "runs of different windows",
        nothing,
        ("compare", "{place}/tables-run", "{place}/tables-data", "-o", "{place}/out"),
        "run was measured at a window of 87 tokens and data at 512; numbers of heads depend on the window, so capture data with --compare-at 87 too",
    ),
    error(
        "overrides that are not YAML",
        nothing,
        (*CAPTURE, "--config-overrides", "{{a"),
        "--config-overrides is not valid YAML (…)",
    ),
    error(
        "weights that are not numbers",
        weights(lambda found: found | {"model.norm.weight": found["model.norm.weight"] * np.nan}),
        CAPTURE,
        "the model's weights contain non-finite values, first in model.norm.weight; choose another checkpoint",
    ),
    error(
        "a GPU that does not exist",
        nothing,
        (*CAPTURE, "--device", "cuda"),
        "--device cuda needs a GPU, but torch finds none; leave out --device to use the CPU",
    ),
    error(
        "an unknown device",
        nothing,
        (*CAPTURE, "--device", "meta"),
        "unknown device 'meta'; use cpu, cuda, cuda:1 …, balanced or auto",
    ),
    error(
        "overrides of entries that are not names",
        nothing,
        (*CAPTURE, "--config-overrides", "{{1: 2}}"),
        "the model's config has no entry 1",
    ),
    error(
        "an unknown dtype",
        nothing,
        (*CAPTURE, "--dtype", "int3"),
        "unknown dtype 'int3'; use float32, bfloat16, float16 or auto",
    ),
    error(
        "a rate of vectors above 1",
        nothing,
        (*CAPTURE, "--save-vectors", "2"),
        "expected a rate above 0 and up to 1, got 2.0",
    ),
    error(
        "layers the model does not have",
        nothing,
        (*CAPTURE, "--layers", "77"),
        "the model has no layers [77]; it has [0, 1, 2, 3]",
    ),
    error(
        "heads the model does not have",
        nothing,
        (*CAPTURE, "--heads", "77"),
        "expected query heads 0 to 3 in layer 0, got 77",
    ),
    error(
        "a share that does not exist",
        nothing,
        (*CAPTURE, "--shard", "3/2"),
        "expected a share such as 2/8, the second of eight jobs; got '3/2'",
    ),
    error(
        "more jobs than shards",
        nothing,
        (*CAPTURE, "--shard", "2/99"),
        "only 1 shard for 99 jobs; use one job, or a smaller --documents-per-shard",
    ),
    error(
        "a folder with other files",
        content("new/thesis.tex", "x"),
        CAPTURE,
        "{place}/new contains other files (thesis.tex); choose another folder",
    ),
    error(
        "a folder with the name of a run's folder",
        content("new/kept/thesis.tex", "x"),
        CAPTURE,
        "{place}/new contains other files (kept); choose another folder",
    ),
    error(
        "a link instead of a run's moments",
        link("new/moments"),
        CAPTURE,
        "{place}/new/moments is a symbolic link, which a capture never creates; choose another folder",
    ),
    error(
        "a link instead of a run's sample",
        link("new/sample"),
        CAPTURE,
        "{place}/new/sample is a symbolic link, which a capture never creates; choose another folder",
    ),
    error(
        "a pipe instead of an unfinished run's progress",
        fifo("new/progress.json"),
        CAPTURE,
        "{place}/new contains other files (progress.json); choose another folder",
    ),
    error(
        "a file instead of the run's folder",
        content("new", "x"),
        CAPTURE,
        "cannot write to {place}/new ({place}/new is not a writable directory); choose another",
    ),
    error(
        "the folder of a run with different settings",
        lambda p: shutil.copytree(p / "run", p / "new"),
        CAPTURE,
        "{place}/new contains a capture with different settings (…); choose another folder, or --no-resume to start over",
    ),
    error(
        "an unfinished run whose progress is not JSON",
        content("new/progress.json", "{"),
        CAPTURE,
        "{place}/new/progress.json cannot be read (…); choose another folder",
    ),
    error(
        "a link instead of an unfinished run's parts",
        lambda p: [(p / "new").mkdir(), (p / "new" / "parts").symlink_to(p / "data")],
        CAPTURE,
        "{place}/new/parts is a symbolic link, which a capture never creates; choose another folder",
    ),
    error(
        "a share merged into itself",
        lambda p: shutil.copytree(p / "share", p / "new"),
        ("merge", "{place}/new", "-o", "{place}/new/parts/x"),
        "{place}/new/parts/x is inside {place}/new, which is one of the shares; choose another folder",
    ),
    error(
        "a share merged into a folder with other files",
        content("new/thesis.tex", "x"),
        ("merge", "{place}/share", "-o", "{place}/new"),
        "{place}/new contains other files (thesis.tex); choose another folder",
    ),
    error(
        "a part beyond the shards of the capture",
        lambda p: (p / "share" / "parts" / "000000-000001").rename(p / "share" / "parts" / "000000-268435456"),
        ("merge", "{place}/share", "-o", "{place}/new"),
        "{place}/share/parts/000000-268435456 is not a part of this capture, which has 1 shards; remove it",
    ),
    error(
        "a share with options that are not valid",
        said("share/progress.json", manifest__options__documents_per_shard=0),
        ("merge", "{place}/share", "-o", "{place}/new"),
        "{place}/share/progress.json is not a valid manifest (options.documents_per_shard: input should be greater than or equal to 1, got 0); choose another folder",
    ),
    error(
        "a part without its sums",
        said("share/parts/000000-000001/part.json", layers={}),
        ("merge", "{place}/share", "-o", "{place}/new"),
        "{place}/share/parts/000000-000001 is damaged (it contains no sums); rerun its job",
    ),
    error(
        "a finished run merged as a share",
        nothing,
        ("merge", "{place}/run", "{place}/data", "-o", "{place}/new"),
        "{place}/run is a finished run; merge needs folders written by capture --shard",
    ),
]
EXPORTS = [
    error(
        "an unknown format",
        nothing,
        ("export", "{place}/run", "--to", "sparse", "-o", "{place}/out"),
        "unknown format 'sparse'; choose from triattention, triattention-flat, duo-attention, kvpress-stats, mha2mla",
    ),
    error(
        "a dataset instead of a run",
        nothing,
        ("export", "{place}/data", "--to", "triattention", "-o", "{place}/out"),
        "{place}/data is not a captured run: it has no run.json; give the folder of a run",
    ),
    error(
        "a run of some layers, for a format of whole models",
        nothing,
        ("export", "{place}/run", "--to", "mha2mla", "-o", "{place}/out"),
        "{place}/run lacks layer 2, and this format needs the whole model; capture all heads",
    ),
    error(
        "a run without the covariance before the rotation",
        said("run/run.json", model__layers=2),
        ("export", "{place}/run", "--to", "kvpress-stats", "-o", "{place}/out"),
        "{place}/run has no covariance of queries before the rotation; capture it with --keep undone-cov",
    ),
    error(
        "a run that has lost that covariance",
        said("run/run.json", model__layers=2, options__keep="undone-cov"),
        ("export", "{place}/run", "--to", "kvpress-stats", "-o", "{place}/out"),
        "{place}/run/moments/layer-000.safetensors is not valid (it has no moments of queries with their rotation undone); capture the run again",
    ),
    error(
        "a run that kept something unknown",
        said("run/run.json", options__keep="everything"),
        ("export", "{place}/run", "--to", "triattention", "-o", "{place}/out"),
        "{place}/run/run.json is not a valid manifest (options.keep: input should be 'undone-cov', got 'everything'); capture the run again",
    ),
    error(
        "an encoding that scales vectors by nothing",
        said("run/run.json", layers__0__rope__attention_factor=0),
        ("export", "{place}/run", "--to", "triattention", "-o", "{place}/out"),
        "{place}/run/run.json is not a valid manifest (layers.0.rope.attention_factor: input should be greater than 0, got 0); capture the run again",
    ),
    error(
        "a run captured before the rotation",
        said("run/run.json", stage="pre-rope"),
        ("export", "{place}/run", "--to", "triattention", "-o", "{place}/out"),
        "{place}/run was captured before the rotation; capture it without --pre-rope",
    ),
    error(
        "an export without a format",
        nothing,
        ("export", "{place}/run", "-o", "{place}/out"),
        "give --to and --output (-o), or --check with a calibration file",
    ),
    error(
        "a comparison that writes a format",
        nothing,
        ("export", "{place}/run", "--check", "{place}/data", "--to", "triattention"),
        "--check compares a file and writes none; leave out --to, --by and --recent",
    ),
    error(
        "a calibration that is none",
        nothing,
        ("export", "{place}/run", "--check", "{place}/run/run.json"),
        "{place}/run/run.json is not a file of tensors (…); export it again",
    ),
    error(
        "a score that is not from means",
        nothing,
        ("export", "{place}/run", "--to", "duo-attention", "--by", "measured", "-o", "{place}/out"),
        "unknown score 'measured'; choose from far, area",
    ),
    error(
        "a score for a format without one",
        nothing,
        ("export", "{place}/run", "--to", "triattention", "--by", "far", "-o", "{place}/out"),
        "a score and a window apply only to duo-attention; remove them for triattention",
    ),
    error(
        "a folder where a file is to be written",
        nothing,
        ("export", "{place}/run", "--to", "triattention", "-o", "{place}/data"),
        "{place}/data is a folder, and triattention is a file; choose another --output",
    ),
]
PUSH = ("push", "{place}/run", "owner/name")


HUB = [
    error(
        "texts pushed as a run",
        nothing,
        ("push", "{place}/texts", "owner/name"),
        "{place}/texts is neither a captured run nor a results folder; give one of them",
    ),
    error(
        "a push to a name without an owner",
        nothing,
        ("push", "{place}/run", "name"),
        "'name' cannot be the name of a repository (expected owner/name)",
    ),
    error(
        "a push to a branch that cannot be",
        nothing,
        (*PUSH, "--revision", "a b"),
        "'a b' cannot be the name of a branch; use letters, digits, dots and dashes",
    ),
    error(
        "a push of a damaged run",
        content("run/moments/layer-000.safetensors", lambda whole: whole[:-1] + b"x"),
        PUSH,
        "{place}/run is not intact: {place}/run/moments/layer-000.safetensors differs from its checksum; copy or capture the run again",
    ),
    error(
        "a push of a run without checksums",
        lambda p: (p / "run" / "checksums.json").unlink(),
        PUSH,
        "{place}/run has no checksums.json, so it cannot be verified; capture the run again",
    ),
    error(
        "a push of an unfinished capture",
        lambda p: [(p / "run" / "run.json").unlink(), content("run/progress.json", "{}")(p)],
        PUSH,
        "capture unfinished in {place}/run; rerun the same capture command to resume",
    ),
    error(
        "a pull of a local folder",
        nothing,
        ("pull", "{place}/run", "-o", "{place}/new"),
        "{place}/run is not on the Hub; give the owner/name of a pushed run or results, and no HF_HUB_OFFLINE",
    ),
]

# ---- called from Python ---------------------------------------------------------------------------

PYTHON = {
    "with qkscope.intervene.scaled(model, run, {(1, 2): (0, 1, 1)})": "expected four factors, for position, key, query and content, got (0, 1, 1) for layer 1, head 2",
    "with qkscope.intervene.scaled(model, run, {(1, 2): 0.5})": "expected four factors, for position, key, query and content, got 0.5 for layer 1, head 2",
    "with qkscope.intervene.windowed(model, {(1, 0): -5})": "expected windows of 1 token or more, got -5 for layer 1, key head 0",
    "qkscope.effects(model, run, texts, window=-5)": "expected a window of 16 tokens or more, got -5",
    "qkscope.cut_costs(model, run, texts, window=-5)": "reach is known for windows of 16; got -5",
    "qkscope.effects(model, run, texts, window='64')": "expected a window of 16 tokens or more, got '64'",
    "qkscope.effects(model, run, texts, heads=['l01h02', 7])": "expected query heads such as l04h01 or (4, 1), got 7",
    "qkscope.cut(run, '16')": "reach is known for windows of 16; got '16'",
    "qkscope.cut(None, 16)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.top(run, 10)": "expected the name of a column, such as 'part_position', got 10",
    "qkscope.top(run, 'decay', 0)": "expected n, how many heads, to be 1 or more, got 0",
    "qkscope.top(run, 'head_class')": "head_class is text, not a number; give a number such as part_position, part_key, part_query, part_content",
    "qkscope.plot.map(run, 'head_class')": "head_class is text, not a number; give a number such as part_position, part_key, part_query, part_content",
    "qkscope.plot.map(3, 'decay')": "expected a run, as qkscope.open(FOLDER), or its folder; got 3",
    "qkscope.heads(None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.compare(run, None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.write_report('x', run)": "expected folder to be the path of a folder, got Run('LlamaForCausalLM', 16 query heads in 4 layers); the order is runs, folder",
    "qkscope.analyze('x', run)": "expected folder to be the path of a folder, got Run('LlamaForCausalLM', 16 query heads in 4 layers); the order is runs, folder",
    "qkscope.plot.card(run, 'seven')": "expected query heads such as l04h01 or (4, 1), got 'seven'",
    "qkscope.plot.distance(run, [(1, 2), (1, 2, 3)])": "expected query heads such as l04h01 or (4, 1), got (1, 2, 3)",
    "with qkscope.intervene.scaled(model, run, {'l01h02k': (0, 1, 1, 1)})": "expected query heads such as l04h01 or (4, 1), got 'l01h02k'",
    "with qkscope.intervene.windowed(model, {'one': 5})": "expected key heads such as l04h01 or (4, 1), got 'one'",
    "qkscope.effects(run, model, texts)": "effects(model, run, texts, tokenizer): expected model to be a loaded transformers model, got a Run",
    "qkscope.effects(model, texts, run)": "expected a list of texts, each a string or token ids, got a Run as texts",
    "qkscope.open(None)": "expected a folder, a Hub id or an hf:// URL, got None",
    "qkscope.open(3)": "expected a folder, a Hub id or an hf:// URL, got 3",
    "qkscope.open('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.open(place / 'file')": "{place}/file is not a folder; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.open(run)": "expected a folder, a Hub id or an hf:// URL, got Run('LlamaForCausalLM', 16 query heads in 4 layers)",
    "qkscope.open(place / 'run', window=5)": "{place}/run is a captured run, whose window was fixed at capture; remove that option",
    "run.head(9, 9)": "l09h09q: LlamaForCausalLM has no such head; see run.heads",
    "run.head('l09h09')": "l09h09q: LlamaForCausalLM has no such head; see run.heads",
    "run.head(1.5, 2)": "expected query heads such as l04h01 or (4, 1), got (1.5, 2)",
    "run.head(None)": "expected query heads such as l04h01 or (4, 1), got None",
    "run.head('')": "expected query heads such as l04h01 or (4, 1), got ''",
    "qkscope.capture_model(model, texts, window=True)": "expected window to be a whole number, got True",
    "qkscope.capture_model(model, texts, folder=3)": "expected folder to be the path of a folder, got 3",
    "qkscope.capture_model(model, texts, folder=place / 'file')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.capture_model(model, texts, passage=3)": "expected passage to be a text of two words or more, got 3",
    "qkscope.capture_model(model, texts, passage='a b c')": "a passage needs a tokenizer; give one, or leave the passage out",
    "qkscope.capture_model(model, texts, bos='yes')": "expected bos to be True, False or None, got 'yes'",
    "qkscope.capture_model(model, texts, compare_at=[32, 'x'])": "expected compare_at of whole numbers, got 32, 'x'",
    "qkscope.capture_model(model, 7)": "expected a list of texts, each a string or token ids, got an int as texts",
    "qkscope.capture_model(model, [None])": "text 0: expected token ids as one row of integers, got object of shape ()",
    "qkscope.capture_model(model, [np.zeros((2, 2), int)])": "text 0: expected token ids as one row of integers, got int64 of shape (2, 2)",
    "qkscope.analyze(run, only='pca')": "expected only to be a list of analyses, such as ['pca', 'rotation'], got 'pca'",
    "qkscope.analyze(run, only=['magic'])": "unknown analysis 'magic'; choose from pca, rotation, position, planes, distance, plasticity, scores, reach, roles",
    "qkscope.analyze(run, only=7)": "expected only to be a list of analyses, such as ['pca', 'rotation'], got 7",
    "qkscope.analyze(run, layers='9')": "LlamaForCausalLM has no layer 9; its layers are 0–3",
    "qkscope.analyze(run, layers=[9])": "LlamaForCausalLM has no layer 9; its layers are 0–3",
    "qkscope.analyze(run, layers=9)": "LlamaForCausalLM has no layer 9; its layers are 0–3",
    "qkscope.analyze(run, heads='x')": "expected numbers and ranges such as 0,4-7, got 'x'",
    "qkscope.analyze(run, sample_heads=0)": "expected sample_heads of 1 or more, got 0",
    "qkscope.analyze(run, sample_heads='2')": "expected sample_heads of 1 or more, got '2'",
    "qkscope.analyze(run, workers=0)": "expected at least one worker, got 0",
    "qkscope.analyze(run, workers='2')": "expected at least one worker, got '2'",
    "qkscope.analyze(run, buckets=5)": "LlamaForCausalLM was captured with 16 position buckets; omit buckets",
    "qkscope.analyze([])": "expected one run or several, got none",
    "qkscope.analyze([run, run])": "several sources have the label LlamaForCausalLM; give each source its own label",
    "qkscope.analyze(None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.analyze(7)": "expected a run, as qkscope.open(FOLDER), or its folder; got 7",
    "qkscope.analyze([run, None])": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.analyze(run, place / 'file')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.analyze(run, points='all')": "expected points as PointOptions(…), got 'all'",
    "qkscope.analyze('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.effects(model, run, texts, window=8)": "expected a window of 16 tokens or more, got 8",
    "qkscope.effects(model, run, texts, heads='l09h09')": "{place}/run has no head l09h09; see run.heads",
    "qkscope.effects(model, run, texts, heads=7)": "expected query heads such as l04h01 or (4, 1), got 7",
    "qkscope.effects(model, run, texts, options=3)": "expected options as EffectOptions(…), got 3",
    "qkscope.effects(model, run, [])": "expected a list of texts, each a string or token ids, got none: texts is empty",
    "qkscope.effects(model, run, texts, options=qkscope.cause.effects.EffectOptions(passes=-1))": "expected passes of 0 or more, got -1",
    "qkscope.effects(model, 'nowhere', texts)": "nowhere is not a captured run: it has no run.json; give the folder of a run",
    "qkscope.effects(model, None, texts)": "expected a captured run: its folder, or qkscope.open(FOLDER)",
    "qkscope.effects('gpt2', run, texts)": "effects(model, run, texts, tokenizer): expected model to be a loaded transformers model, got a string; load it first, as with AutoModelForCausalLM.from_pretrained",
    "qkscope.reach(None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.reach(7)": "expected a run, as qkscope.open(FOLDER), or its folder; got 7",
    "qkscope.reach('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.cut(run, 0)": "reach is known for windows of 16; got 0",
    "qkscope.cut(run, None)": "reach is known for windows of 16; got None",
    "qkscope.cut(run, 16, keep=2)": "expected keep, a share of key heads, from 0 to 1, got 2",
    "qkscope.cut(run, 16, keep='half')": "expected keep, a share of key heads, from 0 to 1, got 'half'",
    "qkscope.cut(run, 16, by='magic')": "unknown order 'magic'; choose from far, area, lock, measured",
    "qkscope.cut(run, 16, sinks=-1)": "expected sinks, first tokens that stay, of 0 or more, got -1",
    "qkscope.cut(run, 16, sinks=100)": "a cut to 16 tokens cannot keep the first 100; give sinks of 16 or less",
    "qkscope.cut(run, 16, folder=7)": "expected folder to be the path of a folder, got 7",
    "qkscope.cut(run, 16, folder=place / 'file')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.cut('nowhere', 16)": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.cut_costs(model, run, texts, window=16, draws=-1)": "expected documents of 64 tokens or more, got one of 60; give longer texts",
    "qkscope.cut_costs(model, run, texts, window=16, keep=[2])": "expected keep, a share of key heads, from 0 to 1, got 2",
    "qkscope.cut_cache(model, 'nowhere.json')": "nowhere.json is not a cut of key heads ([Errno 2] No such file or directory: 'nowhere.json'); write one with qkscope reach",
    "qkscope.cut_cache(model, place / 'file')": "{place}/file is not a cut of key heads (Expecting value: line 1 column 1 (char 0)); write one with qkscope reach",
    "qkscope.cut_cache(model, {(9, 9): 5})": "the model has no layer 9 with attention; it has [0, 1, 2, 3]",
    "qkscope.cut_cache(model, {(0, 0): 'x'})": "expected windows of 1 token or more, got 'x' for layer 0, key head 0",
    "qkscope.cut_cache(model, {(0, 0): 0})": "expected windows of 1 token or more, got 0 for layer 0, key head 0",
    "qkscope.cut_cache(model, None)": "expected a dict of heads, such as {(4, 1): …}, got None",
    "qkscope.cut_cache('gpt2', {(0, 0): 5})": "expected a transformers model, got str",
    "qkscope.cut_cache(model, {(0, 0): 5}, sinks=-1)": "the cut keeps the first -1 tokens and a window of 5 (layer 0, key head 0); expected 0 to 5 first tokens, no more than the window",
    "qkscope.compare(run, 'nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.compare('nowhere', run)": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.top(run, n='10')": "expected n, how many heads, to be 1 or more, got '10'",
    "qkscope.top(run, n=1.5)": "expected n, how many heads, to be 1 or more, got 1.5",
    "qkscope.top('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.top(None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.tables(None)": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.tables('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.write_report(None, place / 'r')": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.write_report([], place / 'r')": "expected one run or several, got none",
    "qkscope.write_report(['nowhere'], place / 'r')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.write_report(run, None)": "expected folder to be the path of a folder, got None",
    "qkscope.write_report(run, place / 'file')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.export_run(None, 'triattention', place / 'x')": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.export_run('nowhere', 'triattention', place / 'x')": "nowhere is not a captured run: it has no run.json; give the folder of a run",
    "qkscope.export_run(run, 'magic', place / 'x')": "unknown format 'magic'; choose from triattention, triattention-flat, duo-attention, kvpress-stats, mha2mla",
    "qkscope.export_run(run, 'triattention', None)": "expected path to be the path of a file, got None",
    "qkscope.export_run(run, 'triattention', place / 'file' / 'x')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.read_export(run, 'mha2mla', 'nowhere')": "nowhere.json, the description of nowhere, cannot be read ([Errno 2] No such file or directory: 'nowhere.json')",
    "qkscope.read_export(run, 'magic', place)": "unknown format 'magic'; choose from triattention, triattention-flat, duo-attention, kvpress-stats, mha2mla",
    "qkscope.read_export(run, 'mha2mla', None)": "expected path to be the path of a file, got None",
    "qkscope.push(None, 'a/b')": "expected source to be the path of a folder, got None",
    "qkscope.push(place / 'run', None)": "None cannot be the name of a repository (expected owner/name)",
    "qkscope.push(place / 'run', 'no slash at all/x/y')": "'no slash at all/x/y' cannot be the name of a repository (expected owner/name)",
    "qkscope.push('nowhere', 'a/b')": "nowhere is neither a captured run nor a results folder; give one of them",
    "qkscope.push(run, 'a/b c')": "expected source to be the path of a folder, got Run('LlamaForCausalLM', 16 query heads in 4 layers)",
    "qkscope.pull(None, place / 'p')": "expected the owner/name of a pushed run or results, got None",
    "qkscope.pull('no slash at all/x/y', place / 'p')": "no slash at all/x/y is not on the Hub; give the owner/name of a pushed run or results, and no HF_HUB_OFFLINE",
    "qkscope.pull('a/b', None)": "expected folder to be the path of a folder, got None",
    "qkscope.pull('a/b', place / 'file')": "cannot write to {place}/file ({place}/file is not a writable directory); choose another",
    "qkscope.plot.map(run, None)": "expected the name of a column, such as 'part_position', got None",
    "qkscope.plot.card(run, 'l09h09')": "LlamaForCausalLM has no head l09h09; its query heads are l00h00 to l03h03",
    "qkscope.plot.card(run, None)": "expected query heads such as l04h01 or (4, 1), got None",
    "qkscope.plot.distance(run, 'l09h09')": "LlamaForCausalLM has no distance curve of layer 9, head 9",
    "qkscope.plot.distance(None, 'l01h01')": "expected a run, as qkscope.open(FOLDER), or its folder; got None",
    "qkscope.plot.complement(run, 'l09h09')": "LlamaForCausalLM has no head l09h09; its query heads are l00h00 to l03h03",
    "qkscope.plot.ab_plane(run, [(0, 99)])": "LlamaForCausalLM has no head l00h99; its query heads are l00h00 to l03h03",
    "qkscope.plot.pc_plane(run, 3)": "expected query heads such as l04h01 or (4, 1), got 3",
    "with qkscope.intervene.scaled(model, run, {(9, 9): (0, 1, 1, 1)})": "{place}/run has no head l09h09; see run.heads",
    "with qkscope.intervene.scaled(model, None, {(1, 2): (0, 1, 1, 1)})": "expected a captured run: its folder, or qkscope.open(FOLDER)",
    "with qkscope.intervene.scaled(None, run, {(1, 2): (0, 1, 1, 1)})": "expected a transformers model, got NoneType",
    "with qkscope.intervene.scaled(model, run, None)": "expected a dict of heads, such as {(4, 1): …}, got None",
    "with qkscope.intervene.scaled(model, run, {(1, 2): (0, 1, 1, 'x')})": "expected four factors, for position, key, query and content, got (0, 1, 1, 'x') for layer 1, head 2",
    "with qkscope.intervene.scaled(model, run, {(1, 2): (0, 1, 1, float('nan'))})": "expected four factors, for position, key, query and content, got (0, 1, 1, nan) for layer 1, head 2",
    "with qkscope.intervene.windowed(model, {(1, 9): 5})": "expected key heads 0 to 1 in layer 1, got 9",
    "with qkscope.intervene.windowed(model, {(1, 0): 5.5})": "expected windows of 1 token or more, got 5.5 for layer 1, key head 0",
    "with qkscope.intervene.windowed(model, {(1, 0): 5}, sinks=9)": "the cut keeps the first 9 tokens and a window of 5 (layer 1, key head 0); expected 0 to 5 first tokens, no more than the window",
    "with qkscope.intervene.windowed(model, 'nowhere.json')": "nowhere.json is not a cut of key heads ([Errno 2] No such file or directory: 'nowhere.json'); write one with qkscope reach",
    "with qkscope.intervene.windowed(model, None)": "expected a dict of heads, such as {(4, 1): …}, got None",
    "with qkscope.intervene.windowed(None, {(1, 0): 5})": "expected a transformers model, got NoneType",
    "with qkscope.intervene.without_planes(model, {(1, 2): [99]})": "expected planes 0 to 5 of head l01h02, got 99",
    "with qkscope.intervene.without_planes(model, {(1, 2): ['x']})": "expected planes 0 to 5 of head l01h02, got 'x'",
    "with qkscope.intervene.without_drift(model, run, [(9, 9)])": "{place}/run has no head l09h09; see run.heads",
    "with qkscope.intervene.without_drift(model, run, 7)": "expected query heads such as l04h01 or (4, 1), got 7",
    "with qkscope.intervene.without_drift(model, 'nowhere', [(1, 2)])": "nowhere is not a captured run: it has no run.json; give the folder of a run",
    "QkScopeCallback(texts, folder=7)": "expected folder to be the path of a folder, got 7",
    "QkScopeCallback(None)": "expected a list of texts, each a string or token ids, got None as texts",
    "QkScopeCallback([])": "expected a list of texts, each a string or token ids, got none: texts is empty",
    "QkScopeCallback(texts, every=0)": "expected every ≥ 1 and 0 < max_share ≤ 1, got 0 and 0.01",
    "QkScopeCallback(texts, every='x')": "expected every ≥ 1 and 0 < max_share ≤ 1, got 'x' and 0.01",
    "QkScopeCallback(texts, windw=3)": "QkScopeCallback has no option 'windw'; TrainingStudy lists them",
    "qkscope.heads('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
    "qkscope.heads(run, 3)": "expected options as PcaOptions(…), got 3",
    "qkscope.scores('nowhere')": "nowhere does not exist; give a dataset folder, a Hub id or an hf:// URL",
}
"""What a call of a function says: of a captured ``run`` in {place}/run, its ``model`` and four ``texts`` as token ids."""

SECTIONS = {
    "Heads of a dataset": HEADS,
    "Datasets": DATASETS,
    "Captured runs": RUNS,
    "Options and output folders": OPTIONS,
    "Configurations, studies and tables": CONFIGS,
    "Captures": CAPTURES,
    "Exports": EXPORTS,
    "The Hub, before anything is sent": HUB,
}


def shown(case: Case) -> str:
    """The message of a case, for the docs: its first line, without the folder."""
    return case.says[0].replace("{place}/", "").replace("|", "\\|")


def page() -> str:
    """docs/errors.md."""
    count = sum(map(len, SECTIONS.values()))
    parts = [INTRODUCTION.format(count=count)]
    for title, cases in SECTIONS.items():
        rows = [f"| {case.what} | {case.code} | `{shown(case)}` |" for case in cases]
        parts.append(f"## {title}\n\n| input | exit code | message |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    rows = [f"| `{call}` | `{says.replace('{place}/', '')}` |" for call, says in PYTHON.items()]
    parts.append(FROM_PYTHON + "\n| call | message |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


INTRODUCTION = """# Errors on bad input

<!-- written by python -m tests.badinputs -->

Each of the {count} inputs below has a test (`tests/test_badinputs.py`) that checks the message and the exit code. A `…`
stands for the words of a library. Exit codes: **0** success; **1** some heads failed and are named, all others were
analysed and written; **2** nothing was done, and existing files are unchanged; **3** something that qkscope did not
foresee: one line, with the file that holds the traceback; **130** and **143** stopped by the user or the system. Control
characters in names are spelled out wherever they are printed.

A head that fails does not affect the rows of other heads. If a message appears once per head, the first one is shown.

The content of a file is never executed: YAML is read with `safe_load`, arrays with safetensors and parquet, never with
pickle; weights in `pytorch_model.bin` and exported `.pt` files are read by torch as tensors and nothing else (`weights_only`); `trust_remote_code` is off unless `--trust-remote-code` is given, which prints a warning. Names of heads and
models cannot write outside the output folder. Sizes are checked before memory is allocated. The report escapes all text
that it shows, and neither the report nor the explorer needs a server.
"""

FROM_PYTHON = """## Calls from Python

Each of these raises a `QkscopeError` (`tests/test_python_inputs.py`). `run` is a captured run of `model`, `texts` are token
ids, and `place` is a folder with a `file`. A keyword that a function does not have is Python's own `TypeError`.
"""

if __name__ == "__main__":
    Path("docs/errors.md").write_text(page())
