"""Options, each declared once, as a dataclass field with its help; command line, YAML and docs are built from it."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral
from typing import Any, TypeVar, get_type_hints

from qkscope.errors import ConfigError, QkscopeError
from qkscope.headids import HeadId, Kind

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
    """Return an instance from the values of its options by name; ``extra_fields`` are no options.

    None stands for the default of an option that is never None.
    """
    arguments = {}
    for field_, about in _options(cls):
        value = values[about.name or field_.name]
        if value is None and about.optional:
            continue
        arguments[field_.name] = value if about.parse is None or value is None else about.parse(value)
    return cls(**arguments, **extra_fields)


def defaults(*classes: type) -> dict[str, Any]:
    """The default of every option, by name; None where there is no default."""
    return {spec.name: None if spec.default is MISSING else spec.default for spec in option_specs(*classes)}


def out_of_range(instance: object) -> str | None:
    """Return an error message about the first option out of its range; None if all are within."""
    kinds = get_type_hints(type(instance))
    for field_, about in _options(type(instance)):
        value = getattr(instance, field_.name)
        if kinds[field_.name] in (int, int | None) and not (value is None or is_whole(value)):
            return f"expected {field_.name} to be a whole number, got {value!r}"
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


_FLAG = re.compile(r"(qkscope [a-z]+(?: --[a-z-]+)+)|(?<![\w-])--(no-)?([a-z][a-z-]*)(?: \((\w+=\w+)\))?")


def without_flags(message: str) -> str:
    """Return a message with options named as in Python.

    >>> without_flags("use a smaller --skip-first, or --no-resume; qkscope analyze --columns lists all")
    'use a smaller skip_first, or resume=False; qkscope analyze --columns lists all'
    """

    def name(flag: re.Match[str]) -> str:
        command, negated, option_name, keyword = flag.groups()
        return command or keyword or option_name.replace("-", "_") + ("=False" if negated else "")

    return _FLAG.sub(name, message)


def in_python_terms(function: _Function) -> _Function:
    """Decorate a function of the Python interface: its errors name options as in Python, not as flags."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except QkscopeError as error:
            error.args = (without_flags(str(error)),)
            raise

    return call  # type: ignore[return-value]


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


def is_whole(value: object) -> bool:
    """Return True for whole numbers, also NumPy's.

    >>> is_whole(64), is_whole(64.0), is_whole("64"), is_whole(True)
    (True, False, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_path(value: object, name: str, kind: str = "folder") -> None:
    """Raise an error unless an argument is a path."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"expected {name} to be the path of a {kind}, got {value!r:.60}")


def check_options(value: object, name: str, kind: type) -> None:
    """Raise an error unless an argument is an object of the class of its options, or None."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"expected {name} as {kind.__name__}(…), got {value!r:.60}")


def head_pair(head: Any, kind: Kind = "q") -> tuple[int, int]:
    """Layer and number of a head given by its name or by these two.

    >>> head_pair("l04h01"), head_pair((4, 1)), head_pair(HeadId(4, 1, "q")), head_pair("l04h00k", "k")
    ((4, 1), (4, 1), (4, 1), (4, 0))
    """
    named = HeadId.match(head if head[-1:] in ("q", "k") else f"{head}{kind}") if isinstance(head, str) else head
    if (
        isinstance(named, tuple)
        and 2 <= len(named) <= 3
        and all(map(is_whole, named[:2]))
        and named[2:] in ((), (kind,))
    ):
        return int(named[0]), int(named[1])
    raise ConfigError(f"expected {'query' if kind == 'q' else 'key'} heads such as l04h01 or (4, 1), got {head!r}")


def head_pairs(heads: Any, kind: Kind = "q") -> list[tuple[int, int]]:
    """Layers and numbers of heads, each once, in order: one head, several, or names such as ``l00h03,l02h01``.

    >>> head_pairs("l00h03, l12h1"), head_pairs((4, 1)), head_pairs([(4, 1), "l04h02"])
    ([(0, 3), (12, 1)], [(4, 1)], [(4, 1), (4, 2)])
    """
    if isinstance(heads, str):
        heads = [name.strip() for name in heads.split(",")]
    elif isinstance(heads, tuple) and any(map(is_whole, heads)):
        heads = [heads]
    elif not isinstance(heads, Iterable):
        head_pair(heads, kind)
    return list(dict.fromkeys(head_pair(head, kind) for head in heads))


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
