"""Options, each written once: a field of a dataclass with its help, from which command line, YAML and docs follow."""

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
"""Layers and heads are numbered below this."""


@dataclass(frozen=True)
class Option:
    """What a field of a dataclass is on the command line and in a YAML file."""

    help: str
    name: str = ""
    """Its name there, where it is not that of the field."""
    least: int | None = None
    """Its smallest value, or the smallest number of characters."""
    most: float | None = None
    above: float | None = None
    """What it has to exceed."""
    choices: tuple[str, ...] = ()
    """The only values it may have."""
    typed: Any = None
    """Its type on the command line, where it is not that of the field."""
    written: Any = None
    """Its type in a YAML file, where it is not that of the field."""
    parse: Callable[[Any], Any] | None = None
    """From what was typed or written to what the field holds."""
    argument: bool = False
    """Whether it stands on the command line without its name."""
    optional: bool = False
    """Whether it is None where nothing is said, although the field is never None."""
    in_config: bool = True
    """Whether a YAML file may hold it."""
    always: bool = False
    """Whether a record has it even at its default."""


class Indices:
    """In a YAML file: a list of layers or heads, or text such as 0,4-7."""


def option(default: Any = MISSING, help: str = "", **about: Any) -> Any:  # noqa: A002  the word is typer's too
    """A field of a dataclass that is an option; ``about`` as in ``Option``."""
    return field(default=default, metadata={"option": Option(help, **about)})


@dataclass(frozen=True)
class OptionSpec:
    """One option of some dataclasses: its name, its type, its default, and what it is."""

    name: str
    kind: Any
    default: Any
    """``MISSING`` where there is none."""
    about: Option


def option_specs(*classes: type) -> Iterator[OptionSpec]:
    """Every option of these dataclasses, in order."""
    for cls in classes:
        kinds = get_type_hints(cls)
        for one, about in _options(cls):
            default = None if about.optional else one.default
            yield OptionSpec(about.name or one.name, kinds[one.name], default, about)


def from_values(cls: type[_Options], values: Mapping[str, Any], **others: Any) -> _Options:
    """An instance from the values of its options by name; ``others`` are fields that are no options."""
    found = {}
    for one, about in _options(cls):
        value = values[about.name or one.name]
        found[one.name] = value if about.parse is None or value is None else about.parse(value)
    return cls(**found, **others)


def defaults(*classes: type) -> dict[str, Any]:
    """The value of every option of which nothing is said, by name; None where there is no default."""
    return {one.name: None if one.default is MISSING else one.default for one in option_specs(*classes)}


def out_of_range(instance: object) -> str | None:
    """What is wrong with the first option that is smaller or larger than it may be; None if nothing is."""
    for one, about in _options(type(instance)):
        value = getattr(instance, one.name)
        if about.least is not None and type(value) is int and value < about.least:
            return f"expected {one.name} of {about.least} or more, got {value}"
        if about.most is not None and type(value) is int and value > about.most:
            return f"expected {one.name} of {about.most} or less, got {value}"
        if about.choices and value is not None and value not in about.choices:
            return f"unknown {one.name} {value!r}; there are {', '.join(about.choices)}"
    return None


def record(*instances: object) -> dict[str, Any]:
    """Return the options of these instances for summary.json, by name: those that are not at their default."""
    entries = {}
    for instance in instances:
        for field_, about in _options(type(instance)):
            value = getattr(instance, field_.name)
            if about.always or value != field_.default:
                entries[about.name or field_.name] = _plain(value)
    return entries


def from_record(cls: type[_Options], entries: Mapping[str, Any]) -> _Options:
    """Return an instance from a record of its options; those that it lacks are at their default."""
    known = {field_.name: about for field_, about in _options(cls) if (about.name or field_.name) in entries}
    values = {name: entries[about.name or name] for name, about in known.items()}
    return cls(**{name: v if v is None or (p := known[name].parse) is None else p(v) for name, v in values.items()})


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return sorted(value) if isinstance(value, frozenset) else list(value) if isinstance(value, tuple) else value


def with_keywords(*classes: type) -> Callable[[_Function], _Function]:
    """Give a function that takes ``**options`` the options of these dataclasses as keywords."""

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {one.name for one in own}
        more = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.kind)
            for one in option_specs(*classes)
            if one.name not in taken
        ]

        @wraps(function)
        def wrapped(*args: Any, **keywords: Any) -> Any:
            unknown = [name for name in keywords if name not in taken and name not in {one.name for one in more}]
            if unknown:
                near = get_close_matches(unknown[0], [*taken, *(one.name for one in more)], 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise TypeError(f"{function.__name__}() has no option {unknown[0]!r}{hint}")
            return function(*args, **keywords)

        wrapped.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return wrapped  # type: ignore[return-value]

    return decorate


def _options(cls: Any) -> Iterator[tuple[Field[Any], Option]]:
    return ((one, one.metadata["option"]) for one in fields(cls) if "option" in one.metadata)


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
