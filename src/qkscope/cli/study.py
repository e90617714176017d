"""``qkscope study capture``: capture the runs of a study, each at its own window and at that of the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.capture.options import CaptureOptions, ExecutionOptions, ModelOptions, TextOptions, VectorSampling
from qkscope.cli.capture import capture_to
from qkscope.cli.common import Quiet, Verbose, errors_as_lines, log, set_up_logging
from qkscope.cli.options import with_options
from qkscope.config import StudyConfig, StudyRunConfig, load_study_config
from qkscope.errors import ConfigError, NotNestedError
from qkscope.options import option_specs

study_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Work on all runs of a study file.")
_CLASSES = (ModelOptions, TextOptions, CaptureOptions, VectorSampling, ExecutionOptions)
_OWN = ("model", "revision", "window")
"""Options that the study file sets for each run."""
_SHARED = tuple(option.name for option in option_specs(*_CLASSES) if option.name not in _OWN)


@with_options(*_CLASSES, only=_SHARED)
def study_capture_command(
    study: Annotated[Path, typer.Argument(help="A study file (.yaml) whose runs state their weights and window.")],
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Capture every missing run of a study, also at the window at which runs are compared.

    Both come from the same passes, unless vectors of the model depend on the length of documents.
    """
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command to resume"):
        config = load_study_config(study)
        codes = [
            code
            for item in config.runs
            for code in _capture(values, item, study.parent, missing(config, item, study.parent))
        ]
        if not codes:
            log.info("every run of %s is captured already", study)
        raise typer.Exit(max(codes, default=0))


def missing(config: StudyConfig, item: StudyRunConfig, folder: Path) -> list[tuple[Path, int]]:
    """Return the folders and windows of a run that are not captured yet, its own one first."""
    from qkscope.files.runfolder import at_window

    own_window = window_of(item, folder)
    compared = config.compare_at or min(window_of(run, folder) for run in config.runs)
    captures = [(folder / item.path, own_window)]
    if compared != own_window:
        captures.append((Path(at_window(str(folder / item.path), compared)), compared))
    return [
        (run_folder, window)
        for run_folder, window in captures
        if not (run_folder / "run.json").exists() and not _has_tables(run_folder)
    ]


def window_of(item: StudyRunConfig, folder: Path) -> int:
    """Return the window of a run: from the study, or from its capture."""
    if item.window is not None:
        return item.window
    from qkscope.runs.run import open_run

    if not (folder / item.path).exists():
        raise ConfigError(
            f"{item.path} does not exist, and the study does not set its window; add window: N to the run"
        )
    window = open_run(folder / item.path).source.window
    if window is None:
        raise ConfigError(f"the window of {item.path} is not known; add window: N to the run")
    return window


def _has_tables(run_folder: Path) -> bool:
    from qkscope.results.reader import is_results

    return is_results(run_folder)


def _capture(values: dict[str, Any], item: StudyRunConfig, parent: Path, captures: list[tuple[Path, int]]) -> list[int]:
    """Capture a run at the windows that are missing; return the exit code of each capture."""
    if not captures:
        return []
    if item.weights is None:
        folder = captures[0][0]
        raise ConfigError(f"{folder} does not exist, and the study does not name its weights; add weights: to the run")
    local = parent / item.weights
    model = str(local) if local.exists() else item.weights
    values = values | {"model": model, "revision": item.revision}

    def capture(folder: Path, window: int, **more: Any) -> int:
        log.info("capturing %s at a window of %d", item.label or item.path, window)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return capture_to(values | {"window": window} | more, folder)

    (folder, window), *others = captures
    nested = [other for _, other in others if other < window]
    if nested:
        try:
            return [capture(folder, window, compare_at=[*(values["compare_at"] or ()), *nested])]
        except NotNestedError as error:
            log.info("%s", error)
    return [capture(*of_window) for of_window in captures]
