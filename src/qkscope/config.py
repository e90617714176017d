"""YAML files of studies and of options that dataclasses declare; errors name the key and the nearest valid one."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from qkscope.errors import ConfigError
from qkscope.options import Indices, Option, OptionSpec, option_specs, parse_indices, without_flags

_Index = Annotated[int, Field(ge=0, lt=10_000, strict=True)]
Count = Annotated[int, Field(gt=0, lt=2**31, strict=True)]


class StrictModel(BaseModel):
    """A section of a YAML file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _text(path: object) -> object:
    return str(path) if isinstance(path, Path) else path


class StudyRunConfig(StrictModel):
    """One run of a study, or all models of a results folder."""

    path: Annotated[str, BeforeValidator(_text), Field(min_length=1)]
    """Results folder, captured run or dataset; relative to the study file."""
    revision: str | None = None
    """Branch, tag or commit, for a dataset on the Hub."""
    model: str | None = None
    """One model of a results folder; by default all models."""
    label: Annotated[str, Field(min_length=1)] | None = None
    """Label in tables and figures."""
    family: str | None = None
    """Family within which runs are compared."""
    phase: str | None = None
    """Part of training; makes the run a checkpoint."""
    step: float | None = None
    """Training step; makes the run a checkpoint."""
    window: Count | None = None
    """Context length, where the tables do not say."""
    nope_layers: list[_Index] | None = None
    """Layers without rotary encoding, where the tables do not say."""
    also: list[Annotated[str, Field(min_length=1)]] = []
    """Captures of the same weights at other windows; a PATH-at-N next to the path is found by itself."""
    weights: str | None = None
    """Hub id, folder or GGUF file of the model, for ``qkscope study capture``; relative to the study file."""


class StudyConfig(StrictModel):
    """A study: runs in order."""

    title: str = ""
    compare_at: Count | None = None
    """Window at which runs are compared; by default the smallest among them."""
    runs: Annotated[list[StudyRunConfig], Field(min_length=1)]


def load_options(path: Path, name: str, *classes: type) -> dict[str, Any]:
    """Read the options that these dataclasses declare from a YAML file, by name, with the same checks."""
    return load_yaml(path, options_model(name, *classes)).model_dump()


def options_model(name: str, *classes: type, base: type[BaseModel] = StrictModel) -> type[Any]:
    """Return the pydantic model whose keys are the options that these dataclasses declare."""
    entries = {spec.name: _entry(spec) for spec in option_specs(*classes) if spec.about.in_config}
    model: type[Any] = create_model(name, __base__=base, **entries)  # type: ignore[call-overload]
    return model


def _entry(spec: OptionSpec) -> tuple[Any, Any]:
    """The type with bounds and the default of an option, as pydantic reads them."""
    about, kind = spec.about, spec.kind if spec.about.written is None else spec.about.written
    checked = _checked(kind, about)
    if about.parse is not None and kind is not Indices:
        checked = Annotated[checked, AfterValidator(partial(_parsable, about.parse))]
    return checked, ... if spec.default is MISSING else spec.default


def _parsable(parse: Callable[[Any], object], value: object) -> object:
    """Return the value, which the option's ``parse`` must accept."""
    try:
        if value is not None:
            parse(value)
    except ConfigError as error:
        raise ValueError(without_flags(str(error))) from None
    return value


def _checked(kind: Any, about: Option) -> Any:
    """A type with the bounds of an option."""
    if about.choices:
        return Literal[about.choices]
    if kind is Indices:
        return Annotated[list[_Index] | None, BeforeValidator(_indices)]
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


def _indices(value: object) -> object:
    """Return text such as 0,4-7 as a list of numbers."""
    try:
        return list(parse_indices(value)) if isinstance(value, str) else value
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _most(about: Option) -> float | None:
    """The largest value of a whole number: counts stay below 2³¹ unless they say otherwise."""
    return 2**31 - 1 if about.most is None and about.least else about.most


def load_study_config(path: Path) -> StudyConfig:
    """Read a study file, with the same checks."""
    return load_yaml(path, StudyConfig)


_Model = TypeVar("_Model", bound=BaseModel)
MOST_CONFIG = 2**24
"""Bytes of a config or study file, at most."""


def load_yaml(path: Path, model: type[_Model]) -> _Model:
    """Read a YAML file whose keys are those of the model."""
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
        raise ConfigError(f"{path}: {'; '.join(_explain(item, model) for item in error.errors())}") from None


def _explain(error: Any, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg']}"
    *parents, key = error["loc"]
    valid = _keys_at(model, parents)
    close = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"valid keys are {', '.join(valid)}"
    return f"unknown key {where!r}; {hint}"


def _keys_at(level: type[BaseModel], parents: list[str | int]) -> list[str]:
    section: Any = level
    for part in parents:
        section = get_args(section)[0] if isinstance(part, int) else section.model_fields[part].annotation
    return list(section.model_fields)
