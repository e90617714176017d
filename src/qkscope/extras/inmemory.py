"""From Python: capture a model that is already loaded, and write the report of runs."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qkscope.errors import ConfigError
from qkscope.runs.run import Run, open_run

if TYPE_CHECKING:
    from qkscope.capture.imageinputs import ImageInputs
    from qkscope.capture.options import CaptureOptions, Progress


def capture_model(
    model: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    options: CaptureOptions | None = None,
    progress: bool = True,
) -> Run:
    """Measure a loaded transformers model, also compiled, quantised or with adapters, on these texts.

    Texts are strings, with a tokenizer, or token ids; each is one document, cut to the window. A document with images
    is what the model's processor returns for it. The model must be in evaluation mode and is left as it was. With a
    ``folder`` the run is kept there, and a capture that was stopped resumes; without, it lasts as long as the object
    that is returned. ``options`` are those of ``qkscope capture``.
    """
    from qkscope.capture.installed import need_torch

    need_torch()
    from qkscope.capture.attention import plain_model

    plain = plain_model(model)
    chosen = options_at(options, window)
    return captured(plain, plain, texts, tokenizer, folder=folder, name=name, options=chosen, progress=progress)


def captured(
    source: Any,
    plain: Any,
    texts: Sequence[Any],
    tokenizer: Any,
    *,
    folder: str | Path | None,
    name: str | None,
    options: CaptureOptions,
    progress: bool,
) -> Run:
    """The run of a ``plain`` model as ``capture_model`` describes it; the source is the model itself or its engine."""
    from qkscope.capture.options import ExecutionOptions
    from qkscope.capture.passage import bundled_passage
    from qkscope.capture.run import capture
    from qkscope.capture.texts import Document
    from qkscope.capture.tokenids import token_texts

    documents = [Document(f"text {i}", _said(text)) for i, text in enumerate(_several(texts))]
    ids = [_read(text, tokenizer, plain, document.name) for text, document in zip(texts, documents, strict=True)]
    label = name or Path(str(plain.config.name_or_path or type(plain).__name__)).name
    place = Path(tempfile.mkdtemp(prefix="qkscope-")) if folder is None else Path(folder)
    passage = None if tokenizer is None else bundled_passage(tokenizer)
    words = None if tokenizer is None else partial(token_texts, tokenizer=tokenizer)
    about = {"id": label, "revision": None, "config_overrides": None, "bos": None}
    try:
        with _Bar(progress) as on_progress:
            execution = ExecutionOptions(on_progress=on_progress)
            capture(source, documents, ids, place, options, about, execution, passage, words)
        run = open_run(place, model=label)
    except BaseException:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if folder is None:  # copies of a run share its source
        weakref.finalize(run.source, shutil.rmtree, place, ignore_errors=True)
    return run


def write_report(
    runs: Run | Sequence[Run] | Mapping[str, Run], folder: str | Path, *, title: str = "", workers: int | None = 1
) -> Path:
    """Tables, figures, report.html and explorer.html of one or several runs, as ``qkscope report``; returns the report.

    Runs are labelled by their models, or by the keys of a dict. More than one worker needs a script that guards its
    main part, as always with processes.
    """
    from qkscope.config import StudyRunConfig
    from qkscope.files.atomic import check_writable
    from qkscope.report.gather import Sources, gather
    from qkscope.report.write import EXPLORER, REPORT, TABLES_FOLDER, check_pages, write_pages

    place = Path(folder)
    check_writable(place)
    check_pages(place / REPORT, place / EXPLORER)
    given = {runs.model: runs} if isinstance(runs, Run) else runs
    named = given if isinstance(given, Mapping) else {run.model: run for run in given}
    if not named or len(named) < len(given):
        raise ConfigError("expected runs of different models, or a dict of labels and runs")
    items = tuple(StudyRunConfig(path=str(run.source), label=label) for label, run in named.items())
    study = gather(Sources(items, title), place / TABLES_FOLDER, workers=workers)
    write_pages(study, place, command="qkscope.write_report", workers=workers)
    return place / REPORT


def options_at(options: CaptureOptions | None, window: int | None) -> CaptureOptions:
    """Options with this window, if one is given."""
    from qkscope.capture.options import CaptureOptions

    chosen = options or CaptureOptions()
    return chosen if window is None else replace(chosen, window=window)


def _several(texts: Sequence[Any]) -> Sequence[Any]:
    if isinstance(texts, str) or not len(texts):
        raise ConfigError("expected a list of texts, each a string or token ids")
    return texts


def _said(text: Any) -> str:
    """What identifies a text: itself, its tokens or, with images, all its inputs."""
    if isinstance(text, Mapping):
        from qkscope.capture.imageinputs import inputs_text

        return inputs_text(text)
    return text if isinstance(text, str) else " ".join(map(str, np.asarray(text).reshape(-1).tolist()))


def _read(text: Any, tokenizer: Any, model: Any, name: str) -> np.ndarray | ImageInputs:
    """Token ids of a text, or a document with images."""
    if not isinstance(text, Mapping):
        return text_ids(text, tokenizer)
    from qkscope.capture.imageinputs import has_images, image_inputs, tensors

    return image_inputs(model, text, name) if has_images(text) else tensors(text)["input_ids"][0].cpu().numpy()


def text_ids(text: Any, tokenizer: Any) -> np.ndarray:
    """Token ids of a text, or as they are given."""
    from qkscope.capture.tokenids import token_ids

    if isinstance(text, str):
        if tokenizer is None:
            raise ConfigError("texts as strings need a tokenizer; give one, or token ids")
        return token_ids(text, tokenizer)
    ids = np.asarray(text)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(f"expected token ids as one row of integers, got {ids.dtype} of shape {ids.shape}")
    return ids.astype(np.int64)


class _Bar:
    """A bar of tokens in a notebook or a terminal, if it takes longer than two seconds."""

    def __init__(self, shown: bool) -> None:
        from tqdm.auto import tqdm

        self.bar = tqdm(desc="capturing", unit=" tokens", delay=2, disable=not shown, leave=False)

    def __enter__(self) -> Callable[[Progress], None]:
        def on_progress(now: Progress) -> None:
            self.bar.total = now.tokens_in_all
            self.bar.update(now.tokens - self.bar.n)

        return on_progress

    def __exit__(self, *_: object) -> None:
        self.bar.close()
