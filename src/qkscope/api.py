"""The functions of ``import qkscope``; each imports its dependencies when it is called.

>>> import qkscope
>>> run = qkscope.capture_model(model, texts, tokenizer)                  # doctest: +SKIP
>>> qkscope.pca(run), qkscope.rotation(run)                               # doctest: +SKIP
>>> qkscope.write_report(run, "report")                                   # doctest: +SKIP
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.analyses.options import AnalysisOptions, PcaOptions, RotationOptions
from qkscope.errors import ConfigError
from qkscope.options import with_keywords
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
    from qkscope.results.reader import Folder
    from qkscope.runs.run import Run

_log = logging.getLogger("qkscope")


def open(  # noqa: A001  qkscope.open
    location: str | os.PathLike[str], revision: str | None = None, **options: Any
) -> Run:
    """Open a captured run or a dataset of vectors: a folder, a Hub id, ``hf://datasets/owner/name@revision``.

    A run that was pushed to the Hub is downloaded into huggingface_hub's cache and verified against its checksums.
    ``options`` are ``model`` and ``family``, the labels in tables, and for a dataset ``q_per_kv``, ``window``,
    ``max_samples``, ``seed``, ``skip_first`` and ``rope``, its rotary encoding, such as ``{"theta": 500000}``.
    """
    from qkscope.runs.run import open_run

    return open_run(location, revision, **options)


# ---- from a model to a run --------------------------------------------------------------------------------------


def capture_model(
    model: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    window: int | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    bos: bool | None = None,
    options: CaptureOptions | None = None,
    progress: bool = True,
) -> Run:
    """Measure a loaded transformers model, also compiled, quantised or with adapters, on these texts.

    Texts are strings, with a tokenizer, or token ids; each is one document, cut to the window. Strings begin with the
    model's BOS token if the model's own files say so; ``bos`` overrides this. A document with images is the output of
    the model's processor. The model must be in evaluation mode and is not changed. With a ``folder`` the run is stored
    there, and a stopped capture resumes; without, the run is deleted with the returned object.
    ``options`` are those of ``qkscope capture``.
    """
    from qkscope.capture.options import need_torch

    need_torch()
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.watch import plain_model

    plain = plain_model(model)
    corpus = Corpus.of(texts, tokenizer, plain, bos)
    return capture_corpus(plain, plain, corpus, window=window, folder=folder, name=name, options=options, bar=progress)


def capture_corpus(
    source: Any,
    plain: Any,
    corpus: Corpus,
    *,
    window: int | None,
    folder: str | Path | None,
    name: str | None,
    options: CaptureOptions | None,
    bar: bool,
) -> Run:
    """Capture a ``plain`` model as ``capture_model`` does; the source is the model itself or its engine."""
    from qkscope.capture.options import CaptureOptions, ExecutionOptions
    from qkscope.capture.run import capture
    from qkscope.runs.run import open_run

    settings = options or CaptureOptions()
    settings = settings if window is None else replace(settings, window=window)
    label = name or Path(str(plain.config.name_or_path or type(plain).__name__)).name
    run_folder = Path(tempfile.mkdtemp(prefix="qkscope-")) if folder is None else Path(folder)
    try:
        with show_progress("capturing", "tokens", delay=2.0, enabled=bar) as on_progress:
            capture(
                source, corpus, run_folder, settings, corpus.about(label), ExecutionOptions(on_progress=on_progress)
            )
        run = open_run(run_folder, model=label)
    except BaseException:
        if folder is None:
            shutil.rmtree(run_folder, ignore_errors=True)
        raise
    if folder is None:  # copies of a run share its source
        weakref.finalize(run.source, shutil.rmtree, run_folder, ignore_errors=True)
    return run


# ---- from a run to tables and pages ------------------------------------------------------------------------------


def pca(run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Combined QK PCA of every head: the table ``qk``."""
    return _table(run, "pca", "qk", workers, AnalysisOptions(intervals=intervals, pca=options or PcaOptions()))


