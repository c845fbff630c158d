"""Damage to files: values of another kind, keys that are gone or misspelt, lines torn, shuffled and doubled.

All draws come from one generator, so that a case is repeated from its number.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

CASES = int(os.environ.get("FUZZ_CASES", "0"))
"""Cases of each fuzzer in its long mode (`make fuzz`); 0 for the short one of the test suite."""

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 2**70, 10**400, 1.5, -1e308, float("nan"), float("inf"), "", "x", "1", "\x00", "é" * 400, [],
    [1], [None], [[]], {}, {"x": 1},
)  # fmt: skip


def num_cases(short: int) -> int:
    """The cases to try now."""
    return CASES or short


def note(record_property: Any, outcomes: Sequence[str]) -> None:
    """Counts for the end of the session (conftest.py)."""
    record_property("cases", len(outcomes))
    record_property("refused", outcomes.count("refused"))


def misfit(value: Any, rng: random.Random) -> Any:
    """The JSON value with one of its parts replaced, removed, misspelt, doubled or moved."""
    places = list(_places(value))
    parent, key = rng.choice(places) if places else (None, None)
    if parent is None or rng.random() < 0.05:
        return rng.choice(VALUES)
    how = rng.randrange(6)
    if how <= 2:
        parent[key] = rng.choice(VALUES)
    elif how == 3:
        del parent[key]
    elif isinstance(parent, list):
        if how == 4:
            parent.insert(key, parent[key])
        else:
            rng.shuffle(parent)
    else:
        name = misspelt(str(key), rng)
        parent[name] = parent.pop(key) if how == 4 else parent[key]
    return value


def edited(value: Any, rng: random.Random, numbers: Sequence[float]) -> Any:
    """A copy of the JSON value with one accident: as in `misfit`, or with a number or a text of it replaced by another.

    A number becomes one of `numbers` or a neighbour of its own, so that much of what comes out is still of its kind.
    """
    value = copy.deepcopy(value)
    leaves = [(parent, key) for parent, key in _places(value) if not isinstance(parent[key], (dict, list))]
    if not leaves or rng.random() < 0.4:
        return misfit(value, rng)
    parent, key = rng.choice(leaves)
    old = parent[key]
    if isinstance(old, bool) or old is None:
        parent[key] = rng.choice([True, False, None, *numbers])
    elif isinstance(old, (int, float)):
        parent[key] = rng.choice([*numbers, 0, -old, old * 10, old + 1, old / 3, str(old), old - 1])
    else:
        parent[key] = rng.choice([*(inner[k] for inner, k in leaves), misspelt(old, rng)])
    return value


class TooLongError(BaseException):
    """Work that was to end; no `except Exception` on the way takes it for an error of its own."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """TooLongError, where the work stands, once it has taken more of the processor's time than this."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"expected an end within {seconds} s of the processor's time")

    former = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


def misspelt(name: str, rng: random.Random) -> str:
    """The name with one letter gone, doubled or changed."""
    place = rng.randrange(len(name)) if name else 0
    return name[:place] + rng.choice(["", name[place : place + 1] * 2, "q"]) + name[place + 1 :]


def torn(data: bytes, rng: random.Random) -> bytes:
    """The bytes cut, with some of them changed, repeated or gone."""
    if not data:
        return b"\xff"
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    edits: tuple[Callable[[], bytes], ...] = (
        lambda: data[:a],
        lambda: data[:a] + data[b:],
        lambda: data[:b] + data[a:],
        lambda: data[:a] + bytes(rng.randrange(256) for _ in range(1 + rng.randrange(8))) + data[a + 1 :],
        lambda: b"",
        lambda: b"\xef\xbb\xbf" + data,
        lambda: data.replace(b"\n", b"\r\n"),
        lambda: b"[" * 5_000,
        lambda: bytes(rng.randrange(256) for _ in range(64)),
    )
    return rng.choice(edits)()


def misplaced(lines: list[bytes], rng: random.Random) -> list[bytes]:
    """The lines in another order, one doubled, one gone, one joined to the next, or an empty one between them."""
    lines = list(lines)
    place = rng.randrange(len(lines)) if lines else 0
    how = rng.randrange(5)
    if how == 0:
        rng.shuffle(lines)
    elif how == 1:
        lines.insert(place, lines[place])
    elif how == 2:
        del lines[place]
    elif how == 3 and place + 1 < len(lines):
        lines[place : place + 2] = [lines[place] + lines[place + 1]]
    else:
        lines.insert(place, b"")
    return lines


def spoil(data: bytes, rng: random.Random, is_lines: bool) -> bytes:
    """A JSON (or, `is_lines`, JSON Lines) file after one accident."""
    how = rng.random()
    if how < 0.2:
        return torn(data, rng)
    if not is_lines:
        return json.dumps(misfit(json.loads(data), rng)).encode()
    lines = data.splitlines()
    if how < 0.4:
        lines = misplaced(lines, rng)
    else:
        place = rng.randrange(len(lines))
        lines[place] = json.dumps(misfit(json.loads(lines[place]), rng)).encode()
    return b"".join(line + b"\n" for line in lines)


def _places(value: Any, depth: int = 0) -> Any:
    """Every (container, key) in the value, of long lists the first few alone."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 8)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        if depth < 6:
            yield from _places(value[key], depth + 1)
