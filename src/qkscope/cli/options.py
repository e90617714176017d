"""Options of commands from the dataclasses that declare them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING
from typing import Annotated, Any

import typer

from qkscope.options import OptionSpec, option_specs


def with_options(*classes: type, only: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes ``**values`` the options of these dataclasses, or some of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        given = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in given]
        more = [_parameter(one) for one in option_specs(*classes) if not only or one.name in only]
        arguments = [one for one in more if isinstance(one.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        options = [one for one in more if one not in arguments]
        first = [one for one in own if one.annotation is typer.Context]
        parameters = [*first, *arguments, *options, *(one for one in own if one not in first)]

        def wrapped(**values: Any) -> None:
            command(**values)

        wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
        wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        return wrapped

    return decorate


def _parameter(one: OptionSpec) -> inspect.Parameter:
    """One option as a parameter of a function, as typer reads it."""
    about, kind = one.about, one.kind if one.about.typed is None else one.about.typed
    spelt = "--" + one.name.replace("_", "-")
    if about.argument:
        info: Any = typer.Argument(help=about.help)
    elif kind in (bool, bool | None):
        both = one.default or kind is not bool
        info = typer.Option(f"{spelt}/--no-{spelt[2:]}" if both else spelt, help=about.help)
    else:
        bounds: dict[str, Any] = {"min": about.least, "max": about.most} if kind in (int, int | None) else {}
        info = typer.Option(spelt, help=about.help, **bounds)
    kind_of, required = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    default = required if one.default is MISSING else one.default
    return inspect.Parameter(one.name, kind_of, default=default, annotation=Annotated[kind, info])
