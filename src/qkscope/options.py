"""Options, each declared once, as a dataclass field with its help; command line, YAML and docs are built from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from qkscope.errors import ConfigError

_Options = TypeVar("_Options")
_Function = TypeVar("_Function", bound=Callable[..., Any])
MOST_TOKENS = 2**24
"""Tokens of a window, at most; the memory of the frequency search grows with it."""
N_BUCKETS = 16
"""Position buckets, unless an option says otherwise."""
MOST_INDICES = 10_000
"""Upper bound of layer and head numbers, exclusive."""


@dataclass(frozen=True)
class Option:
    """A dataclass field as an option on the command line and in a YAML file."""

    help: str
    name: str = ""
    """Name of the option, if it differs from that of the field."""
    least: int | None = None
    """Smallest value, or smallest number of characters."""
    most: float | None = None
    above: float | None = None
    """Value that it must exceed."""
    choices: tuple[str, ...] = ()
    """The only allowed values."""
    typed: Any = None
    """Type on the command line, if it differs from that of the field."""
    written: Any = None
    """Type in a YAML file, if it differs from that of the field."""
    parse: Callable[[Any], Any] | None = None
    """Conversion of the typed or written value into that of the field."""
    argument: bool = False
    """True if it is a positional argument on the command line."""
    optional: bool = False
    """True if it is None by default, although the field is never None."""
    in_config: bool = True
    """True if a YAML file may set it."""
    always: bool = False
    """True if a record includes it even at its default."""


class Indices:
    """A list of layers or heads in a YAML file, or text such as 0,4-7."""


def option(default: Any = MISSING, help: str = "", **about: Any) -> Any:  # noqa: A002  the word is typer's too
    """Return a dataclass field that is an option; ``about`` are the fields of ``Option``."""
    return field(default=default, metadata={"option": Option(help, **about)})


@dataclass(frozen=True)
class OptionSpec:
    """One option of some dataclasses: name, type, default and description."""

    name: str
    kind: Any
    default: Any
    """``MISSING`` if there is none."""
    about: Option


def option_specs(*classes: type) -> Iterator[OptionSpec]:
    """Every option of these dataclasses, in order."""
    for cls in classes:
        kinds = get_type_hints(cls)
        for field_, about in _options(cls):
            default = None if about.optional else field_.default
            yield OptionSpec(about.name or field_.name, kinds[field_.name], default, about)


def from_values(cls: type[_Options], values: Mapping[str, Any], **extra_fields: Any) -> _Options:
    """Return an instance from the values of its options by name; ``extra_fields`` are no options."""
    arguments = {}
    for field_, about in _options(cls):
        value = values[about.name or field_.name]
        arguments[field_.name] = value if about.parse is None or value is None else about.parse(value)
    return cls(**arguments, **extra_fields)


def defaults(*classes: type) -> dict[str, Any]:
    """The default of every option, by name; None where there is no default."""
    return {spec.name: None if spec.default is MISSING else spec.default for spec in option_specs(*classes)}


def out_of_range(instance: object) -> str | None:
    """Return an error message about the first option out of its range; None if all are within."""
    for field_, about in _options(type(instance)):
        value = getattr(instance, field_.name)
        if about.least is not None and type(value) is int and value < about.least:
            return f"expected {field_.name} of {about.least} or more, got {value}"
        if about.most is not None and type(value) is int and value > about.most:
            return f"expected {field_.name} of {about.most} or less, got {value}"
        if about.choices and value is not None and value not in about.choices:
            return f"unknown {field_.name} {value!r}; there are {', '.join(about.choices)}"
    return None


def record(*instances: object) -> dict[str, Any]:
    """Return the options of these instances that are not at their default, by name, for summary.json."""
    entries = {}
    for instance in instances:
        for field_, about in _options(type(instance)):
            value = getattr(instance, field_.name)
            if about.always or value != field_.default:
                entries[about.name or field_.name] = _plain(value)
    return entries


def from_record(cls: type[_Options], entries: Mapping[str, Any]) -> _Options:
    """Return an instance from a record of its options; missing options get their default."""
    recorded = {field_.name: about for field_, about in _options(cls) if (about.name or field_.name) in entries}
    values = {name: entries[about.name or name] for name, about in recorded.items()}
    return cls(**{name: v if v is None or (p := recorded[name].parse) is None else p(v) for name, v in values.items()})


def _plain(value: Any) -> Any:
    """Return a value as JSON stores it."""
    return sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value


def with_keywords(*classes: type) -> Callable[[_Function], _Function]:
    """Give a function that takes ``**options`` the options of these dataclasses as keywords."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own_parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        own_names = {parameter.name for parameter in own_parameters}
        option_parameters = [
            inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=spec.default, annotation=spec.kind)
            for spec in option_specs(*classes)
            if spec.name not in own_names
        ]
        option_names = {parameter.name for parameter in option_parameters}

        @wraps(function)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            unknown = [name for name in keywords if name not in own_names | option_names]
            if unknown:
                names = [*own_names, *(parameter.name for parameter in option_parameters)]
                close = get_close_matches(unknown[0], names, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"{function.__name__}() has no option {unknown[0]!r}{hint}")
            return function(*args, **keywords)

        wrapped.__signature__ = signature.replace(parameters=[*own_parameters, *option_parameters])  # type: ignore[attr-defined]
        return wrapped  # type: ignore[return-value]

    return decorate


def _options(cls: Any) -> Iterator[tuple[Field[Any], Option]]:
    return ((field_, field_.metadata["option"]) for field_ in fields(cls) if "option" in field_.metadata)


def parse_indices(text: Any) -> tuple[int, ...]:
    """Numbers and ranges, as text or as a collection: ``"0,4-7"`` → (0, 4, 5, 6, 7).

    >>> parse_indices("0,4-7"), parse_indices([3, 1])
    ((0, 4, 5, 6, 7), (1, 3))
    """
    joined = str(text) if isinstance(text, str | int) else ",".join(map(str, text))
    chosen: set[int] = set()
    for part in joined.split(","):
        first, _, last = part.strip().partition("-")
        if re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?", part.strip()) is None:
            raise ConfigError(f"expected numbers and ranges such as 0,4-7, got {joined!r}")
        low, high = int(first), int(last or first)
        if not low <= high < MOST_INDICES:
            raise ConfigError(f"expected ascending ranges that end below {MOST_INDICES}, got {part.strip()!r}")
        chosen |= set(range(low, high + 1))
    return tuple(sorted(chosen))
