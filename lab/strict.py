"""The strict base of every config block, and the one-line error for a wrong config.

Nothing is coerced and nothing is ignored: a misspelt key, a wrong type or a value out of range stops the run before it
starts, with the field's full dotted name, the expected value and the one found.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

import pydantic
from pydantic_core import ErrorDetails

from theory.names import did_you_mean as hint_at


class ConfigError(ValueError):
    """Input that cannot be a config; the message is one line for the user."""


class Strict(pydantic.BaseModel):
    """A config block: frozen, no unknown keys, no coercion, finite numbers; fields that take infinity say so."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=pydantic.BaseModel)


def kinds_in(package: str, base: type[Model]) -> Iterator[type[Model]]:
    """The blocks of that base with a `kind` of their own which the files of a package define, file by file by name."""
    for file in sorted(file.name for file in pkgutil.iter_modules(import_module(package).__path__)):
        module = import_module(f"{package}.{file}")
        for value in vars(module).values():
            # A module's names include those that it imports, which another file defines.
            if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, base):
                kind = value.model_fields.get("kind")
                # A base of several kinds has no field of that name, or one without a default.
                if kind is not None and not kind.is_required():
                    yield value


def validate(model_cls: type[Model], raw: Mapping[str, Any], where: str) -> Model:
    """The raw mapping as a `model_cls`; ConfigError with one line, starting with `where`, if it does not fit.

    Validation is by pydantic's JSON rules: strict, but a list may become a tuple and an integer a float.
    """
    # By way of JSON text: on Python values, pydantic's strict mode refuses a list for a tuple.
    try:
        text = json.dumps(raw, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}") from error
    return validate_json(model_cls, text, where)


def validate_json(model_cls: type[Model], text: str | bytes, where: str) -> Model:
    """As `validate`, from the text of a JSON object."""
    try:
        return model_cls.model_validate_json(text)
    except pydantic.ValidationError as error:
        # Unknown keys first: where a required key is misspelt, the misspelling says more than the missing key.
        details = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        line = f"{where}: {describe(model_cls, details[0])}"
        raise ConfigError(line if len(details) == 1 else f"{line} (and {len(details) - 1} more)") from error


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError also where its lists and objects are nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def describe(model_cls: type[pydantic.BaseModel], error: ErrorDetails) -> str:
    """One pydantic error as `full.dotted.name: what is wrong`."""
    names, known, inside = _locate(model_cls, error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = f"unknown key{did_you_mean(names[-1], known)}"
    elif error["type"] == "missing":
        message = "missing, and it has no default"
    elif error["type"] == "json_invalid":
        problem = str(error.get("ctx", {}).get("error")).replace("line 1 column", "column")
        message = f"not valid JSON ({problem}): {short(error['input'])}"
    elif error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = error.get("ctx", {})
        names.append(str(context.get("discriminator", "")).strip("'"))
        message = f"expected one of {context['expected_tags']}, got {context['tag']}" if "tag" in context else "missing"
    elif error["type"] == "value_error":
        # A rule over several fields of a block says `field: what is wrong` itself; its field joins the dotted name.
        field, colon, rest = message.partition(": ")
        if colon and names and field in inside:
            names, message = [*names, field], rest
    elif error["type"] in ("too_short", "string_too_short"):
        what, least = ("character" if "string" in error["type"] else "item"), error.get("ctx", {})["min_length"]
        message = f"expected at least {least} {what}{'s' * (least != 1)}, got {short(error['input'])}"
    else:
        wanted = re.sub(r"^Input should be (?=greater|less)", "expected a value ", message)
        wanted = re.sub(r"^Input should be ", "expected ", wanted)
        message = f"{wanted[0].lower()}{wanted[1:]}, got {short(error['input'])}"
    return f"{'.'.join(names)}: {message}" if names else message


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A clause with the known name closest to `name`, if one is close, and with all known names."""
    known = list(known)
    hint = hint_at(name, known)
    return f"{hint and f'; {hint}'} (expected one of: {', '.join(known)})" if known else ""


def _locate(model_cls: type[pydantic.BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], list[str], list[str]]:
    """The dotted name that the user wrote, the keys known beside it, and those known inside it.

    Pydantic's own location also holds union tags, which are no part of that name.
    """
    names: list[str] = []
    known: list[str] = []
    kind: Any = model_cls
    for part in loc:
        members = _members(kind)
        if len(members) > 1:  # the part is a tag: it says which member of the union the rest is about
            kind = next((member for member in members if _is_tagged(member, part)), None)
            continue
        names.append(str(part))
        fields = _field_types(members[0])
        known = list(fields)
        # The last type argument is that of the elements, in a list or tuple as in a mapping.
        elements = [arg for arg in typing.get_args(members[0]) if arg is not Ellipsis]
        kind = fields.get(str(part), elements[-1] if elements else None)
    return names, known, list(_field_types(_members(kind)[0]))


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
    """The text of a date, the one YAML value beyond JSON that is taken; TypeError for any other."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    raise TypeError(f"a config holds text, numbers, lists and mappings only, got {type(value).__name__} {value!r}")


def short(value: Any) -> str:
    """The value as JSON, cut to one readable length."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
