"""The strict base of every config block, and the one line that a person reads when a config is wrong.

Nothing is coerced and nothing is ignored: a misspelt key, a wrong type or a value out of range stops the run before it
starts, with the field's full dotted name, what came and what was expected.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails


class ConfigError(ValueError):
    """What the user gave cannot be a config; the message is one line for that user."""


class Strict(pydantic.BaseModel):
    """A config block: frozen, no unknown keys, no coercion."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


Model = TypeVar("Model", bound=pydantic.BaseModel)


def validate(model_cls: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """The raw mapping as a `model_cls`; ConfigError with one line, starting with `where`, if it does not fit.

    Validation is by pydantic's JSON rules: strict, but a list may become a tuple and an integer a float.
    """
    try:
        return model_cls.model_validate_json(json.dumps(raw, default=_plain))
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False)
        line = f"{where}: {describe(model_cls, details[0])}"
        raise ConfigError(line if len(details) == 1 else f"{line} (and {len(details) - 1} more)") from error
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def describe(model_cls: type[pydantic.BaseModel], error: ErrorDetails) -> str:
    """One pydantic error as `full.dotted.name: what is wrong`."""
    names, known = _locate(model_cls, error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"unknown key{nearest(names[-1], known)}"
    elif error["type"] == "missing":
        message = "missing, and it has no default"
    elif error["type"] not in ("value_error", "union_tag_invalid", "union_tag_not_found"):
        message = f"{message[0].lower()}{message[1:]}, got {_short(error['input'])}"
    return f"{'.'.join(names)}: {message}" if names else message


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the known name most like `name`, or all of them if none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; expected one of: {', '.join(known)}" if known else ""


def _locate(model_cls: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """The dotted name that the user wrote, and the keys known in its block; pydantic's own location holds union tags too."""
    names: list[str] = []
    known: list[str] = []
    kind: Any = model_cls
    for part in loc:
        members = _members(kind)
        if len(members) > 1:  # this part is a tag, not a key: it says which member of the union the rest is about
            kind = next((member for member in members if _is_tagged(member, part)), None)
            continue
        names.append(str(part))
        fields = _field_types(members[0])
        known = list(fields)
        elements = [arg for arg in typing.get_args(members[0]) if arg is not Ellipsis]
        kind = fields.get(str(part), elements[-1] if elements else None)
    return names, known


def _members(annotation: Any) -> list[Any]:
    """The alternatives of a type, without None and Annotated."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for arg in typing.get_args(annotation) if arg is not type(None) for m in _members(arg)]
    return [annotation]


def _is_tagged(member: Any, tag: int | str) -> bool:
    """Whether pydantic calls this member of a union by that tag: its class name, or a literal of one of its fields."""
    literals = [
        typing.get_args(kind) for kind in _field_types(member).values() if typing.get_origin(kind) is typing.Literal
    ]
    return getattr(member, "__name__", None) == tag or any(tag in values for values in literals)


def _field_types(block: Any) -> dict[str, Any]:
    """Field name to type of a pydantic model or a dataclass; empty for anything else."""
    if isinstance(block, type) and issubclass(block, pydantic.BaseModel):
        return {name: field.annotation for name, field in block.model_fields.items()}
    if isinstance(block, type) and dataclasses.is_dataclass(block):
        return typing.get_type_hints(block)
    return {}


def _plain(value: Any) -> str:
    """What YAML reads beyond JSON: a date is taken as its text, anything else is refused."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"a config holds text, numbers, lists and mappings only, got {type(value).__name__} {value!r}")


def _short(value: Any) -> str:
    """The value as JSON, cut to one readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
