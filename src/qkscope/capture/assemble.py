"""From the parts of a capture to a finished run; needs no model, so that jobs can be merged anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from qkscope.capture.options import VectorSampling
from qkscope.capture.tokensampling import sample_tokens, vector_tokens
from qkscope.capture.vectors import write_datasets
from qkscope.errors import CaptureError, DatasetError
from qkscope.files.atomic import atomic_path
from qkscope.files.checksums import CHECKSUMS, write_checksums
from qkscope.files.inprogress import (
    KEPT_FOLDER,
    CaptureInProgress,
    check_capture_folder,
    read_manifest,
    refuse_difference,
)
from qkscope.files.layerfiles import layer_file, write_layer
from qkscope.files.locks import being_read, held
from qkscope.files.parts import THREADS, Parts
from qkscope.files.runfolder import LEFT_OUT, MANIFEST, MOMENTS, PROGRESS, RunFolder

OnLayer = Callable[[int, int], None]
"""Called with how much is done, and how much there is in all."""


def n_left_out(folder: Path) -> int:
    """How many documents a run, or a share of one, does without."""
    if (folder / MANIFEST).exists():
        return len(RunFolder.open(folder).manifest.get(LEFT_OUT, []))
    return len(_share(folder).note.left_out)


def assemble(state: CaptureInProgress, on_done: OnLayer | None = None) -> None:
    """Write a run of which every shard is done: moments, sample and vectors first, its manifest last.

    Every step can be done again, so a kill anywhere costs no more than doing it again.
    """
    manifest, folder = state.manifest, state.folder
    if not state.finished:
        note = state.parts.note
        missing = [one.model_dump() | {"name": _name(manifest, one.document)} for one in note.left_out]
        if len(missing) == len(manifest["documents"]):
            raise CaptureError(f"none of the {len(missing)} documents could be measured; {folder} holds no run")
        _write_moments(state)
        sampled, chosen, sampling = _tokens(manifest)
        write_datasets(folder, manifest, sorted(note.kept), sampled, chosen, sampling, on_done)
        (folder / CHECKSUMS).unlink(missing_ok=True)
        state.finish(missing, note.one_by_one)
    if not (folder / CHECKSUMS).exists():
        write_checksums(folder)
    state.tidy()


def merge(folders: Sequence[Path], output: Path, *, partial: bool = False, on_done: OnLayer | None = None) -> list[int]:
    """Put the shares of several jobs together into one run, or, if partial, into a larger share.

    Returns the shards that are still missing: none unless partial.
    """
    check_capture_folder(output)
    for folder in folders:
        if output.absolute().is_relative_to(folder.absolute()) and output.absolute() != folder.absolute():
            raise CaptureError(f"{output} lies in {folder}, which is one of the shares; choose another folder")
    with ExitStack() as holding:
        for folder in folders:
            holding.enter_context(being_read(folder))
        return _merge([_share(folder) for folder in folders], output, partial, on_done)


def _merge(sources: list[Parts], output: Path, partial: bool, on_done: OnLayer | None) -> list[int]:
    manifest = sources[0].manifest
    for other in sources[1:]:
        refuse_difference(other.folder, other.manifest, manifest, "leave it out, or run its job again")
    _refuse_twice(sources)
    missing = sorted(set(range(sources[0].in_all)) - {shard for one in sources for shard in one.done})
    if missing and not partial:
        raise CaptureError(_lacking(manifest, missing))
    with held(output):
        state = CaptureInProgress(output, manifest)
        state.resume()
        if not state.finished:
            foreign = state.parts.done - {shard for one in sources for shard in one.done}
            if foreign:
                raise CaptureError(f"{output} holds shards that are in none of these folders; choose another folder")
            for source in sources:
                _take_over(source, state)
        if not missing:
            assemble(state, on_done)
    return missing


def _share(folder: Path) -> Parts:
    """What a job left in its folder; damage is an error here, since nothing can be measured again."""
    if not (folder / PROGRESS).is_file():
        what = "is a finished run" if (folder / MANIFEST).exists() else "holds no share of a capture"
        raise DatasetError(f"{folder} {what}; merge takes folders that capture --shard wrote")
    parts = Parts(folder, read_manifest(folder / PROGRESS))
    damaged = parts.open(folder / KEPT_FOLDER, remove=False)
    if damaged:
        raise DatasetError(f"{damaged[0]}; run its job again")
    return parts


def _take_over(source: Parts, state: CaptureInProgress) -> None:
    """Copy the parts of a share, and its kept vectors first; what is there already is left out."""
    state.kept.mkdir(exist_ok=True)
    for name in source.note.kept:
        if not (state.kept / name).exists():
            with atomic_path(state.kept / name) as temporary:
                shutil.copyfile(source.folder / KEPT_FOLDER / name, temporary)
    for span in sorted(source.notes):
        if span.first not in state.parts.done:
            state.parts.add(span, source.layers(span), source.notes[span])


def _write_moments(state: CaptureInProgress) -> None:
    place = state.folder / MOMENTS
    place.mkdir(exist_ok=True)

    def write(number: int) -> None:
        total = state.parts.total(number)
        assert total is not None
        write_layer(place / layer_file(number), total)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(write, [layer["layer"] for layer in state.manifest["layers"]]))


def _tokens(manifest: dict[str, Any]) -> tuple[list[Any], list[Any] | None, VectorSampling | None]:
    """Positions of each document that the sample and the dataset hold."""
    options, lengths = manifest["options"], [int(one["tokens"]) for one in manifest["documents"]]
    sampled = sample_tokens(lengths, options["sample"], options["seed"], options["skip_first"])
    if options["vectors"] is None:
        return sampled, None, None
    sampling = VectorSampling(**options["vectors"])
    chosen = [vector_tokens(example, n, sampling, options["skip_first"]) for example, n in enumerate(lengths)]
    return sampled, chosen, sampling


def _refuse_twice(sources: Sequence[Parts]) -> None:
    taken: dict[int, Path] = {}
    for source in sources:
        twice = sorted(source.done & taken.keys())
        if twice:
            raise CaptureError(
                f"{source.folder} and {taken[twice[0]]} both hold shard {twice[0]}; leave one of them out"
            )
        taken |= dict.fromkeys(source.done, source.folder)


def _lacking(manifest: dict[str, Any], missing: list[int]) -> str:
    size, documents = int(manifest["options"]["documents_per_shard"]), len(manifest["documents"])
    first, last = missing[0] * size, min((missing[0] + 1) * size, documents) - 1
    more = f" and {len(missing) - 1} shards more" if len(missing) > 1 else ""
    return (
        f"documents {first} to {last}{more} are in none of these folders; finish the jobs that do them, or give "
        "--partial for a share that can be merged again"
    )


def _name(manifest: dict[str, Any], document: int) -> str:
    return str(manifest["documents"][document]["name"])
