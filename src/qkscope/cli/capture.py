"""``qkscope capture`` and ``qkscope plan``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from qkscope.cli.common import (
    SECONDS_BETWEEN_LINES,
    Quiet,
    Verbose,
    errors_as_lines,
    log,
    parse_indices,
    set_up_logging,
)
from qkscope.config import load_capture_config
from qkscope.errors import CaptureError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from qkscope.capture.run import Progress

Model = Annotated[str | None, typer.Argument(help="Hub id, local folder or GGUF file.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--texts", help=".txt, .md, .jsonl or .parquet files, folders, globs, hf:// URLs; may be repeated."),
]
Window = Annotated[int | None, typer.Option(min=16, help="Tokens per document; by default the longest, if it fits.")]
Buckets = Annotated[int, typer.Option(min=1, max=256, help="Position buckets over the window.")]
SampleSize = Annotated[int, typer.Option("--sample", min=1, help="Tokens whose vectors are kept, in every head.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, balanced over all devices, or auto.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")]


def capture(
    context: typer.Context,
    model: Model = None,
    texts: Texts = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the run.")] = Path("run"),
    config: Annotated[Path | None, typer.Option(help="YAML file with these options; what is typed goes first.")] = None,
    field: Annotated[str, typer.Option(help="Field or column that holds the text, in .jsonl and .parquet.")] = "text",
    max_docs: Annotated[int | None, typer.Option(min=1, help="At most this many documents.")] = None,
    revision: Revision = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer is, if not with the model.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    attn: Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, flash_attention_2 …")] = None,
    window: Window = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents per forward pass.")] = 1,
    buckets: Buckets = 16,
    skip_first: Annotated[int, typer.Option(min=0, help="First positions left out: attention sinks.")] = 4,
    layers: Annotated[str | None, typer.Option(help="Only these layers, such as 0,4-7.")] = None,
    heads: Annotated[str | None, typer.Option(help="Only these query heads, such as 0,4-7.")] = None,
    sample: SampleSize = 2048,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    config_overrides: Annotated[
        str | None, typer.Option(help="YAML or JSON of model config entries, such as '{rope_parameters: {…}}'.")
    ] = None,
    full_attention_only: Annotated[bool, typer.Option("--full-attention-only", help="Skip sliding windows.")] = False,
    pre_rope: Annotated[bool, typer.Option("--pre-rope", help="Measure before the rotation.")] = False,
    prefill: Annotated[int | None, typer.Option(min=0, help="Tokens per step through a cache; 0: one pass.")] = None,
    save_vectors: Annotated[
        float | None, typer.Option(help="Also write a dataset with this share of the vectors (0 to 1).")
    ] = None,
    sampler: Annotated[str, typer.Option(help="uniform, log_uniform or all, for --save-vectors.")] = "uniform",
    vector_heads: Annotated[int | None, typer.Option(min=1, help="Query heads drawn for --save-vectors.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Only if you trust it.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure every head of a transformers decoder at every token of some texts, on the unmodified model."""
    others = ("context", "config", "quiet", "verbose", "output")
    given = {key: value for key, value in locals().items() if key not in others and key != "others"}
    typed = {name for name in given if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        _capture(settings(given, typed, config), output)


def plan(
    model: Annotated[str, typer.Argument(help="Hub id or local folder.")],
    texts: Texts = None,
    window: Window = None,
    buckets: Buckets = 16,
    sample: SampleSize = 2048,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what a capture will take before it runs: memory, disk and time."""
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines():
        need_torch()
        from qkscope.capture.estimate import GIB, estimate
        from qkscope.capture.models import ModelOptions
        from qkscope.capture.texts import read_documents

        length = window or 4096
        found = estimate(
            ModelOptions(model, revision, dtype=dtype, device=device), buckets=buckets, sample=sample, window=length
        )
        typer.echo(f"parameters        {found.parameters / 1e6:,.0f} M")
        typer.echo(f"weights           {found.weights / GIB:.2f} GiB")
        typer.echo(f"statistics        {found.statistics / GIB:.2f} GiB on the device, however many documents")
        typer.echo(f"disk              {found.disk / GIB:.2f} GiB")
        typer.echo(f"speed             about {found.flop_per_second / found.flop_per_token:,.0f} tokens/s at best")
        if texts:
            documents = read_documents(texts)
            # A token is about four characters of English; the capture itself counts exactly.
            tokens = sum(min(length, len(document.text) // 4) for document in documents)
            typer.echo(
                f"texts             {len(documents)} documents, about {tokens:,} tokens of at most {length:,} each"
            )
            typer.echo(f"time              about {found.seconds(tokens) / 60:.1f} minutes at best")


def settings(given: dict[str, Any], typed: set[str], path: Path | None) -> dict[str, Any]:
    """Options of the config file, under those that were typed."""
    if path is None:
        return given
    said = load_capture_config(path).model_dump()
    return given | said | {name: given[name] for name in typed & set(given)}


def _capture(given: dict[str, Any], output: Path) -> None:
    if not given["model"] or not given["texts"]:
        raise ConfigError("a capture needs a MODEL and --texts")
    need_torch()
    from qkscope.capture import models
    from qkscope.capture import run as running
    from qkscope.capture.choose import VectorSampling
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.texts import read_documents
    from qkscope.results import check_folder

    check_folder(output, [])
    started = time.monotonic()
    if given["trust_remote_code"]:
        log.warning("running code that comes with %s, as asked", given["model"])
    overrides = given["config_overrides"]
    if isinstance(overrides, str):
        overrides = _parsed(overrides)
    chosen = models.ModelOptions(
        **{
            key: given[key]
            for key in ("model", "revision", "tokenizer", "dtype", "device", "attn", "trust_remote_code")
        },
        config_overrides=overrides,
    )
    vectors = None
    if given["save_vectors"] is None and given["vector_heads"] is not None:
        raise ConfigError("--vector-heads chooses heads for --save-vectors, which was not given")
    if given["save_vectors"] is not None:
        vectors = VectorSampling(given["save_vectors"], given["sampler"], given["seed"], given["vector_heads"])
    layers, heads = (parse_indices(_text(given[key])) for key in ("layers", "heads"))
    options = CaptureOptions(
        **{key: given[key] for key in ("window", "buckets", "skip_first", "batch", "sample", "seed")},
        **{key: given[key] for key in ("full_attention_only", "pre_rope", "prefill")},
        layers=None if layers is None else tuple(sorted(layers)),
        heads=None if heads is None else tuple(sorted(heads)),
        vectors=vectors,
    )
    places = [given["texts"]] if isinstance(given["texts"], str) else list(given["texts"])
    documents = read_documents(places, given["field"], given["max_docs"])
    log.info("%d documents; loading %s", len(documents), given["model"])
    model, tokenizer = models.load(chosen)
    ids = running.tokenize(documents, tokenizer)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if options.window and longest and options.window > longest:
        log.warning("the window of %d goes past the %d positions the model was made for", options.window, longest)
    about = {"id": _label(given["model"]), "revision": given["revision"], "config_overrides": overrides}
    with documents_done() as on_progress:
        folder = running.capture(model, documents, ids, output, options, about, on_progress)
    tokens = sum(min(len(one), options.window or len(one)) for one in ids)
    log.info("%s tokens in %.0f s", f"{tokens:,}", time.monotonic() - started)
    log.info("wrote %s; next: qkscope analyze %s -o %s", folder, folder, folder / "tables")


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config-overrides is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--config-overrides: expected entries such as {{rope_theta: 1e6}}, got {text!r}")
    return value


def _label(model: str) -> str:
    """A model's name without the folders it lies in on this machine."""
    return Path(model).name if Path(model).exists() else model


def _text(value: object) -> str | None:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return None if value is None else str(value)


def need_torch() -> None:
    """Say what to install where there is no torch."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise CaptureError(
            f"capturing needs {error.name}; install it with: pip install torch, then pip install 'qkscope[capture]'"
        ) from None


@contextmanager
def documents_done() -> Iterator[Callable[[Progress], None]]:
    """Documents, tokens per second and time left: a bar on a terminal, a line now and then in a log."""
    start = last = time.monotonic()

    def line(now: Progress) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            rate = now.tokens / (last - start)
            left = (now.tokens_in_all - now.tokens) / rate
            log.info("%d of %d documents, %.0f tokens/s, %.0f s left", now.documents, now.documents_in_all, rate, left)

    if not (sys.stderr.isatty() and log.isEnabledFor(20)):
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("documents {task.fields[documents]}"),
        BarColumn(),
        TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("", total=None, documents="", rate=0.0)

        def draw(now: Progress) -> None:
            documents = f"{now.documents}/{now.documents_in_all}"
            rate = now.tokens / (time.monotonic() - start)
            bar.update(task, completed=now.tokens, total=now.tokens_in_all, documents=documents, rate=rate)

        yield draw
