"""The config's file in errors that are found after its parse, as in those of the parse: `FILE: field: ...`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lab.config.load import NOT_HASHED


@contextlib.contextmanager
def naming(path: str | Path, config: BaseModel) -> Iterator[None]:
    """Puts the config's file before an error's message that begins with a field of it, or with `expected`.

    Where it begins with a file that a field names, the field comes in between. Any other message is of something else,
    such as an option or a run's folder, and stays as it is.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        # An error of several misfits (`Misfits`) has a line for each.
        if "told" in vars(error):
            vars(error)["told"] = [_named(path, config, line) for line in vars(error)["told"]]
        if (named := _named(path, config, str(error))) != str(error):
            error.args = (named,)
        raise


def _named(path: str | Path, config: BaseModel, message: str) -> str:
    if message.startswith(f"{path}: "):
        return message
    first = re.match(r"(\w+)[.:]|expected ", message)
    if first and (first[1] is None or first[1] in type(config).model_fields):
        return f"{path}: {message}"
    field = _naming_field(config, message)
    return message if field is None else f"{path}: {field}: {message}"


def _naming_field(config: BaseModel, message: str) -> str | None:
    """The dotted name of the field whose text the message begins with; None if there is none.

    Fields that name the place of the results are left out: an error there is about a run.
    """
    values = config.model_dump(mode="json", exclude=set(NOT_HASHED))
    fits = (name for name, text in _texts(values) if text and re.match(rf"{re.escape(text)}[/:]", message))
    return next(fits, None)


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Each text in nested mappings and lists, with its dotted name."""
    if isinstance(value, str):
        yield name.removeprefix("."), value
    elif isinstance(value, Mapping | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts(inner, f"{name}.{key}")
