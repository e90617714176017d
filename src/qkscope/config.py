"""The study's YAML files: one model, where its vectors are, what to compute, where results go."""

from __future__ import annotations

import difflib
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from qkscope.errors import ConfigError
from qkscope.options import Indices, Listed, Option, listed

_Index = Annotated[int, Field(ge=0, lt=10_000, strict=True)]
Count = Annotated[int, Field(gt=0, lt=2**31, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Strict):
    """Which vectors are read."""

    dataset: Annotated[str, Field(min_length=1)]
    """Hub id, ``hf://`` URL or local folder."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    layers: list[_Index] | None = None
    """Only these layers."""
    heads: list[_Index] | None = None
    """Only these query heads of each layer."""
    max_samples: Annotated[int, Field(ge=2, lt=2**31, strict=True)] | None = None
    """At most this many rows of each head."""
    skip_first: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    """Positions at the start of every document that are left out: attention sinks."""
    sample_heads: Count | None = None
    """Only this many query heads, drawn at random."""
    seed: int = 0
    """Seed of both choices."""
    q_per_kv: Count | None = None
    """Query heads per key head; set only where the heads present do not tell."""
    window: Count | None = None
    """Context length of the capture; by default each head's last position + 1."""
    rope: dict[str, Any] | None = None
    """Rotary encoding, such as {theta: 500000}; by default what the dataset's card says."""
    buckets: Annotated[int, Field(ge=1, le=256, strict=True)] | None = None
    """Position buckets of plasticity."""


class PcaConfig(_Strict):
    """Choices of the combined PCA."""

    n_components: Count = 10
    high: Annotated[float, Field(ge=0, le=1)] = 0.7
    low: Annotated[float, Field(ge=0, le=1)] = 0.3

    @model_validator(mode="after")
    def _ordered(self) -> PcaConfig:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) must not exceed high ({self.high})")
        return self


class RotationConfig(_Strict):
    """Choices of the planar rotation model."""

    centering: Literal["pooled", "within"] = "pooled"
    pairing: Literal["independent", "token"] = "independent"


class OutputConfig(_Strict):
    """Where tables go."""

    results_dir: Path = Path("results")


class Config(_Strict):
    """One model's analysis."""

    model: Annotated[str, Field(min_length=1)]
    """Label of the model in tables."""
    family: str = ""
    """Label of its family."""
    data: DataConfig
    pca: PcaConfig = PcaConfig()
    rotation: RotationConfig = RotationConfig()
    output: OutputConfig = OutputConfig()
    workers: Count | Literal["auto"] = "auto"


class StudyRunConfig(_Strict):
    """One run of a study, or all models of a results folder."""

    path: Annotated[str, Field(min_length=1)]
    """Results folder, captured run or dataset; relative to the study file."""
    revision: str | None = None
    """Branch, tag or commit, for a dataset on the Hub."""
    model: str | None = None
    """Which model of a results folder; all of them unless said."""
    label: Annotated[str, Field(min_length=1)] | None = None
    """As it is shown."""
    family: str | None = None
    """Family it is compared within."""
    phase: str | None = None
    """Part of training; makes the run a checkpoint."""
    step: float | None = None
    """Training step; makes the run a checkpoint."""
    window: Count | None = None
    """Context length, where the tables do not say."""
    nope_layers: list[_Index] | None = None
    """Layers without rotary encoding, where the tables do not say."""
    also: list[Annotated[str, Field(min_length=1)]] = []
    """The same weights captured at other windows; PATH-at-N beside the path is found without being named."""
    weights: str | None = None
    """Hub id, folder or GGUF file of the model, for ``qkscope study capture``; relative to the study file."""


class StudyConfig(_Strict):
    """A study: runs in order."""

    title: str = ""
    compare_at: Count | None = None
    """Window at which runs are compared; by default the smallest among them."""
    runs: Annotated[list[StudyRunConfig], Field(min_length=1)]


def load_configs(paths: list[Path]) -> list[Config]:
    """Read config files; a folder stands for every ``*.yaml`` in it, by name."""
    files: list[Path] = []
    for given in paths:
        path = _as_spelt(given)
        found = sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"{path} holds no .yaml file")
        files += found
    return [load_config(file) for file in files]


def load_config(path: Path) -> Config:
    """Read one config file; errors name the file, the key and, for a misspelt key, the nearest valid one."""
    return _load(path, Config)


def load_options(path: Path, name: str, *classes: type) -> dict[str, Any]:
    """Read the options that these dataclasses declare, under their own names, with the same care."""
    model: type[BaseModel] = create_model(  # type: ignore[call-overload]
        name, __base__=_Strict, **{one.name: _entry(one) for one in listed(*classes) if one.about.in_config}
    )
    return _load(path, model).model_dump()


def _entry(one: Listed) -> tuple[Any, Any]:
    """An option as pydantic reads it: type and bounds, default."""
    about, kind = one.about, one.kind if one.about.written is None else one.about.written
    return _checked(kind, about), ... if one.default is MISSING else one.default


def _checked(kind: Any, about: Option) -> Any:
    """A type with the bounds of an option."""
    if about.choices:
        return Literal[about.choices]
    if kind is Indices:
        return list[_Index] | str | None
    if kind in (bool, bool | None):
        strict = Annotated[bool, Field(strict=True)]
        return strict if kind is bool else strict | None
    checked = {
        int: Annotated[int, Field(ge=about.least, le=_most(about), strict=True)],
        float: Annotated[float, Field(gt=about.above, le=about.most)],
        str: Annotated[str, Field(min_length=about.least)],
    }
    for plain, bounded in checked.items():
        if kind in (plain, plain | None):
            return bounded if kind is plain else bounded | None
    return kind


def _most(about: Option) -> float | None:
    """The largest value of a whole number: counts stay below 2³¹ unless they say otherwise."""
    return 2**31 - 1 if about.most is None and about.least else about.most


def load_study_config(path: Path) -> StudyConfig:
    """Read a study file, with the same care."""
    return _load(path, StudyConfig)


_Model = TypeVar("_Model", bound=BaseModel)
MOST_CONFIG = 2**24
"""Bytes of a config or study file, at most."""


def _load(path: Path, model: type[_Model]) -> _Model:
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")  # a pipe would never end
        if path.stat().st_size > MOST_CONFIG:
            raise OSError(f"it has more than {MOST_CONFIG:,} bytes")
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected keys such as 'model', got {type(raw).__name__}")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(_explain(one, model) for one in error.errors())}") from None


def _explain(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}"
    *parents, key = error["loc"]
    valid = _keys_at(model, parents)
    near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(valid)}"
    return f"unknown key {where!r}; {hint}"


def _keys_at(level: type[BaseModel], parents: list[str | int]) -> list[str]:
    found: Any = level
    for part in parents:
        found = get_args(found)[0] if isinstance(part, int) else found.model_fields[part].annotation
    return list(found.model_fields)


def _as_spelt(path: Path) -> Path:
    """The published notes spell configs/attention-plasticity with a hyphen and with an underscore: take either."""
    if path.exists():
        return path
    for old, new in (("_", "-"), ("-", "_")):
        other = Path(*(part.replace(old, new) if part != path.name else part for part in path.parts))
        if other.exists():
            return other
    raise ConfigError(f"{path} does not exist")
