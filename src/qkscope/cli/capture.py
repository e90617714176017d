"""``qkscope capture`` and ``qkscope plan``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from qkscope.cli.captureprogress import documents_done
from qkscope.cli.common import (
    SOME_HEADS_FAILED,
    EngineOption,
    Quiet,
    RayAddress,
    Verbose,
    bars,
    errors_as_lines,
    log,
    parse_indices,
    set_up_logging,
)
from qkscope.config import load_capture_config
from qkscope.errors import CaptureError, ConfigError

if TYPE_CHECKING:
    from qkscope.capture.models import ModelOptions
    from qkscope.capture.options import CaptureOptions
    from qkscope.engine import Place

_Model = Annotated[str | None, typer.Argument(help="Hub id, local folder or GGUF file.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--texts", help=".txt, .md, .jsonl or .parquet files, folders, globs, hf:// URLs; may be repeated."),
]
Window = Annotated[
    int | None, typer.Option(min=16, max=2**24, help="Tokens per document; by default the longest, if it fits.")
]
Buckets = Annotated[int, typer.Option(min=1, max=256, help="Position buckets over the window.")]
SampleSize = Annotated[int, typer.Option("--sample", min=1, help="Tokens whose vectors are kept, in every head.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, balanced over all devices, or auto.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")]


def capture_command(
    context: typer.Context,
    model: _Model = None,
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
    documents_per_shard: Annotated[
        int | None, typer.Option(min=1, help="Documents that are measured and saved together; 8, on a GPU more.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers with a replica of the model each; by default this process alone.")
    ] = None,
    engine: EngineOption = "local",
    ray_address: RayAddress = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads of each replica; 1 with --workers, otherwise all.")
    ] = None,
    shard: Annotated[
        str | None, typer.Option(help="Do one share of the documents, such as 2/8; qkscope merge puts them together.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Leave out documents that do not fit into memory, rather than stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on with what is in the folder, or begin again.")
    ] = True,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure every head of a transformers decoder at every token of some texts, on the unmodified model."""
    others = ("context", "config", "quiet", "verbose", "output")
    how = ("workers", "engine", "ray_address", "threads", "shard", "keep_going", "resume")
    said = {key: value for key, value in locals().items() if key not in (*others, "others", "how")}
    doing, given = ({key: one for key, one in said.items() if (key in how) is which} for which in (True, False))
    typed = {name for name in given if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    set_up_logging(quiet=quiet, verbose=verbose)
    with errors_as_lines("the same command again goes on where it stopped"):
        raise typer.Exit(_capture(settings(given, typed, config), output, doing))


def plan_command(
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


def _capture(given: dict[str, Any], output: Path, doing: dict[str, Any]) -> int:
    """Capture, and the exit code."""
    if not given["model"] or not given["texts"]:
        raise ConfigError("a capture needs a MODEL and --texts")
    need_torch()
    from qkscope.capture import models
    from qkscope.capture import run as running
    from qkscope.capture.shards import Share
    from qkscope.capture.texts import read_documents
    from qkscope.files.atomic import check_writable
    from qkscope.files.inprogress import check_capture_folder

    if not bars():
        models.load_quietly()
    check_writable(output)
    check_capture_folder(output)
    started = time.monotonic()
    share = Share.parse(doing["shard"]) if doing["shard"] else None
    if given["trust_remote_code"]:
        log.warning("running code that comes with %s, as asked", given["model"])
    chosen, options = _model_options(given), _capture_options(given)
    place, threads = _place(doing, models.resolved_device(chosen.device))
    places = [given["texts"]] if isinstance(given["texts"], str) else list(given["texts"])
    documents = read_documents(places, given["field"], given["max_docs"])
    log.info("%d documents; loading %s", len(documents), given["model"])
    ids = running.tokenize(documents, models.load_tokenizer(chosen))
    about = {"id": _label(given["model"]), "revision": given["revision"], "config_overrides": chosen.config_overrides}
    with documents_done() as on_progress:
        doing_it = running.ExecutionOptions(
            place,
            share,
            keep_going=doing["keep_going"],
            resume=doing["resume"],
            on_progress=on_progress,
        )
        source = replace(chosen, threads=threads)
        folder = running.capture(source, documents, ids, output, options, about, doing_it)
    log.info("done in %.0f s", time.monotonic() - started)
    return said_of(folder)


def said_of(folder: Path) -> int:
    """Say what is in a folder now, a run or a share of one; the exit code, by whether documents were left out."""
    from qkscope.capture.assemble import n_left_out
    from qkscope.files.runfolder import MANIFEST

    if (folder / MANIFEST).exists():
        log.info("wrote %s; next: qkscope analyze %s -o %s", folder, folder, folder / "tables")
    else:
        log.info("wrote a share to %s; when all are done: qkscope merge FOLDER … -o RUN", folder)
    missing = n_left_out(folder)
    if missing:
        log.error("%d documents were left out, for lack of memory", missing)
    return SOME_HEADS_FAILED if missing else 0


def _model_options(given: dict[str, Any]) -> ModelOptions:
    from qkscope.capture.models import ModelOptions

    overrides = given["config_overrides"]
    names = ("model", "revision", "tokenizer", "dtype", "device", "attn", "trust_remote_code")
    return ModelOptions(
        **{key: given[key] for key in names},
        config_overrides=_parsed(overrides) if isinstance(overrides, str) else overrides,
    )


def _capture_options(given: dict[str, Any]) -> CaptureOptions:
    from qkscope.capture.options import CaptureOptions
    from qkscope.capture.tokensampling import VectorSampling

    vectors = None
    if given["save_vectors"] is None and given["vector_heads"] is not None:
        raise ConfigError("--vector-heads chooses heads for --save-vectors, which was not given")
    if given["save_vectors"] is not None:
        vectors = VectorSampling(given["save_vectors"], given["sampler"], given["seed"], given["vector_heads"])
    layers, heads = (parse_indices(_text(given[key])) for key in ("layers", "heads"))
    names = ("window", "buckets", "skip_first", "batch", "sample", "seed", "full_attention_only", "pre_rope", "prefill")
    return CaptureOptions(
        **{key: given[key] for key in names},
        layers=None if layers is None else tuple(sorted(layers)),
        heads=None if heads is None else tuple(sorted(heads)),
        vectors=vectors,
        documents_per_shard=given["documents_per_shard"],
    )


def _place(doing: dict[str, Any], device: str) -> tuple[Place, int | None]:
    """Where it runs, and CPU threads of a replica: all of them in this process, one where there are workers."""
    from qkscope.engine import HERE, Place

    workers, threads = doing["workers"], doing["threads"]
    asked = Place(workers, doing["engine"], doing["ray_address"], gpus=1 if device.startswith("cuda") else 0)
    if asked.engine == "local" and workers in (None, 1):
        return HERE, threads or workers
    if device == "balanced":
        raise ConfigError("--device balanced spreads one replica over all devices; use it without --workers and Ray")
    return asked, threads or 1


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
