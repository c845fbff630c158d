"""From a YAML file and dotted overrides to a frozen config, and back: load(to_yaml(c)) == c.

YAML 1.2: `1e-4` is a number, `no` and `off` are text. `base: other.yaml` (relative to the file) starts from another
file: mappings are merged key by key, lists and scalars are replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from lab.config.kinds import require_kind
from lab.config.shipped import located
from lab.files import require_regular
from lab.strict import ConfigError, did_you_mean, validate

Config = TypeVar("Config", bound=BaseModel)

# These keys name the place of a run's results, or the evidence for its config; every other key may change its numbers,
# so it is hashed.
NOT_HASHED = ("name", "output", "logging", "evidence", "threads")

MOST_BYTES = 1_000_000
"""Bytes of a config file: the parser takes about 5 s for as many, and a pipe may have no end."""
MOST_KEPT = 32_000
"""Characters of a text whose values are kept: at ten bytes of memory for each and more, 128 of them are 50 MB."""
MOST_VALUES = 100_000
"""Values in a config, lists and mappings included."""
MOST_DEPTH, MOST_BITS = 50, 1024
"""Levels of lists and mappings, and bits of an integer."""


def load(path: str | Path, overrides: Sequence[str], schemas: Mapping[str, type[Config]]) -> Config:
    """The config in the file after the overrides, as the schema that its `backend:` names; ConfigError for a wrong one.

    Overrides are command-line words: `--algorithm.replay.mode R3` or `--algorithm.replay.mode=R3`; values are YAML.
    """
    raw = read(path)
    require_kind(raw, schemas, path)
    apply(raw, parse_overrides(overrides))
    backend = raw.get("backend")
    if backend is None:
        raise ConfigError(f"{path}: backend: missing; expected one of: {', '.join(schemas)}")
    if not isinstance(backend, str) or backend not in schemas:
        raise ConfigError(f"{path}: backend: unknown backend '{backend}'{did_you_mean(str(backend), schemas)}")
    return validate(schemas[backend], raw, str(path))


def read(path: str | Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a YAML file, merged over the mapping in its `base:` file, if it names one."""
    path = located(Path(path))
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base: the files refer to each other in a circle: {' -> '.join(map(str, seen))}")
    if path.is_dir():
        hint = "; a run's own is config.yaml in it" if (path / "config.yaml").is_file() else ""
        raise ConfigError(f"{path}: expected a YAML file, got a folder{hint}")
    raw = read_mapping(path)
    base = raw.pop("base", None)
    if base is None:
        return raw
    if not isinstance(base, str):
        raise ConfigError(f"{path}: base: expected a file name, got {_kind(base)}")
    base_path = path.parent / base
    if not base_path.exists():
        raise ConfigError(f"{path}: base: no such file: {base_path}")
    return _merge(read(base_path, (*seen, path.resolve())), raw)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in one YAML file, as it stands there."""
    require_regular(path)
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: expected a config of at most {MOST_BYTES} bytes, got more")
    try:
        # As a file opened for text has it: every line break is \n.
        text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {_kind(raw)}")
    for key in raw:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: expected names as keys, got {_kind(key)}")
    return raw


def parse_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Command-line words as (dotted key, text) pairs, in order."""
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not all(key.split(".")):
            raise ConfigError(f"unexpected argument '{word}'; expected overrides such as --algorithm.replay.mode R3")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key}: expected a value after it, got {rest[0] if rest else 'nothing'}")
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def apply(raw: dict[str, Any], changes: Iterable[tuple[str, str]]) -> None:
    """Puts each (dotted key, YAML text) into the mapping, in order; ConfigError names the key that does not fit."""
    for key, text in changes:
        _set(raw, key, _parse(text, f"--{key}"))


def to_yaml(config: BaseModel) -> str:
    """The complete config as YAML, each field under its description; `load` gives the same config back."""
    return "".join(_emit(config, indent=0))


def config_hash(config: BaseModel) -> str:
    """Twelve hex digits that depend on every field but NOT_HASHED: equal hashes promise equal numbers.

    Null fields are omitted, so that a new optional field changes no former config's hash.
    """
    dumped = config.model_dump(mode="json", exclude_none=True)
    fields = {key: value for key, value in dumped.items() if key not in NOT_HASHED}
    # Sorted, so that a field that moves within its block changes no hash.
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _loaded(text: str) -> Any:
    """The values of a YAML text."""
    # The pure parser, because the C one reads YAML 1.1, where `1e-4` is text and `no` is False.
    return YAML(typ="safe", pure=True).load(text)


_kept = functools.lru_cache(maxsize=128)(_loaded)
"""The same, kept: a run and its report read the same files, the ledger the same overrides, and the parser is slow."""


