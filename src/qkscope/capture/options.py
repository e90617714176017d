"""Options of a capture: the model, the texts, the measurement, and its execution.

Each option is declared once, here; the command line, YAML files and the table in docs/capture.md are built from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from qkscope.core.layermoments import UNDONE_COV
from qkscope.engine.target import IN_PROCESS, ExecutionTarget
from qkscope.errors import CaptureError, ConfigError
from qkscope.files.readers import read_text
from qkscope.options import MOST_TOKENS, N_BUCKETS, Indices, from_values, is_whole, option, out_of_range, parse_indices
from qkscope.progress import OnProgress


def need_torch(instead: str = "") -> None:
    """Raise an error with the install command if torch or transformers is missing; ``instead`` is an alternative."""
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            way_out = f"install it with: pip install torch, then pip install 'qkscope[capture]'{instead}"
            raise CaptureError(f"capturing needs {package}; {way_out}")


SHORTEST_WINDOW = 16
"""Tokens of a window, at least."""
Sampler = Literal["uniform", "log_uniform", "all"]


def parse_overrides(value: object) -> dict[str, Any]:
    """Return entries of a model's config, from YAML or JSON."""
    if isinstance(value, dict):
        return _with_powers_of_ten(value)
    import yaml

    try:
        entries = yaml.safe_load(str(value))
    except yaml.YAMLError as error:
        raise ConfigError(f"--config-overrides is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"--config-overrides: expected entries such as {{rope_theta: 1e6}}, got {value!r}")
    return _with_powers_of_ten(entries)


def _with_powers_of_ten(value: Any) -> Any:
    """Return numbers such as 1e6 as numbers, which YAML reads as text unless they have a point and a sign."""
    if isinstance(value, dict):
        return {key: _with_powers_of_ten(entry) for key, entry in value.items()}
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d*)?[eE]-?\d+", value) else value


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how it is loaded."""

    model: str = option(
        help="Hub id, local folder (also of a PEFT adapter) or GGUF file.",
        argument=True,
        typed=str | None,
        written=str | None,
        optional=True,
        least=1,
    )
    revision: str | None = option(None, "Branch, tag or commit of the model.")
    tokenizer: str | None = option(None, "Hub id or folder of the tokenizer, if it is not with the model.")
    dtype: str = option(
        "auto", "float32, bfloat16, float16 or auto (as stored on a GPU, float32 on a CPU).",
        choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    device: str = option("auto", "cpu, cuda, cuda:1 …, balanced over all devices, or auto (a GPU if there is one).")
    attn: str | None = option(None, "Attention implementation: sdpa, eager, flash_attention_2 …")
    config_overrides: dict[str, Any] | None = option(
        None, "YAML or JSON of model config entries to change, such as '{rope_theta: 200000}'.", typed=str | None,
        written=dict[str, Any] | str | None, parse=parse_overrides,
    )  # fmt: skip
    trust_remote_code: bool = option(False, "Run code that comes with the model. Only if you trust it.")
    threads: int | None = option(
        None, "CPU threads of each replica; 1 with --workers, otherwise all.", least=1, most=1024, in_config=False
    )


@dataclass(frozen=True)
class TextOptions:
    """The texts to read."""

    texts: tuple[str, ...] = option(
        help=".txt, .md, .json, .jsonl or .parquet files, folders (without .json), globs, hf:// URLs; may be repeated.",
        typed=list[str] | None, written=list[str] | str | None, optional=True,
        parse=lambda places: (places,) if isinstance(places, str) else tuple(places),
    )  # fmt: skip
    field: str = option(
        "text", "Field or column that holds the text, or messages of a chat, in .json, .jsonl and .parquet."
    )
    max_docs: int | None = option(None, "At most this many documents.", least=1)
    bos: bool | None = option(
        None, "Begin every document with the model's BOS token, or not; by default as the model's own files say."
    )


def parse_batch(size: object) -> int | None:
    """Return documents per forward pass; None for ``auto``.

    >>> parse_batch("8"), parse_batch("auto")
    (8, None)
    """
    text = str(size)
    if text == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ConfigError(f"expected --batch auto or a number of documents, got {text!r}")
    return int(text)


def passage_text(path: object) -> str:
    """Return the text of the file of ``--passage``."""
    try:
        text = read_text(Path(str(path)))
    except UnicodeDecodeError:
        raise ConfigError(f"--passage {path} is not UTF-8 text; convert it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--passage {path} cannot be read ({reason}); give a text file") from None
    if not text.strip():
        raise ConfigError(f"--passage {path} has no text; write a sentence or two into it")
    return text.strip()


@dataclass(frozen=True)
class VectorSampling:
    """The choice of vectors for a dataset."""

    rate: float = option(
        1.0, "Also write a dataset with this share of the vectors (0 to 1).", name="save_vectors", typed=float | None,
        written=float | None, optional=True, above=0, most=1,
    )  # fmt: skip
    sampler: Sampler = option(
        "uniform", "uniform, log_uniform (chance falls as 1/(position + 1)) or all, for --save-vectors.", typed=str,
        choices=("uniform", "log_uniform", "all"),
    )  # fmt: skip
    seed: int = 0
    """Seed of the choice of tokens and heads: the seed of the capture."""
    heads: int | None = option(
        None, "Query heads drawn for --save-vectors, with the key heads they read.", name="vector_heads", least=1
    )

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise CaptureError(f"expected a rate above 0 and up to 1, got {self.rate}")
        wrong = out_of_range(self)
        if wrong:
            raise CaptureError(wrong)


@dataclass(frozen=True)
class CaptureOptions:
    """The measurement; all of these options but ``compare_at`` are part of the run's identity."""

    window: int | None = option(
        None,
        "Tokens per document; at most and by default the longest, if it fits.",
        least=SHORTEST_WINDOW,
        most=MOST_TOKENS,
    )
    compare_at: tuple[int, ...] = option(
        (), "Also write the run at this shorter window, as RUN-at-N, from the same passes; may be repeated.",
        typed=list[int] | None, written=list[int] | int | None, optional=True,
        parse=lambda windows: (windows,) if isinstance(windows, int) else tuple(windows),
    )  # fmt: skip
    buckets: int = option(N_BUCKETS, "Position buckets over the window.", least=1, most=256)
    skip_first: int = option(
        4, "Positions at the start of a document that enter no statistic: attention sinks.", least=0
    )
    batch: int | None = option(
        None, "Documents per forward pass; auto, the default: as many short ones as a pass of a long one has tokens.",
        typed=str | None, written=int | str | None, parse=lambda size: parse_batch(size),
    )  # fmt: skip
    reach_queries: int = option(
        8, "Queries per document whose attention to all their keys is summed by distance; 0: none.", least=0, most=4096
    )
    sample: int = option(2048, "Tokens whose vectors are kept, the same ones in every head.", least=1)
    seed: int = option(0, "Seed of the sample.")
    token_text: bool = option(True, "Keep the sampled tokens as text, beside their vectors.")
    layers: tuple[int, ...] | None = option(
        None, "Only these layers, such as 0,4-7.", typed=str | None, written=Indices,
        parse=parse_indices,
    )  # fmt: skip
    heads: tuple[int, ...] | None = option(
        None, "Only these query heads, such as 0,4-7, and the key heads they read.", typed=str | None,
        written=Indices, parse=parse_indices,
    )  # fmt: skip
    passage: str | None = option(
        None, "Text file whose first 128 tokens the explorer shows score by score, in place of a bundled text.",
        parse=lambda path: passage_text(path),
    )  # fmt: skip
    full_attention_only: bool = option(False, "Leave out layers with a sliding window.")
    pre_rope: bool = option(False, "Measure queries and keys before the rotation instead of after.")
    prefill: int | None = option(
        None, "Tokens per step through a cache, in whole buckets; 0: one pass; by default only where a mask is large.",
        least=0,
    )  # fmt: skip
    keep: str | None = option(
        None, "Also keep a sum: undone-cov, the covariance of queries before the rotation, for exports.",
        choices=(UNDONE_COV,),
    )  # fmt: skip
    vectors: VectorSampling | None = None
    """Options of an additional dataset of vectors; None: no such dataset."""
    documents_per_shard: int | None = option(
        None, "Documents that are measured, saved and, after a kill, repeated together; 8, on a GPU more.", least=1
    )

    def __post_init__(self) -> None:
        wrong = out_of_range(self)
        if wrong:
            raise CaptureError(wrong)
        if not all(map(is_whole, self.compare_at)):
            raise CaptureError(f"expected --compare-at of whole numbers, got {', '.join(map(repr, self.compare_at))}")
        object.__setattr__(self, "compare_at", tuple(sorted({*self.compare_at})))
        if self.compare_at and self.compare_at[0] < SHORTEST_WINDOW:
            raise CaptureError(f"expected --compare-at of {SHORTEST_WINDOW} or more, got {self.compare_at[0]}")
        if self.passage is not None and (not isinstance(self.passage, str) or not self.passage.strip()):
            raise ConfigError(f"expected passage to be a text of two words or more, got {self.passage!r:.60}")
        if self.passage is not None and self.pre_rope:
            raise CaptureError("--passage shows scores after the rotation, which --pre-rope never sees; leave one out")
        if self.keep == UNDONE_COV and self.pre_rope:
            raise CaptureError(f"--keep {UNDONE_COV} undoes the rotation, which --pre-rope never sees; leave one out")


