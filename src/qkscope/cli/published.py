"""The published command lines ``pca-analyze`` and ``rotate-analyze``, on the same pipeline."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkscope.cli.common import (
    EngineOption,
    HeadsOption,
    LayersOption,
    NoIntervals,
    Quiet,
    RayAddress,
    SampleHeads,
    Seed,
    Strict,
    Verbose,
    Version,
    WorkersOption,
    chosen_indices,
    errors_as_lines,
    heads_done,
    log,
    prepare,
    set_up_logging,
    write_and_exit_code,
)
from qkscope.headids import head_name
from qkscope.progress import plural

if TYPE_CHECKING:
    from qkscope.results.config import Config
    from qkscope.results.summary import ModelResults

_HEADS_NAMED = 8

Configs = Annotated[
    list[Path], typer.Option("--config", help="A config file, or a folder of them; may be given several times.")
]


def _command(analysis: str, about: str) -> Callable[..., None]:
    """Return a published command; each analysis has the same options."""

    def command(
        config: Configs,
        layers: LayersOption = None,
        heads: HeadsOption = None,
        sample_heads: SampleHeads = None,
        seed: Seed = None,
        workers: WorkersOption = None,
        engine: EngineOption = "local",
        ray_address: RayAddress = None,
        no_intervals: NoIntervals = False,
        strict: Strict = False,
        quiet: Quiet = False,
        verbose: Verbose = False,
        version: Version = False,
    ) -> None:
        set_up_logging(quiet=quiet, verbose=verbose)
        choices = {"layers": layers, "heads": heads, "sample_heads": sample_heads, "seed": seed}
        _analyze(analysis, config, choices, (workers, engine, ray_address), intervals=not no_intervals, strict=strict)

    command.__doc__ = about
    return command


def _app(name: str, analysis: str, about: str) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(epilog=f"Example: {name} --config configs/attention-plasticity/llama3.2-3b.yaml")(
        _command(analysis, about)
    )
    return app


pca_analyze_app = _app(
    "pca-analyze",
    "pca",
    "Combined QK PCA: write qk.csv, heads.csv and summary.json into the config's results_dir.",
)
rotate_analyze_app = _app(
    "rotate-analyze",
    "rotation",
    "Planar rotation model: write rotated.csv and summary.json into the config's results_dir.",
)


def _analyze(
    analysis: str,
    paths: list[Path],
    choices: dict[str, str | int | None],
    engine_options: tuple[int | None, str, str | None],
    *,
    intervals: bool,
    strict: bool,
) -> None:
    """Analyse the configs; those that share a results folder are written together."""
    from qkscope.engine import ExecutionTarget
    from qkscope.results.analyze import analyze
    from qkscope.results.config import load_configs
    from qkscope.results.job import Job

    with errors_as_lines():
        by_folder: dict[Path, list[Config]] = defaultdict(list)
        for config in load_configs(paths):
            by_folder[config.output.results_dir].append(_override(config, choices))
        work = {
            folder: [Job.from_config(config, intervals=intervals) for config in configs]
            for folder, configs in by_folder.items()
        }
        for folder, jobs in work.items():
            prepare(jobs, folder, [analysis])
        codes = []
        for folder, jobs in work.items():
            started = time.monotonic()
            workers, engine, address = engine_options
            count = workers or next((c.workers for c in by_folder[folder] if c.workers != "auto"), None)
            target = ExecutionTarget(count, engine, address)  # type: ignore[arg-type]
            with heads_done() as on_done:
                results = analyze(jobs, [analysis], target=target, strict=strict, on_done=on_done)
            codes.append(write_and_exit_code(folder, results, started, published=True))
            for result in results:
                _warn_at_edge(result)
        raise typer.Exit(max(codes))


def _warn_at_edge(result: ModelResults) -> None:
    """Name the heads whose ``omega`` is only the lowest frequency that was searched."""
    rotated = result.tables.frames.get("rotated")
    if rotated is None or not rotated["omega_at_edge"].eq(True).any():
        return
    at_edge = rotated[rotated["omega_at_edge"].eq(True)]
    names = [head_name(row.layer, row.head) for row in at_edge.itertuples()]
    shown = ", ".join(names[:_HEADS_NAMED]) + (" …" if len(names) > _HEADS_NAMED else "")
    log.warning(
        "%s: omega is the lowest frequency searched in %d of %s, a drift rather than a rotation (omega_at_edge): %s",
        result.model, len(names), plural(len(rotated), "head"), shown,
    )  # fmt: skip


def _override(config: Config, choices: dict[str, str | int | None]) -> Config:
    """Return the config with the overrides of the command line."""
    overrides: dict[str, Any] = {key: value for key, value in choices.items() if value is not None}
    for key in ("layers", "heads"):
        if key in overrides:
            overrides[key] = sorted(chosen_indices(str(overrides[key])) or ())
    return config.model_copy(update={"data": config.data.model_copy(update=overrides)})


def run_pca_analyze() -> None:
    """Entry point of ``pca-analyze``."""
    pca_analyze_app()


def run_rotate_analyze() -> None:
    """Entry point of ``rotate-analyze``."""
    rotate_analyze_app()