def head_table(
    run: Run, options: PcaOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Positional variance, separability and amplification of every head: the table ``heads``."""
    return _table(run, "pca", "heads", workers, AnalysisOptions(intervals=intervals, pca=options or PcaOptions()))


def rotation(
    run: Run, options: RotationOptions | None = None, *, workers: int = 1, intervals: bool = True
) -> pd.DataFrame:
    """Planar rotation model of every head: the table ``rotated``."""
    chosen = AnalysisOptions(intervals=intervals, rotation=options or RotationOptions())
    return _table(run, "rotation", "rotated", workers, chosen)


def planes(run: Run, *, workers: int = 1) -> pd.DataFrame:
    """Planes of the complement of a and b, and RoPE planes, of every head: the table ``planes``."""
    return _table(run, "planes", "planes", workers, AnalysisOptions(intervals=False))


def position(run: Run, *, decay_range: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Statistics from position alone, for every head whose rotation is known: the table ``position``.

    ``decay`` is over distances up to ``decay_range``, by default half of what the queries see.
    """
    return _table(run, "position", "position", workers, AnalysisOptions(decay_range=decay_range, intervals=intervals))


def distance(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distance curve of every head whose rotation is known: the table ``distance``."""
    return _table(run, "distance", "distance", workers, AnalysisOptions(intervals=intervals))


def scores(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The composition of every head's scores: the table ``scores``."""
    return _table(run, "scores", "scores", workers, AnalysisOptions(intervals=intervals))


def reach(run: Run, *, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """The distances over which every head attends, measured and predicted: the table ``reach``."""
    return _table(run, "reach", "reach", workers, AnalysisOptions(intervals=intervals))


def plasticity(run: Run, *, buckets: int | None = None, workers: int = 1, intervals: bool = True) -> pd.DataFrame:
    """Attention plasticity of every head and position bucket: the table ``plasticity``."""
    return _table(run, "plasticity", "plasticity", workers, AnalysisOptions(buckets=buckets, intervals=intervals))


def tables(run: Run, *, points: PointOptions | None = None, workers: int = 1) -> dict[str, pd.DataFrame]:
    """All tables at once, from one read; ``points`` selects the heads whose vectors are added, for figures."""
    return analyze(run, points=points, workers=workers)


def _table(run: Run, analysis: str, name: str, workers: int, options: AnalysisOptions) -> pd.DataFrame:
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze as analyze_jobs
    from qkscope.results.job import Job

    (result,) = analyze_jobs([Job(run, options=options)], [analysis], target=ExecutionTarget(workers), strict=True)
    return result.tables.frames[name]


@with_keywords(Selection, AnalysisOptions)
def analyze(
    runs: Run | Sequence[Run],
    folder: str | Path | None = None,
    *,
    only: Sequence[str] | None = None,
    points: PointOptions | None = None,
    strict: bool = True,
    workers: int = 1,
    **options: Any,
) -> dict[str, pd.DataFrame]:
    """The tables of one or several runs, as ``qkscope analyze`` computes and, with a ``folder``, writes them.

    ``only`` names analyses; ``layers``, ``heads`` and ``sample_heads`` choose query heads. A head that cannot be
    analysed raises or, unless ``strict``, is left out with a warning. Other keywords are options of the command.
    """
    import pandas as pd

    from qkscope.analyses.catalogue import ANALYSES_BY_NAME, analyses_named
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze as analyze_jobs
    from qkscope.results.analyze import write_results
    from qkscope.results.folder import check_results_folder
    from qkscope.results.job import Job
    from qkscope.runs.run import Run

    run_list = [runs] if isinstance(runs, Run) else list(runs)
    jobs = [Job.from_options(run, "analyze", options, points) for run in run_list]
    if folder is not None:
        check_results_folder(Path(folder))
    started = time.monotonic()
    names = [analysis.name for analysis in analyses_named(ANALYSES_BY_NAME if only is None else only)]
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


def top(
    run: Run | str | os.PathLike[str],
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
    from qkscope.results.derived import one_row_per_head, top_heads

    return top_heads(one_row_per_head(_folder(run, workers).tables), by, n, lowest=lowest)


def compare(a: Run | str | os.PathLike[str], b: Run | str | os.PathLike[str], *, workers: int = 1) -> Comparison:
    """Compare two runs of one shape at one window, head by head, with intervals that are paired by document.

    ``a`` and ``b`` are as in ``top``. The result prints as a sentence; ``table`` has every head and column, ``summary``
    the means, ``changed_most("decay")`` the heads that changed most.
    """
    from qkscope.results.compare import compare_runs, side

    return compare_runs(*(side(_folder(run, workers)) for run in (a, b)))


def _folder(run: Run | str | os.PathLike[str], workers: int) -> Folder:
    from qkscope.results.analyze import tables_of
    from qkscope.runs.captured import CapturedSource
    from qkscope.runs.run import Run

    if not isinstance(run, Run):
        return tables_of(Path(run), workers=workers)
    if not isinstance(run.source, CapturedSource):
        raise ConfigError(
            f"{run.model} is a dataset of vectors; write its tables with qkscope.analyze, and give their folder"
        )
    return tables_of(run.source.run.folder, workers=workers)


def write_report(
    runs: Run | Sequence[Run] | Mapping[str, Run], folder: str | Path, *, title: str = "", workers: int | None = 1
) -> Path:
    """Tables, figures, report.html and explorer.html of one or several runs, as ``qkscope report``; returns the report.

    Runs are labelled by their models, or by the keys of a dict. More than one worker needs a script that guards its
    main part, as always with processes.
    """
    from qkscope.config import StudyConfig, StudyRunConfig
    from qkscope.files.atomic import check_writable
    from qkscope.report.gather import gather
    from qkscope.report.report import EXPLORER, REPORT, TABLES_FOLDER, check_pages, write_pages
    from qkscope.runs.run import Run

    output = Path(folder)
    check_writable(output)
    check_pages(output / REPORT, output / EXPLORER)
    run_collection = {runs.model: runs} if isinstance(runs, Run) else runs
    by_label = run_collection if isinstance(run_collection, Mapping) else {run.model: run for run in run_collection}
    if not by_label or len(by_label) < len(run_collection):
        raise ConfigError("expected runs of different models, or a dict of labels and runs")
    entries = [StudyRunConfig(path=str(run.source), label=label) for label, run in by_label.items()]
    study = gather(StudyConfig(runs=entries, title=title), output / TABLES_FOLDER, workers=workers)
    write_pages(study, output, command="qkscope.write_report", workers=workers)
    return output / REPORT


# ---- effects of terms and windows on the prediction ----------------------------------------------------------------


def effects(
    model: Any,
    run: Any,
    texts: Sequence[Any],
    tokenizer: Any = None,
    *,
    bos: bool | None = None,
    options: EffectOptions | None = None,
    window: int | None = None,
    heads: Sequence[tuple[int, int]] = (),
    label: str = "",
    on_progress: Callable[[float, float], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """The effect of each term of each head on the predictions of a loaded model for these texts.

    Texts are as in ``capture_model``; they must not be those of the run. ``on_progress`` is called with the amount
    done and the total. Returns the tables ``effects`` and ``effects_together``.
    """
    from qkscope.capture.corpus import Corpus
    from qkscope.cause.effects import EffectOptions, EffectsJob, effect_tables
    from qkscope.cause.lockedmodel import LockedModel

    corpus = Corpus.of(texts, tokenizer, model, bos)
    locked = LockedModel.of(model, run)
    documents = corpus.cut(window or locked.run.manifest.window, locked.model)
    with tempfile.TemporaryDirectory() as folder:
        job = EffectsJob(locked, documents, options or EffectOptions(), Path(folder), list(heads))
        return effect_tables(job, label or locked.run.folder.name, on_progress=on_progress)


def cut(
    run: Run,
    window: int,
    *,
    keep: float = 0.5,
    by: str = "far",
    folder: str | Path | None = None,
    workers: int = 1,
) -> Cut:
    """Choose the key heads of a captured run to cut to a window, those that need least to see beyond it.

    A share ``keep`` is not cut. ``by`` is the order: far, area, lock or measured, as ``qkscope reach --by``. Pass
    ``cut.windows`` to ``qkscope.intervene.windowed``. With a ``folder``, cut.json is written there.
    """
    from qkscope.cause.choice import choose, heads_to_cut, write_cut

    heads, limits = heads_to_cut(run, window, by, workers)
    chosen = choose(heads, by, keep, window, limits.sinks)
    if folder is not None:
        write_cut(Path(folder), chosen, run.model, keep, limits.shape)
    return chosen


def cut_costs(
    model: Any,
    run: Run,
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
    from qkscope.cause.choice import every_cut, heads_to_cut
    from qkscope.cause.cuts import cut_table
    from qkscope.cause.lockedmodel import LockedModel

    heads, limits = heads_to_cut(run, window, by, 1)
    cuts = every_cut(heads, by, list(dict.fromkeys(keep)), window, limits.sinks, draws, seed)
    corpus, locked = Corpus.of(texts, tokenizer, model, bos), LockedModel.of(model, run)
    documents = corpus.cut(length or locked.run.manifest.window, locked.model)
    return cut_table(locked, documents, cuts, run.model, on_progress or (lambda *_: None))
