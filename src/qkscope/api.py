"""The functions of ``import qkscope``; each imports its dependencies when it is called.

>>> import qkscope
>>> run = qkscope.capture_model(model, texts, tokenizer)                  # doctest: +SKIP
>>> qkscope.heads(run), qkscope.rotated(run)                              # doctest: +SKIP
>>> qkscope.write_report(run, "report")                                   # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.analyses.options import AnalysisOptions, PcaOptions, RotationOptions
from qkscope.errors import ConfigError
from qkscope.options import check_options, check_path, head_pairs, in_python_terms, with_keywords
from qkscope.progress import progress as show_progress
from qkscope.runs.selection import Selection

if TYPE_CHECKING:
    import pandas as pd

    from qkscope.analyses.options import PointOptions
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.options import CaptureOptions
    from qkscope.cause.choice import Cut
    from qkscope.cause.effects import EffectOptions
    from qkscope.results.compare import Comparison
    from qkscope.results.runtables import AnyRun
    from qkscope.runs.run import Run

_log = logging.getLogger("qkscope")


@in_python_terms
def open(  # noqa: A001  qkscope.open
    location: str | os.PathLike[str], revision: str | None = None, **options: Any
) -> Run:
    """Open a captured run or a dataset of vectors: a folder, a Hub id, ``hf://datasets/owner/name@revision``.

    A run that was pushed to the Hub is downloaded into huggingface_hub's cache and verified against its checksums.
    ``options`` are ``model`` and ``family``, the labels in tables, and for a dataset ``q_per_kv``, ``window``,
    ``max_samples``, ``seed``, ``skip_first`` and ``rope``, its rotary encoding, such as ``{"theta": 500000}``.
    """
    from qkscope.runs.run import open_run

    if not isinstance(location, str | os.PathLike):
        raise ConfigError(f"expected a folder, a Hub id or an hf:// URL, got {location!r:.60}")
    return open_run(location, revision, **options)


# ---- from a model to a run --------------------------------------------------------------------------------------


@in_python_terms
def capture_model(
    model: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int | None = None,
    compare_at: int | Sequence[int] = (),
    folder: str | Path | None = None,
    name: str | None = None,
    bos: bool | None = None,
    passage: str | None = None,
    options: CaptureOptions | None = None,
    progress: bool = True,
) -> Run:
    """Measure a loaded transformers model, also compiled, quantised or with adapters, on these texts.

    Texts are strings, with a tokenizer, or token ids; each is one document, cut to the window. A dataset of dicts with
    a field ``text``, or a tokenizer's output for several texts, works too. Strings begin with the model's BOS token if
    the model's own files say so; ``bos`` overrides this. A document with images is the output of the model's processor.
    The model must be in evaluation mode and is not changed. ``compare_at`` are shorter windows measured in the same
    passes; ``run.at(1024)`` is the run at one of them. With a ``folder`` the run is stored there, and a stopped
    capture resumes; without, the run is deleted with the returned object. ``passage`` is a text whose first 128 tokens
    the explorer shows score by score, in place of a bundled one. ``options`` are those of ``qkscope capture``.
    """
    from qkscope.capture.options import CaptureOptions, need_torch

    need_torch()
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.given import check_model
    from qkscope.capture.watch import plain_model

    check_model(model, "capture_model(model, texts, tokenizer)")
    if folder is not None:
        check_path(folder, "folder")
    check_options(options, "options", CaptureOptions)
    plain = plain_model(model)
    corpus = Corpus.of(texts, tokenizer, plain, bos)
    return capture_corpus(
        plain,
        plain,
        corpus,
        window=window,
        compare_at=compare_at,
        folder=folder,
        name=name,
        passage=passage,
        options=options,
        bar=progress,
    )


@in_python_terms
def capture_corpus(
    source: Any,
    plain: Any,
    corpus: Corpus,
    *,
    window: int | None,
    compare_at: int | Sequence[int] = (),
    folder: str | Path | None,
    name: str | None,
    passage: str | None = None,
    options: CaptureOptions | None,
    bar: bool,
) -> Run:
    """Capture a ``plain`` model as ``capture_model`` does; the source is the model itself or its engine."""
    from qkscope.capture.options import CaptureOptions, ExecutionOptions
    from qkscope.capture.run import capture
    from qkscope.runs.run import open_run

    settings = options or CaptureOptions()
    settings = settings if window is None else replace(settings, window=window)
    settings = settings if passage is None else replace(settings, passage=passage)
    if compare_at:
        windows: Any = (
            compare_at if isinstance(compare_at, Iterable) and not isinstance(compare_at, str) else [compare_at]
        )
        settings = replace(settings, compare_at=tuple(windows))
    label = name or Path(str(plain.config.name_or_path or type(plain).__name__)).name
    temporary = Path(tempfile.mkdtemp(prefix="qkscope-")) if folder is None else None
    run_folder = Path(folder or "") if temporary is None else temporary / label.replace("/", "-")
    try:
        with show_progress("capturing", "tokens", delay=2.0, enabled=bar) as on_progress:
            capture(
                source, corpus, run_folder, settings, corpus.about(label), ExecutionOptions(on_progress=on_progress)
            )
        run = open_run(run_folder, model=label)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:  # copies of a run share its source
        weakref.finalize(run.source, shutil.rmtree, temporary, ignore_errors=True)
    return run


# ---- from a run to tables and pages ------------------------------------------------------------------------------


def qk(run: AnyRun, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Combined QK PCA of every head: the table ``qk``."""
    return _table(run, "pca", "qk", workers, AnalysisOptions(intervals=intervals, pca=options or PcaOptions()))


