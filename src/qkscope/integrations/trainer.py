"""Measure a model during training: one run per measurement in a study folder, within a share of the time.

    study = TrainingStudy("study", texts, tokenizer, every=500)
    for step, batch in enumerate(batches, 1):
        …                                   # a step of training
        scalars = study.at(step, model)     # None at most steps
    study.close(step, model)

``qkscope report study/study.yaml`` then shows the changes. Measurements change neither modes, weights and gradients of
the model nor random states, so the loss is the same, bit for bit, as without them.
"""

from __future__ import annotations

import gc
import inspect
import logging
import re
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qkscope.analyses.options import AnalysisOptions
from qkscope.analyses.scores import HEAD_CLASSES
from qkscope.api import capture_corpus
from qkscope.capture.corpus import Corpus
from qkscope.capture.given import read_texts
from qkscope.capture.model import eval_mode, seconds_of_a_pass
from qkscope.capture.options import CaptureOptions
from qkscope.capture.watch import plain_model
from qkscope.config import StudyConfig, StudyRunConfig, load_study_config
from qkscope.engine import IN_PROCESS
from qkscope.errors import ConfigError, QkscopeError
from qkscope.files.atomic import check_writable, write_together
from qkscope.options import check_path, is_whole
from qkscope.progress import plural
from qkscope.results.analyze import analyze
from qkscope.results.job import Job
from qkscope.runs.run import Run

if TYPE_CHECKING:
    from transformers import Trainer

_log = logging.getLogger("qkscope")
STUDY_FILE = "study.yaml"
_SAMPLE = 512
"""Number of tokens whose vectors a run stores: fewer than usual, since there are many runs."""
_FACTOR, _FIXED = 1.5, 2.0
"""Expected time of the first measurement: a factor on the time of the passes, and additional seconds."""
_LOGGED = {
    "heads": ("part_position", "part_content", "decay", "position_share", "positional_overhead", "mass_sink"),
    "rotated": ("bias_full_window",),
    "roles": ("previous", "induction", "entropy"),
}
"""Columns of each table whose mean over heads is logged."""
_RUN = re.compile(r"step-(\d+)")


