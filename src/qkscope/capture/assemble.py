"""Assemble the parts of a capture into a finished run; needs no model, so shares can be merged on any machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from qkscope.capture.sampling import KeptFiles, KeptVectors, LayerRows, datasets_of
from qkscope.core.bucketspread import StoredSpread
from qkscope.core.keypairs import SampledKeys
from qkscope.core.layermoments import LayerMoments
from qkscope.errors import CaptureError, DatasetError
from qkscope.files.atomic import as_url, atomic_path, is_url, sync
from qkscope.files.checksums import CHECKSUMS, digest, write_checksums
from qkscope.files.inprogress import (
    KEPT_FOLDER,
    CaptureInProgress,
    check_capture_folder,
    check_same_settings,
    read_manifest,
)
from qkscope.files.layerfiles import layer_file, write_layer
from qkscope.files.locks import being_read, held
from qkscope.files.manifest import LayerEntry, RunManifest
from qkscope.files.parts import THREADS, Parts
from qkscope.files.runfolder import MANIFEST, MOMENTS, PASSAGE_ENTRY, PASSAGE_FILE, PROGRESS, RunFolder
from qkscope.headids import read_by

OnLayer = Callable[[int, int], None]
"""A callback that takes the number of layers done and the number of all layers."""


def n_left_out(folder: Path) -> int:
    """Return the number of documents left out of a run, or of one job's share of it."""
    if (folder / MANIFEST).exists():
        return len(RunFolder.open(folder).manifest.left_out)
    return len(_share(folder).total_metadata.left_out)


def assemble(
    state: CaptureInProgress, on_done: OnLayer | None = None, last: tuple[int, KeptVectors] | None = None
) -> None:
    """Write a run whose shards are all done: moments, sample and vectors first, the manifest last.

    ``last`` is the number and the vectors of a shard that is only in memory. Every step can be repeated, so a process
    killed at any point loses only the work of that step.
    """
    manifest, folder = RunManifest.model_validate(state.manifest), state.folder
    digests: dict[Path, str] = {}
    if not state.finished:
        note = state.parts.total_metadata
        left_out = [
            entry.model_dump() | {"name": str(manifest.documents[entry.document].name)} for entry in note.left_out
        ]
        if len(left_out) == len(manifest.documents):
            raise CaptureError(f"none of the {len(left_out)} documents could be measured; {folder} contains no run")
        digests = _write_layers(state, KeptFiles(state.kept, tuple(note.kept), last), on_done)
        (folder / CHECKSUMS).unlink(missing_ok=True)
        state.finish(left_out, note.one_by_one, mean_loss(note.losses))
    if not (folder / CHECKSUMS).exists():
        write_checksums(folder, digests)
    state.tidy()


def mean_loss(losses: Mapping[int, tuple[float, int]]) -> dict[str, Any] | None:
    """The loss entry of run.json from sums and counts by document: mean per token, standard error, number of tokens."""
    measured = [(total, n) for total, n in losses.values() if n]
    if not measured:
        return None
    totals, counts = np.array(measured, dtype=float).T
    mean = totals.sum() / counts.sum()
    spread = ((totals - counts * mean) ** 2).sum() * len(measured) / max(len(measured) - 1, 1)
    se = round(float(np.sqrt(spread) / counts.sum()), 6) if len(measured) > 1 else None
    return {"mean": round(float(mean), 6), "se": se, "tokens": int(counts.sum())}


def merge(folders: Sequence[Path], output: Path, *, partial: bool = False, on_done: OnLayer | None = None) -> list[int]:
    """Merge the shares of several jobs into one run or, if ``partial``, into a larger share.

    Returns the shards that are still missing; an empty list unless ``partial``.
    """
    check_capture_folder(output)
    for folder in folders:
        if output.absolute().is_relative_to(folder.absolute()) and output.absolute() != folder.absolute():
            raise CaptureError(f"{output} is inside {folder}, which is one of the shares; choose another folder")
    with ExitStack() as locks:
        for folder in folders:
            locks.enter_context(being_read(folder))
        return _merge([_share(folder) for folder in folders], output, partial, on_done)


def _merge(shares: list[Parts], output: Path, partial: bool, on_done: OnLayer | None) -> list[int]:
    manifest = shares[0].manifest
    for share in shares[1:]:
        check_same_settings(share.folder, share.manifest, manifest, "leave it out, or rerun its job")
    _refuse_twice(shares)
    missing = sorted(set(range(shares[0].n_shards)) - {shard for share in shares for shard in share.done})
    if missing and not partial:
        raise CaptureError(_lacking(RunManifest.model_validate(manifest), missing))
    with held(output):
        state = CaptureInProgress(output, manifest)
        state.resume()
        if not state.finished:
            foreign = state.parts.done - {shard for share in shares for shard in share.done}
            if foreign:
                raise CaptureError(f"{output} contains shards that are in none of these folders; choose another folder")
            for share in shares:
                _take_over(share, state)
        if PASSAGE_ENTRY in manifest and not state.finished:
            _copy(shares[0].folder / PASSAGE_FILE, output / PASSAGE_FILE)
        if not missing:
            assemble(state, on_done)
    return missing