@in_python_terms
def heads(run: AnyRun, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The numbers of all analyses about whole heads: the table ``heads``, read from the run's folder if it is there."""
    from qkscope.results.runtables import heads_table

    check_options(options, "options", PcaOptions)
    return heads_table(run, AnalysisOptions(intervals=intervals, pca=options or PcaOptions()), workers)


def rotated(
    run: AnyRun, options: RotationOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Planar rotation model of every head: the table ``rotated``."""
    check_options(options, "options", RotationOptions)
    chosen = AnalysisOptions(intervals=intervals, rotation=options or RotationOptions())
    return _table(run, "rotation", "rotated", workers, chosen)


def planes(run: AnyRun, *, workers: int = 1) -> pd.DataFrame:
    """Planes of the complement of a and b, and RoPE planes, of every head: the table ``planes``."""
    return _table(run, "planes", "planes", workers, AnalysisOptions(intervals=False))


def position(run: AnyRun, *, decay_range: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Statistics from position alone, for every head whose rotation is known: the table ``position``.

    ``decay`` is over distances up to ``decay_range``, by default half of what the queries see.
    """
    return _table(run, "position", "position", workers, AnalysisOptions(decay_range=decay_range, intervals=intervals))


def distance(run: AnyRun, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distance curve of every head whose rotation is known: the table ``distance``."""
    return _table(run, "distance", "distance", workers, AnalysisOptions(intervals=intervals))


def scores(run: AnyRun, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The composition of every head's scores: the table ``scores``."""
    return _table(run, "scores", "scores", workers, AnalysisOptions(intervals=intervals))


def reach(run: AnyRun, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distances over which every head attends, measured and predicted: the table ``reach``."""
    return _table(run, "reach", "reach", workers, AnalysisOptions(intervals=intervals))


def roles(run: AnyRun, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The roles of heads, by what they do with their attention: the table ``roles``."""
    return _table(run, "roles", "roles", workers, AnalysisOptions(intervals=intervals))


def plasticity(run: AnyRun, *, buckets: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Attention plasticity of every head and position bucket: the table ``plasticity``."""
    return _table(run, "plasticity", "plasticity", workers, AnalysisOptions(buckets=buckets, intervals=intervals))


def tables(run: AnyRun, *, points: PointOptions | None = None, workers: int = 1) -> dict[str, pd.DataFrame]:
    """All tables at once, from one read; ``points`` selects the heads whose vectors are added, for figures."""
    return analyze(run, points=points, workers=workers)


pca = qk
"""Earlier name of ``qk``."""
head_table = heads
"""Earlier name of ``heads``."""
rotation = rotated
"""Earlier name of ``rotated``."""


@in_python_terms
def _table(run: AnyRun, analysis: str, name: str, workers: int, options: AnalysisOptions) -> pd.DataFrame:
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze as analyze_jobs
    from qkscope.results.job import Job
    from qkscope.results.runtables import opened

    (result,) = analyze_jobs(
        [Job(opened(run), options=options)], [analysis], target=ExecutionTarget(workers), strict=True
    )
    return result.tables.frames[name]


@in_python_terms
@with_keywords(Selection, AnalysisOptions)
def analyze(
    runs: AnyRun | Sequence[AnyRun],
    folder: str | Path | None = None,
    *,
    only: Sequence[str] | None = None,
    points: PointOptions | None = None,
    strict: bool = True,
    workers: int = 1,
    **options: Any,
) -> dict[str, pd.DataFrame]:
    """The tables of one or several runs, as ``qkscope analyze`` computes and, with a ``folder``, writes them.

    ``runs`` are runs or their folders. ``only`` names analyses; ``layers``, ``heads`` and ``sample_heads`` choose query
    heads. A head that cannot be analysed raises or, unless ``strict``, is left out with a warning. Other keywords are
    options of the command.
    """
    import pandas as pd

    from qkscope.analyses.catalogue import ANALYSES_BY_NAME, analyses_named
    from qkscope.analyses.options import PointOptions
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze as analyze_jobs
    from qkscope.results.analyze import write_results
    from qkscope.results.folder import check_results_folder
    from qkscope.results.job import Job
    from qkscope.results.runtables import opened

    _check_folder(folder)
    check_options(points, "points", PointOptions)
    if only is not None and (isinstance(only, str) or not isinstance(only, Iterable)):
        raise ConfigError(f"expected only to be a list of analyses, such as ['pca', 'rotation'], got {only!r:.60}")
    run_list = [opened(run) for run in _several(runs)]
    jobs = [Job.from_options(run, "analyze", options, points) for run in run_list]
    names = [analysis.name for analysis in analyses_named(ANALYSES_BY_NAME if only is None else only)]
    if folder is not None:
        check_results_folder(Path(folder), {run.model: run.source.identity() for run in run_list}, names)
    started = time.monotonic()
    results = analyze_jobs(jobs, names, target=ExecutionTarget(workers), strict=strict)
    for failure in (failure for result in results for failure in result.failures):
        _log.warning("left out: %s", failure)
    if folder is not None:
        write_results(Path(folder), results, wall_seconds=time.monotonic() - started)
    frames = [result.tables.frames for result in results]
    return {
        name: pd.concat([of_run[name] for of_run in frames], ignore_index=True)
        for name in frames[0]
        if name not in ("axes", "replicates")
    }


@in_python_terms
def top(
    run: AnyRun,
    by: str = "part_position",
    n: int = 10,
    *,
    lowest: bool = False,
    workers: int = 1,
) -> pd.DataFrame:
    """The heads with the highest (or lowest) values of a column, with their class and the parts of their scores.

    ``run`` is a captured run, its folder or a results folder. The tables of a run are computed if they are not in its
    folder yet, and kept there.
    """
    from qkscope.results import runtables

    return runtables.top(run, by, n, lowest=lowest, workers=workers)


@in_python_terms
def compare(a: AnyRun, b: AnyRun, *, workers: int = 1) -> Comparison:
    """Compare two runs of one shape at one window, head by head, with intervals that are paired by document.

    ``a`` and ``b`` are as in ``top``; if their windows differ, they are compared at the largest that both were captured
    at (``compare_at``). The result prints as a sentence; ``table`` has every head and column, ``summary``
    the means, ``changed_most("decay")`` the heads that changed most.
    """
    from qkscope.results.runtables import compared

    return compared(a, b, workers)


def _check_folder(folder: object) -> None:
    if not isinstance(folder, str | os.PathLike | None):
        raise ConfigError(f"expected folder to be the path of a folder, got {folder!r:.60}; the order is runs, folder")


def _several(runs: Any) -> list[Any]:
    """One run or several, as a list; an error if there is none."""
    from qkscope.runs.run import Run

    several = [runs] if isinstance(runs, Run | str | os.PathLike) or not isinstance(runs, Iterable) else [*runs]
    if not several:
        raise ConfigError("expected one run or several, got none")
    return several


@in_python_terms
def write_report(
    runs: AnyRun | Sequence[AnyRun] | Mapping[str, AnyRun],
    folder: str | Path,
    *,
    title: str = "",
    workers: int | None = 1,
) -> Path:
    """Tables, figures, report.html and explorer.html of one or several runs, as ``qkscope report``; returns the report.

    ``runs`` are runs, their folders or results folders, labelled by their models, or by the keys of a dict. More than
    one worker needs a script that guards its main part, as always with processes.
    """
    from qkscope.config import StudyConfig, StudyRunConfig
    from qkscope.files.atomic import check_writable
    from qkscope.report.gather import gather
    from qkscope.report.report import EXPLORER, REPORT, check_pages, write_pages
    from qkscope.results.reader import TABLES_FOLDER
    from qkscope.results.runtables import check_run
    from qkscope.runs.run import Run

    _check_folder(folder)
    check_path(folder, "folder")
    output = Path(folder)
    check_writable(output)
    check_pages(output / REPORT, output / EXPLORER)
    items = (
        [*runs.items()] if isinstance(runs, Mapping) else [(getattr(run, "model", None), run) for run in _several(runs)]
    )
    for _, run in items:
        check_run(run)
    labels = [label for label, _ in items if label is not None]
    if not items or len(set(labels)) < len(labels):
        raise ConfigError("expected runs of different models, or a dict of labels and runs")
    paths = [(label, run.source if isinstance(run, Run) else os.fspath(run)) for label, run in items]
    entries = [StudyRunConfig(path=str(path), label=label) for label, path in paths]
    study = gather(StudyConfig(runs=entries, title=title), output / TABLES_FOLDER, workers=workers)
    write_pages(study, output, command="qkscope.write_report", workers=workers)
    return output / REPORT


# ---- effects of terms and windows on the prediction ----------------------------------------------------------------


@in_python_terms
def effects(
    model: Any,
    run: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    bos: bool | None = None,
    options: EffectOptions | None = None,
    window: int | None = None,
    heads: Sequence[tuple[int, int] | str] | str = (),
    label: str = "",
    on_progress: Callable[[float, float], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """The effect of each term of each head on the predictions of a loaded model for these texts.

    Texts are as in ``capture_model``; they must not be those of the run. ``heads`` are names, or pairs of layer
    and head. ``on_progress`` is called with the amount done and the total. Returns the tables ``effects`` and
    ``effects_together``.
    """
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.given import check_model
    from qkscope.cause.effects import EffectOptions, EffectsJob, effect_tables
    from qkscope.cause.lockedmodel import LockedModel

    check_model(model, "effects(model, run, texts, tokenizer)")
    check_options(options, "options", EffectOptions)
    corpus = Corpus.of(texts, tokenizer, model, bos)
    locked = LockedModel.of(model, run)
    documents = corpus.cut(window or locked.run.manifest.window, locked.model)
    with tempfile.TemporaryDirectory() as folder:
        job = EffectsJob(locked, documents, options or EffectOptions(), Path(folder), head_pairs(heads))
        return effect_tables(job, label or locked.run.folder.name, on_progress=on_progress)


@in_python_terms
def cut(
    run: AnyRun,
    window: int,
    *,
    keep: float = 0.5,
    by: str = "far",
    by_layer: bool = False,
    sinks: int | None = None,
    folder: str | Path | None = None,
    workers: int = 1,
) -> Cut:
    """Choose the key heads of a captured run to cut to a window, those that need least to see beyond it.

    A share ``keep`` is not cut. ``by`` is the order: far, area, lock or measured, as ``qkscope reach --by``. Pass
    ``cut.windows`` to ``qkscope.cut_cache`` or ``qkscope.intervene.windowed``. With ``by_layer``, whole layers are
    chosen. ``sinks`` first tokens stay, by default as many as the run's means leave out. With a ``folder``, cut.json is
    written there.
    """
    from qkscope.cause.choice import check_shares, choose, heads_to_cut, write_cut
    from qkscope.files.atomic import check_writable
    from qkscope.results.runtables import opened

    check_shares([keep])
    run = opened(run)
    if folder is not None:
        check_path(folder, "folder")
        check_writable(Path(folder))
    heads, limits = heads_to_cut(run, window, by, workers, sinks)
    chosen = choose(heads, by, keep, window, limits.sinks, by_layer=by_layer)
    if folder is not None:
        write_cut(Path(folder), chosen, run.model, keep, limits)
    return chosen


@in_python_terms
def cut_costs(
    model: Any,
    run: AnyRun,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int,
    bos: bool | None = None,
    keep: Sequence[float] = (0.5, 0.75, 0.25),
    by: str = "far",
    draws: int = 16,
    seed: int = 0,
    length: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Measure the loss of a loaded model with key heads cut to a window: the table ``cuts``.

    Texts are as in ``capture_model``, each cut to ``length`` tokens, by default the run's window; they must be longer
    than twice the ``window``, and not those of the run. Besides the order ``by``, all other known orders are measured,
    ``by`` reversed, and ``draws`` random choices.
    """
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.given import check_model
    from qkscope.cause.choice import check_shares, every_cut, heads_to_cut
    from qkscope.cause.cuts import cut_table
    from qkscope.cause.lockedmodel import LockedModel
    from qkscope.results.runtables import opened

    check_model(model, "cut_costs(model, run, texts, tokenizer)")
    check_shares(keep)
    run = opened(run)
    heads, limits = heads_to_cut(run, window, by, 1)
    cuts = every_cut(heads, by, list(dict.fromkeys(keep)), window, limits.sinks, draws, seed)
    corpus, locked = Corpus.of(texts, tokenizer, model, bos), LockedModel.of(model, run)
    documents = corpus.cut(length or locked.run.manifest.window, locked.model)
    return cut_table(locked, documents, cuts, run.model, on_progress or (lambda *_: None))