def _parse(text: str, where: str) -> Any:
    """YAML 1.2 text as plain Python values of at most MOST_VALUES; ConfigError with the line number."""
    try:
        value = _kept(text) if len(text) <= MOST_KEPT else _loaded(text)
    except RecursionError as error:
        raise ConfigError(f"{where}: not valid YAML: lists and mappings are nested too deeply") from error
    except MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        problem = str(error.problem or error.context).splitlines()[0]
        if isinstance(error, DuplicateKeyError):
            problem = problem.split(" with ")[0].replace("found duplicate key", "duplicate key")
        raise ConfigError(f"{where}{line}: not valid YAML: {problem}") from error
    except YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error
    except (ValueError, TypeError) as error:  # from ruamel's constructors of single values: month 13, an odd key
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    _check_size(value, where)
    # A copy: callers change the mapping, and the cache would hand the changes on.
    return _unshared(value)


def _unshared(value: Any) -> Any:
    """A copy whose lists and mappings are each in one place only, where YAML's aliases and merge keys share them.

    An override then changes no block that it does not name. Recursive, as `_check_size` bounds depth and size.
    """
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _check_size(value: Any, where: str) -> None:
    """ConfigError for more than a config can need: nested aliases expand to any number of values."""
    # A stack in place of recursion, which deep nesting would exhaust before the check.
    count, waiting = 0, [(value, 0)]
    while waiting:
        current, depth = waiting.pop()
        inner = list(current.values()) if isinstance(current, dict) else current if isinstance(current, list) else ()
        count += 1 + len(inner)
        if count > MOST_VALUES:
            raise ConfigError(f"{where}: expected at most {MOST_VALUES} values, got more (aliases count every time)")
        if depth > MOST_DEPTH:
            raise ConfigError(f"{where}: expected at most {MOST_DEPTH} levels of lists and mappings, got more")
        if isinstance(current, int) and current.bit_length() > MOST_BITS:
            raise ConfigError(f"{where}: expected integers of at most {MOST_BITS} bits, got {current.bit_length()}")
        waiting += ((each, depth + 1) for each in inner)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`: mappings key by key, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        both_mappings = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_mappings else value
    return merged


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value at a dotted key, creating blocks on the way; a number in the key is a position in a list."""
    *blocks, last = key.split(".")
    current: Any = raw
    for depth, name in enumerate(blocks):
        # A null block is created, as a missing one is.
        if isinstance(current, dict) and current.get(name) is None:
            current[name] = {}
        current = current[_index(current, name, key)]
        if not isinstance(current, (dict, list)):
            raise ConfigError(f"--{key}: {'.'.join(blocks[: depth + 1])} is {_kind(current)}, not a block of keys")
    current[_index(current, last, key)] = value


def _index(block: dict[str, Any] | list[Any], name: str, key: str) -> Any:
    """The key or list position that `name` denotes in this block."""
    if isinstance(block, dict):
        return name
    if not name.isdecimal() or int(name) >= len(block):
        raise ConfigError(f"--{key}: expected a position in a list of {len(block)}, counting from 0, got '{name}'")
    return int(name)


def _kind(value: Any) -> str:
    """The value's kind in words, for messages."""
    if value is None:
        return "nothing"
    names = {dict: "a mapping", list: "a list", str: f"the text '{value}'"}
    return names.get(type(value), f"{value}")


def _emit(block: BaseModel, indent: int) -> list[str]:
    """The lines of one block."""
    pad = " " * indent
    lines: list[str] = []
    for name, field in type(block).model_fields.items():
        if field.description:
            width = 100 - indent
            lines += [f"{pad}# {line}\n" for line in textwrap.wrap(field.description, width, break_on_hyphens=False)]
        lines += _entry(f"{pad}{name}:", getattr(block, name), indent)
    for name, value in (block.model_extra or {}).items():
        lines += _entry(f"{pad}{_flow(name)}:", value, indent)
    return lines


def _entry(head: str, value: Any, indent: int) -> list[str]:
    """`head` (a key or a dash) with its value: on the same line, or as an indented block below it."""
    pad = " " * (indent + 2)
    if isinstance(value, BaseModel) and type(value).model_fields:
        return [f"{head}\n", *_emit(value, indent + 2)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and value:
        entries = [_entry(f"{pad}{_flow(key)}:", inner, indent + 2) for key, inner in value.items()]
        return [f"{head}\n", *(line for lines in entries for line in lines)]
    if isinstance(value, (tuple, list)) and any(not _is_scalar(item) for item in value):
        return [f"{head}\n", *(line for item in value for line in _entry(f"{pad}-", item, indent + 2))]
    return [f"{head} {_flow(value)}\n"]


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, Path))


def _flow(value: Any) -> str:
    """A scalar, or a list of scalars, on one line."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, (Mapping, BaseModel)):
        return "{}"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, (str, Path)):
        text = str(value)
        # Plain where YAML reads the same text back, otherwise in double quotes, whose escapes YAML shares with JSON.
        plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text, re.ASCII) and _parse(text, "") == text
        return text if plain else _quoted(text)
    return json.dumps(value)


def _quoted(text: str) -> str:
    """The text in double quotes: JSON's escapes are YAML's too, but YAML also wants every unprintable one escaped."""
    escaped = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))
    return "".join(escaped)