def _share(folder: Path) -> Parts:
    """The parts in the folder of a job; damaged parts are an error here, since nothing can be measured again."""
    if is_url(folder):
        raise DatasetError(f"{as_url(folder)} is not a folder; copy it to one")
    if not (folder / PROGRESS).is_file():
        problem = "is a finished run" if (folder / MANIFEST).exists() else "contains no share of a capture"
        raise DatasetError(f"{folder} {problem}; merge needs folders written by capture --shard")
    parts = Parts(folder, read_manifest(folder / PROGRESS))
    damaged = parts.open(folder / KEPT_FOLDER, remove=False)
    if damaged:
        raise DatasetError(f"{damaged[0]}; rerun its job")
    return parts


def _take_over(share: Parts, state: CaptureInProgress) -> None:
    """Copy the kept vectors and then the parts of a share; those already copied are skipped."""
    state.kept.mkdir(exist_ok=True)
    for name in share.total_metadata.kept:
        _copy(share.folder / KEPT_FOLDER / name, state.kept / name)
    for span in sorted(share.metadata):
        if span.first not in state.parts.done:
            state.parts.add(span, share.layers(span), share.metadata[span])


def _copy(source: Path, target: Path) -> None:
    """Copy a file of a share, unless the target exists."""
    if target.exists():
        return
    if not source.is_file():
        raise DatasetError(f"{source} is missing; rerun its job")
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _write_layers(state: CaptureInProgress, kept: KeptFiles, on_done: OnLayer | None) -> dict[Path, str]:
    """Write moments and vectors, several layers at a time, sync them to disk, and return their digests."""
    folder, manifest = state.folder, RunManifest.model_validate(state.manifest)
    datasets = datasets_of(folder, manifest)
    (folder / MOMENTS).mkdir(exist_ok=True)
    for path in (folder / MOMENTS).glob(".*"):  # left by a process that was killed while writing
        path.unlink()
    digests: dict[Path, str] = {}

    def write(layer: LayerEntry) -> dict[Path, str]:
        rows, path = kept.rows(layer.layer), folder / MOMENTS / layer_file(layer.layer)
        sample, *other_parts = [(dataset, dataset.of(rows)) for dataset in datasets]
        total = state.parts.total(layer.layer)
        assert total is not None
        try:
            write_layer(path, _with_spread(total, sample[1], layer, manifest))
        except OverflowError as error:
            reason = f"the sums of layer {layer.layer} exceed single precision ({error})"
            raise CaptureError(f"{reason}; its vectors are far larger than any model's: check the weights") from None
        del total
        files = [path, *(file for dataset, part in (sample, *other_parts) for file in dataset.write_layer(layer, part))]
        for file in files:
            sync(file)
        return {file: digest(file) for file in files}

    n_threads = THREADS if manifest.options.vectors is None else 1  # a dataset of vectors may be large
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(n_threads) as threads:
        for number, of_layer in enumerate(threads.map(write, manifest.layers), start=1):
            digests |= of_layer
            if on_done is not None:
                on_done(number, len(manifest.layers))
    for dataset in datasets:
        dataset.write_card()
    for written_folder in dict.fromkeys(file.parent for file in digests):
        sync(written_folder)
    return digests


def _with_spread(total: LayerMoments, rows: LayerRows, layer: LayerEntry, manifest: RunManifest) -> LayerMoments:
    """The moments as a finished run stores them: queries by bucket only as their spread along pairs of sampled keys."""
    if total.spread is not None:  # in a run of one shard, it was computed with the sums
        return total
    assert total.q_buckets is not None
    sampled = SampledKeys.of(
        rows.example, rows.position, rows.k, manifest.window, manifest.options.buckets,
        layer.sliding_window, read_by(layer.query_heads, layer.key_heads, manifest.q_per_kv),
    )  # fmt: skip
    return replace(total, q_buckets=None, spread=StoredSpread.of(total.q_buckets, total.q.total, sampled))


def _refuse_twice(shares: Sequence[Parts]) -> None:
    folders: dict[int, Path] = {}
    for share in shares:
        repeated = sorted(share.done & folders.keys())
        if repeated:
            raise CaptureError(
                f"{share.folder} and {folders[repeated[0]]} both contain shard {repeated[0]}; leave one of them out"
            )
        folders |= dict.fromkeys(share.done, share.folder)


def _lacking(manifest: RunManifest, missing: list[int]) -> str:
    size, documents = manifest.options.documents_per_shard, len(manifest.documents)
    first, last = missing[0] * size, min((missing[0] + 1) * size, documents) - 1
    more = f" and {len(missing) - 1} more shards" if len(missing) > 1 else ""
    return (
        f"documents {first} to {last}{more} are in none of these folders; finish the jobs that measure them, or use "
        "--partial to write a larger share that can be merged later"
    )
