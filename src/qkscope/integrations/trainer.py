"""A callback of transformers' Trainer that measures every head while a model trains.

    trainer = Trainer(…, callbacks=[QkScopeCallback(texts, every=500)])

A handful of numbers go wherever the Trainer reports (TensorBoard, trackio, wandb, …); the runs go into a study folder.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qkscope.errors import QkscopeError
from qkscope.integrations.trainingstudy import TrainingStudy

_log = logging.getLogger("qkscope")


class QkScopeCallback(TrainerCallback):
    """Measures at every ``every``-th step, within ``max_share`` of the training's time.

    ``folder`` is by default ``qkscope`` in the Trainer's output folder; the tokenizer by default the Trainer's
    ``processing_class``. Other options are those of ``TrainingStudy``. Only the first process of several measures. What
    goes wrong is a warning and ends the measurements, not the training.
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
        self.texts, self.every, self.folder, self.tokenizer, self.options = texts, every, folder, tokenizer, options
        self.study: TrainingStudy | None = None
        self._trainer: weakref.ReferenceType[Trainer] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin the study."""
        if not state.is_world_process_zero:
            return
        folder = self.folder or Path(str(args.output_dir)) / "qkscope"
        tokenizer = self.tokenizer or kwargs.get("processing_class")
        self.study = TrainingStudy(folder, self.texts, tokenizer, every=self.every, **self.options)
        self._trainer = _trainer_of(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure if it is time to."""
        self._measured("at", state, control, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the end, and say what all measurements took."""
        self._measured("close", state, control, kwargs["model"])

    def _measured(self, when: str, state: TrainerState, control: TrainerControl, model: Any) -> None:
        if self.study is None:
            return
        try:
            scalars = getattr(self.study, when)(state.global_step, model)
        except QkscopeError as error:
            _log.warning("no more measurements: %s", error)
            self.study = None
            return
        trainer = None if self._trainer is None else self._trainer()
        if scalars and trainer is not None:
            due = control.should_log  # the Trainer's own log of this step, which any log would count as done
            trainer.log(scalars)
            control.should_log = due


def _trainer_of(state: TrainerState) -> weakref.ReferenceType[Trainer] | None:
    """The Trainer that has this state; a callback is not told."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Trainer) and getattr(candidate, "state", None) is state:
            return weakref.ref(candidate)
    _log.warning("no Trainer found, so nothing is logged; the study is written all the same")
    return None