class TrainingStudy:
    """Measurements of one training run, in a folder with a study file."""

    def __init__(
        self,
        folder: str | Path,
        texts: Sequence[Any],
        tokenizer: Any = None,
        *,
        every: int = 500,
        window: int | None = None,
        compare_at: int | Sequence[int] = (),
        max_share: float | None = 0.01,
        ends: bool = True,
        title: str = "",
        phase: str | None = None,
        bos: bool | None = None,
        options: CaptureOptions | None = None,
    ) -> None:
        """Texts are strings, with a tokenizer, or token ids, as for ``qkscope.capture_model``.

        A measurement is due every ``every`` steps. It is made as soon as all measurements together take at most
        ``max_share`` of the time since the start; with None, immediately. The first step (of a new study) and the last
        are measured at once, whatever they cost, unless ``ends`` is False. If the window grows during training,
        ``compare_at`` is the one at which ``qkscope report`` compares all measurements, from the same passes.
        """
        _check_every(every, max_share)
        self.folder, self.tokenizer = Path(folder), tokenizer
        self.texts, self.bos = read_texts(texts, tokenizer), bos
        self._corpus: Corpus | None = None
        self.every, self.window, self.compare_at, self.max_share = every, window, compare_at, max_share
        self.title, self.phase, self.options = title, phase, options
        check_writable(self.folder)
        self.ends = ends
        self._at_first = ends and not any(self.folder.glob("step-*/run.json"))
        self.skipped = 0
        """Measurements that were due and never made, to keep within the share of the time."""
        self.measured: list[int] = []
        """Steps that this object has measured."""
        self.spent = 0.0
        """Seconds that all measurements took so far."""
        self._cost = 0.0
        """Seconds that the next measurement is expected to take."""
        self._due = self._warned = False
        self._start = time.monotonic()

    @property
    def share(self) -> float:
        """Share of the time since the start that measurements took."""
        return self.spent / max(time.monotonic() - self._start, 1e-9)

    def at(self, step: int, model: Any) -> dict[str, float] | None:
        """Measure if a measurement is due and affordable, or at the first step; returns numbers to log, or None."""
        is_first, self._at_first = self._at_first, False
        if step % self.every == 0:
            self.skipped += self._due
            self._due = True
        if is_first or (self._due and self._affordable(model)):
            return self._measure(step, model)
        if self._due and not self._warned:
            self._warned = True
            _log.warning(
                "the measurement of step %d is put off: all measurements together may take at most %.1f%% of the time "
                "(max_share)", step, 100 * (self.max_share or 1),
            )  # fmt: skip
        return None

    def close(self, step: int, model: Any) -> dict[str, float] | None:
        """Measure the last state, and log the time of all measurements and how many were skipped."""
        scalars = None
        if step not in self.measured and (self.ends or self._affordable(model)):
            scalars = self._measure(step, model)
        self.skipped, self._due = self.skipped + self._due, False
        bound = "" if self.max_share is None else f", at most {self.max_share:.1%}"
        _log.info(
            "%s in %s took %.1f s (%.2f%% of the time%s)",
            plural(len(self.measured), "measurement"), self.folder, self.spent, 100 * self.share, bound,
        )  # fmt: skip
        if self.skipped:
            _log.warning(
                "skipped %s that fell due, to keep within max_share; raise it, or every, or give fewer texts",
                plural(self.skipped, "measurement"),
            )  # fmt: skip
        return scalars

    def _affordable(self, model: Any) -> bool:
        """True if one more measurement keeps all of them within their share of the time."""
        if self.max_share is None:
            return True
        if not self._cost:
            with self._counted(), eval_mode(model):
                self._cost = self._expected(model)
        elapsed = time.monotonic() - self._start
        return self.spent + self._cost <= self.max_share * (elapsed + self._cost)

    def _measure(self, step: int, model: Any) -> dict[str, float]:
        run_folder = self.folder / f"step-{step:07d}"
        before = self.spent
        with self._counted(), eval_mode(model):
            plain = plain_model(model)
            run = capture_corpus(
                plain, plain, self.corpus(plain), window=self.window, compare_at=self.compare_at, folder=run_folder,
                name=run_folder.name, options=self.options or CaptureOptions(sample=_SAMPLE), bar=False,
            )  # fmt: skip
            scalars = logged(run)
            self._write_study()
        self._cost, self._due = self.spent - before, False
        self.measured.append(step)
        return scalars

    def _expected(self, model: Any) -> float:
        """Expected seconds of the first measurement: passes of documents and of the gate, sums and files."""
        documents = self.corpus(plain_model(model)).ids
        longest = max(documents, key=len)[: self.window]
        tokens = sum(min(len(ids), self.window or len(ids)) for ids in documents)
        per_token = seconds_of_a_pass(model, longest) / len(longest)
        return _FACTOR * per_token * tokens + _FIXED

    def corpus(self, model: Any) -> Corpus:
        """Return the texts as token ids, read at the first measurement: the model's files decide about BOS."""
        if self._corpus is None:
            self._corpus = Corpus.of(self.texts, self.tokenizer, model, self.bos)
        return self._corpus

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent += time.monotonic() - began

    def _write_study(self) -> None:
        """Write the study file with all complete runs of this training by step, including those of earlier sessions."""
        import yaml

        path = self.folder / STUDY_FILE
        entries = {item.path: item for item in load_study_config(path).runs} if path.exists() else {}
        for run in sorted(self.folder.glob("step-*/run.json")):
            match = _RUN.fullmatch(run.parent.name)
            if match is not None:
                step = int(match[1])
                item = StudyRunConfig(path=run.parent.name, label=f"step {step:,}", step=step, phase=self.phase)
                entries.setdefault(run.parent.name, item)
        study = StudyConfig(title=self.title, runs=sorted(entries.values(), key=lambda item: item.step or 0))
        content = study.model_dump(exclude_none=True, exclude_defaults=True)
        write_together(self.folder, {STUDY_FILE: yaml.safe_dump(content, sort_keys=False).encode()})


