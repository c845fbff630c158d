"""The command line's own mistakes, told as those of a config are: the option, the expected value, and what came."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

EXPECTED = {"int": "an integer", "float": "a number"}
"""By the first part of pydantic's type of an error."""
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
ALIKE = 0.7
"""The Ratcliff-Obershelp similarity from which one option may be meant for another: a field may be meant, too."""


class Commands(TyperGroup):
    """The group of all commands; a word that is none of them is refused with their names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        from lab.strict import ConfigError, did_you_mean

        if args[0] not in self.commands and not args[0].startswith("-"):
            raise ConfigError(f"unknown command '{args[0]}'{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command that takes no option for the value of another one, and recognises its own options if misspelt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from lab.strict import ConfigError

        rest = super().parse_args(ctx, args)
        for option in _options(self):
            given = ctx.params.get(option.name)
            for value in given if isinstance(given, list | tuple) else [given]:
                # Click takes whatever word is next: `--out --json` would write a file of that name.
                if isinstance(value, str | Path) and str(value).startswith("--"):
                    raise ConfigError(f"{option.opts[0]}: expected a value after it, got {value}")
        return rest

    def invoke(self, ctx: Any) -> Any:
        from lab.strict import ConfigError

        try:
            return super().invoke(ctx)
        except ConfigError as error:
            # As a command takes the fields of its config as options, a misspelt one of its own counts as a field.
            for word in (word.partition("=")[0] for word in ctx.args if word.startswith("--")):
                hint = _hint(word, self)
                if hint and f": {word[2:]}: unknown key" in str(error):
                    raise ConfigError(f"{word}: unknown option{hint}") from error
                if hint and str(error).startswith(f"{word}: expected a value"):
                    raise ConfigError(f"{error}{hint}") from error
            raise


def line(error: Any, words: Sequence[str]) -> str:
    """The message of a mistake, a TyperException, in these words."""
    option, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if parameter is not None:
        name = parameter.get_error_hint().strip("'")
        return _missing(parameter, name) if error.__cause__ is None else f"{name}: {_wrong(error.__cause__)}"
    if hasattr(error, "possibilities"):
        command = error.ctx.command
        return f"{option}: unknown option{_hint(str(option), command)} (expected one of: {', '.join(_names(command))})"
    if option is not None:
        given = next((word.partition("=")[2] for word in words if word.startswith(f"{option}=")), None)
        wanted = "a value after it, got nothing" if given is None else f"no value, got {_typed(given)}"
        return f"{option}: expected {wanted}"
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", error.message)
    return f"expected no further argument, got {extra[1]}" if extra else error.format_message()


def _missing(parameter: Any, name: str) -> str:
    choices = parameter.type_descriptor.choices
    if choices is not None:
        return f"{name}: expected one of {_listed(choices)}, got nothing"
    words = parameter.help.removesuffix(".")
    return f"missing {name}: {words if words[1:2].isupper() else words[0].lower() + words[1:]}"


def _wrong(cause: Any) -> str:
    first = cause.errors()[0]
    text, _, choices = first["msg"].partition(" is not one of ")
    kind, context, got = first["type"].split("_")[0], first.get("ctx", {}), _typed(str(first["input"]))
    bound = next((f"{words} {context[name]:g}" for name, words in BOUNDS.items() if name in context), None)
    if choices:
        return f"expected one of {choices.rstrip('.').replace(chr(39), '')}, got {got}"
    return f"expected {bound or EXPECTED.get(kind, text)}, got {got}"


def _typed(value: str) -> str:
    """The value as it is typed in a shell, cut to one readable length."""
    text = shlex.quote(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(choices: Iterable[Any]) -> str:
    return ", ".join(str(getattr(choice, "value", choice)) for choice in choices)


def _hint(word: str, command: Any) -> str:
    """A clause with the command's option that is spelt almost like this one, if there is one."""
    found = difflib.get_close_matches(word.lstrip("-"), [name.lstrip("-") for name in _names(command)], 1, ALIKE)
    return f"; did you mean '--{found[0]}'?" if found else ""


def _options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _names(command: Any) -> list[str]:
    """The command's own options, as they are typed."""
    return [*(name for option in _options(command) for name in (*option.opts, *option.secondary_opts)), "--help"]
