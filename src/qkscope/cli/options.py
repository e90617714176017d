"""Options of commands, built from the dataclasses that declare them."""

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
        parameters = signature.parameters.values()
        declared = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in declared]
        added = [_parameter(spec) for spec in option_specs(*classes) if not only or spec.name in only]
        arguments = [p for p in added if isinstance(p.annotation.__metadata__[0], typer.models.ArgumentInfo)]
        options = [parameter for parameter in added if parameter not in arguments]
        context = [parameter for parameter in own if parameter.annotation is typer.Context]
        ordered = [*context, *arguments, *options, *(p for p in own if p not in context)]

        def wrapped(**values: Any) -> None:
            command(**values)

        wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
        wrapped.__signature__ = signature.replace(parameters=ordered)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered} | {"return": None}
        return wrapped

    return decorate


def _parameter(spec: OptionSpec) -> inspect.Parameter:
    """Return an option as a parameter of a function, as typer reads it."""
    about, kind = spec.about, spec.kind if spec.about.typed is None else spec.about.typed
    flag = "--" + spec.name.replace("_", "-")
    if about.argument:
        info: Any = typer.Argument(help=about.help)
    elif kind in (bool, bool | None):
        has_negation = spec.default or kind is not bool
        info = typer.Option(f"{flag}/--no-{flag[2:]}" if has_negation else flag, help=about.help)
    else:
        bounds: dict[str, Any] = {"min": about.least, "max": about.most} if kind in (int, int | None) else {}
        info = typer.Option(flag, help=about.help, **bounds)
    keyword_only, required = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    default = required if spec.default is MISSING else spec.default
    return inspect.Parameter(spec.name, keyword_only, default=default, annotation=Annotated[kind, info])
