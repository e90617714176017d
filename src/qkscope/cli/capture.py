"""``qkscope capture`` and ``qkscope plan``."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from qkscope.capture.options import (
    CaptureOptions,
    ExecutionOptions,
    ModelOptions,
    TextOptions,
    VectorSampling,
    capture_options,
    load_capture_config,
    need_torch,
)
from qkscope.cli.common import SOME_HEADS_FAILED, Quiet, Verbose, errors_as_lines, log, set_up_logging
from qkscope.cli.options import with_options
from qkscope.errors import ConfigError
from qkscope.options import defaults, from_values
from qkscope.progress import duration, in_view, plural, progress

_PLANNED = (
    "model", "texts", "field", "max_docs", "window", "buckets", "sample", "seed", "layers", "heads", "dtype", "device",
    "revision", "tokenizer", "bos", "save_vectors", "sampler", "vector_heads", "keep",
)  # fmt: skip


@with_options(ModelOptions, TextOptions, CaptureOptions, VectorSampling, ExecutionOptions)
def capture_command(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("run"),
    config: Annotated[
        Path | None, typer.Option(help="YAML file with these options; the command line overrides it.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    **values: Any,
) -> None:
    """Measure every head of a transformers model on some texts.

    Every token counts; the model is not modified.
    """
    typed = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("rerun the same command to resume"):
        raise typer.Exit(capture_to(settings(values, typed, config), output))


@with_options(ModelOptions, TextOptions, CaptureOptions, VectorSampling, only=_PLANNED)
def plan_command(quiet: Quiet = False, verbose: Verbose = False, **values: Any) -> None:
    """Estimate memory, disk and time of a capture before it runs."""
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        if not values["model"]:
            raise ConfigError("a plan needs a MODEL")
        need_torch()
        from qkscope.capture.corpus import Corpus
        from qkscope.capture.plan import GIB, estimate

        values = defaults(ModelOptions, CaptureOptions, VectorSampling) | values
        model, options = from_values(ModelOptions, values), capture_options(values)
        counted = (
            [len(ids) for ids in Corpus.read(from_values(TextOptions, values), model).ids] if values["texts"] else []
        )
        longest = max(counted, default=values["window"] or 4096)
        window = min(values["window"] or longest, longest)
        lengths = [min(window, tokens) for tokens in counted]
        cost = estimate(model, options, window)
        typer.echo(f"parameters        {cost.parameters / 1e6:,.0f} M")
        typer.echo(f"weights           {cost.weights / GIB:.2f} GiB")
        typer.echo(f"statistics        {cost.statistics / GIB:.2f} GiB on the device, however many documents")
        typer.echo(f"disk              {cost.disk(lengths) / 1e6:,.0f} MB")
        if math.isfinite(cost.linear):
            typer.echo(f"speed             about {cost.tokens_per_second(window):,.0f} tokens/s at {window:,} tokens")
        if lengths:
            documents = plural(len(lengths), "document")
            typer.echo(f"texts             {documents}, {sum(lengths):,} tokens of at most {window:,} each")
            if math.isfinite(cost.linear):
                typer.echo(f"time              about {duration(cost.seconds(lengths))} once the model is loaded")


def settings(values: dict[str, Any], typed: set[str], path: Path | None) -> dict[str, Any]:
    """Return the options of the config file, overridden by those on the command line."""
    if path is None:
        return values
    return values | load_capture_config(path) | {name: values[name] for name in typed}


def capture_to(values: dict[str, Any], output: Path) -> int:
    """Capture into a folder, with the values of all options; return the exit code."""
    if not values["model"] or not values["texts"]:
        raise ConfigError("a capture needs a MODEL and --texts")
    need_torch()
    from qkscope.capture.corpus import Corpus
    from qkscope.capture.model import load_quietly, resolved_device
    from qkscope.capture.run import capture
    from qkscope.files.inprogress import check_capture_folder

    if not in_view():
        load_quietly()
    check_capture_folder(output)
    started = time.monotonic()
    execution = from_values(ExecutionOptions, values)
    if values["trust_remote_code"]:
        log.warning("running code that comes with %s, as requested", values["model"])
    model, options = from_values(ModelOptions, values), capture_options(values)
    execution.target(resolved_device(model.device))  # raise errors before texts are read
    corpus = Corpus.read(from_values(TextOptions, values), model)
    about = corpus.about(_label(model.model), model.revision, model.config_overrides)
    with progress("capturing", "tokens") as on_progress:
        execution = replace(execution, on_progress=on_progress)
        source = replace(model, threads=execution.threads(model.threads))
        folder = capture(source, corpus, output, options, about, execution)
    log.info("done in %.0f s", time.monotonic() - started)
    return report_outcome(folder)


def report_outcome(folder: Path) -> int:
    """Log the result in a folder, a run or a share of one; return the exit code, nonzero if documents were left out."""
    from qkscope.capture.assemble import n_left_out
    from qkscope.files.runfolder import MANIFEST, RunFolder

    if (folder / MANIFEST).exists():
        manifest = RunFolder.open(folder).manifest
        loss = manifest.loss
        if loss is not None:
            tokens = sum(document.tokens for document in manifest.documents)
            log.info(
                "mean loss %.3f nats per token, over %s of %s tokens", loss.mean, f"{loss.tokens:,}", f"{tokens:,}"
            )
        else:
            log.warning("no mean loss: qkscope does not know how this model computes its logits")
        log.info("wrote %s; next: qkscope report %s -o report", folder, folder)
    else:
        log.info("wrote a share to %s; when all are done: qkscope merge FOLDER … -o RUN", folder)
    missing = n_left_out(folder)
    if missing:
        log.error("left out for lack of memory: %s", plural(missing, "document"))
    return SOME_HEADS_FAILED if missing else 0


def _label(model: str) -> str:
    """Return a model's name without its folder on this machine."""
    return Path(model).name if Path(model).exists() else model