def logged(run: Run) -> dict[str, float]:
    """The numbers to log about a run: means over heads, the largest score of any head, and the share of each class."""
    (result,) = analyze(
        [Job(run, options=AnalysisOptions(intervals=False))],
        ["pca", "rotation", "position", "scores", "reach", "roles"],
        target=IN_PROCESS,
    )
    tables = result.tables.frames
    means = {
        f"qkscope/{name}": float(np.nanmean(values))
        for table, names in _LOGGED.items()
        for name in names
        if (values := _per_head(tables.get(table), name)).size
    }
    scores = _per_head(tables.get("roles"), "max_logit")
    means |= {"qkscope/max_logit": float(scores.max())} if len(scores) else {}
    classes = tables["heads"]["head_class"].value_counts(normalize=True)
    return means | {f"qkscope/class_{kind}": float(classes.get(kind, 0.0)) for kind in HEAD_CLASSES}


def _per_head(table: pd.DataFrame | None, name: str) -> np.ndarray:
    """The finite values of a column, one per head."""
    if table is None or name not in table:
        return np.zeros(0)
    values = table.drop_duplicates(["layer", "head"])[name].to_numpy(float)
    return values[np.isfinite(values)]


def _check_every(every: object, max_share: object) -> None:
    share_is_right = max_share is None or (isinstance(max_share, Real) and 0 < float(max_share) <= 1)
    if not is_whole(every) or every < 1 or not share_is_right:  # type: ignore[operator]
        raise ConfigError(f"expected every ≥ 1 and 0 < max_share ≤ 1, got {every!r} and {max_share!r}")


class QkScopeCallback(TrainerCallback):
    """A callback that measures every ``every`` steps, within ``max_share`` of the training's time, and at both ends.

    ``folder`` is by default ``qkscope`` in the Trainer's output folder, the tokenizer the Trainer's
    ``processing_class``. Other options are those of ``TrainingStudy``. In distributed training, only the first process
    measures. An error is logged as a warning and stops the measurements, not the training.
    """

    def __init__(
        self,
        texts: Sequence[Any],
        every: int = 500,
        *,
        folder: str | Path | None = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        read_texts(texts, tokenizer or str)  # strings get the Trainer's tokenizer
        _check_every(every, options.get("max_share", 0.01))
        if folder is not None:
            check_path(folder, "folder")
        unknown = options.keys() - inspect.signature(TrainingStudy).parameters.keys()
        if unknown:
            raise ConfigError(f"QkScopeCallback has no option {min(unknown)!r}; TrainingStudy lists them")
        self.texts, self.every, self.folder, self.tokenizer, self.options = texts, every, folder, tokenizer, options
        self.study: TrainingStudy | None = None
        self._trainer: weakref.ReferenceType[Trainer] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the study."""
        if not state.is_world_process_zero:
            return
        folder = self.folder or Path(str(args.output_dir)) / "qkscope"
        tokenizer = self.tokenizer or kwargs.get("processing_class")
        self.study = TrainingStudy(folder, self.texts, tokenizer, every=self.every, **self.options)
        self._trainer = _trainer_of(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure if a measurement is due."""
        self._call("at", state, control, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the final state, and log the time of all measurements."""
        self._call("close", state, control, kwargs["model"])

    def _call(self, method: str, state: TrainerState, control: TrainerControl, model: Any) -> None:
        if self.study is None:
            return
        try:
            scalars = getattr(self.study, method)(state.global_step, model)
        except QkscopeError as error:
            _log.warning("measurements stopped: %s", error)
            self.study = None
            return
        trainer = None if self._trainer is None else self._trainer()
        if scalars and trainer is not None:
            should_log = control.should_log  # logging resets it, so the Trainer would skip its own log of this step
            trainer.log(scalars)
            control.should_log = should_log


def _trainer_of(state: TrainerState) -> weakref.ReferenceType[Trainer] | None:
    """The Trainer that has this state, which transformers does not pass to callbacks."""
    from transformers import Trainer  # takes seconds to import

    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer) and getattr(candidate, "state", None) is state:
            return weakref.ref(candidate)
    _log.warning("no Trainer found, so nothing is logged; the study is still written")
    return None