@dataclass(frozen=True)
class Share:
    """The share of one of several jobs, numbered from 1."""

    job: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.job <= self.of:
            raise CaptureError(f"expected a share such as 2/8, the second of eight jobs; got '{self.job}/{self.of}'")

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse a share such as ``2/8``.

        >>> Share.parse("2/8")
        Share(job=2, of=8)
        """
        parts = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if parts is None:
            raise CaptureError(f"expected a share such as 2/8, the second of eight jobs; got {text!r}")
        return cls(int(parts[1]), int(parts[2]))

    def shards(self, in_all: int) -> range:
        """Return the shards of this job: consecutive, as evenly distributed as possible."""
        if self.of > in_all:
            advice = "one job" if in_all == 1 else f"at most {in_all} jobs"
            shards = "1 shard" if in_all == 1 else f"{in_all} shards"
            raise CaptureError(f"only {shards} for {self.of} jobs; use {advice}, or a smaller --documents-per-shard")
        return range((self.job - 1) * in_all // self.of, self.job * in_all // self.of)


@dataclass(frozen=True)
class ExecutionOptions:
    """The execution of a capture; these options change no byte of the run, except which documents are left out."""

    workers: int | None = option(
        None, "Workers with a replica of the model each; by default this process alone.", least=1, in_config=False
    )
    engine: str = option("local", "local: processes of this machine; ray: actors of Ray.", in_config=False)
    ray_address: str | None = option(
        None, "Ray cluster, such as auto or ray://head:10001; by default one on this machine.", in_config=False
    )
    share: Share | None = option(
        None, "Do one job's share of the documents, such as 2/8; qkscope merge puts the shares together.",
        name="shard", typed=str | None, parse=lambda text: Share.parse(text) if text else None, in_config=False,
    )  # fmt: skip
    keep_going: bool = option(
        False, "Leave out documents that do not fit into memory, rather than stop.", in_config=False
    )
    resume: bool = option(True, "Resume what is in the folder, or begin again.", in_config=False)
    on_progress: OnProgress | None = None
    """A callback that takes the tokens measured, all tokens, and a note on documents."""
    on_writing: Callable[[int, int], None] | None = None
    """A callback that takes the layers written and all layers, while the finished run is written."""

    @property
    def alone(self) -> bool:
        """True if this process does the work itself."""
        return self.engine == "local" and self.workers in (None, 1)

    def target(self, device: str) -> ExecutionTarget:
        """Return where the capture runs, given the device of a replica."""
        gpus = 1 if device.startswith("cuda") else 0
        target = ExecutionTarget(self.workers, self.engine, self.ray_address, gpus=gpus)  # type: ignore[arg-type]
        if self.alone:
            return IN_PROCESS
        if device == "balanced":
            raise ConfigError(
                "--device balanced spreads one replica over all devices; use it without --workers and Ray"
            )
        return target

    def threads(self, requested: int | None) -> int | None:
        """Return the CPU threads of a replica: all in this process (None), one with workers."""
        return requested or (self.workers if self.alone else 1)


CONFIG_CLASSES = (ModelOptions, TextOptions, CaptureOptions, VectorSampling)
"""Dataclasses whose options a YAML file may set."""


def load_capture_config(path: Path) -> dict[str, Any]:
    """Read the options of a capture from a YAML file, by name; errors name the file, the key and the nearest one."""
    from qkscope.config import load_options

    return load_options(path, "CaptureConfig", *CONFIG_CLASSES)


def capture_options(values: dict[str, Any]) -> CaptureOptions:
    """Return the options of the measurement, from the values of all options."""
    if values["save_vectors"] is None and values["vector_heads"] is not None:
        raise ConfigError("--vector-heads chooses heads for --save-vectors, which was not given")
    vectors = None if values["save_vectors"] is None else from_values(VectorSampling, values, seed=values["seed"])
    return from_values(CaptureOptions, values, vectors=vectors)
