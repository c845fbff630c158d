"""The numbers of a config's file that stay when another preset is named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lab.config.load import parse_overrides, read
from lab.config.shipped import located
from theory.objectives import NUMBERS, PRESETS

BLOCK = "algorithm.objective"


def kept_numbers(path: str | Path, overrides: Sequence[str]) -> list[str]:
    """A line for each number of the file's objective that the preset of `--algorithm.objective.preset` has otherwise.

    An override replaces one field: beside `preset: gspo`, the `eps_high: 0.27` that the file gives to GRPO remains.
    """
    given = dict(parse_overrides(overrides))
    name = given.get(f"{BLOCK}.preset")
    if name not in PRESETS or not located(Path(path)).is_file():  # a pipe cannot be read again
        return []
    stated = read(path).get("algorithm", {}).get("objective", {})
    if name == stated.get("preset"):
        return []
    lines = []
    for number in NUMBERS:
        own = next((getattr(p, number) for p in _parts(name) if hasattr(p, number)), None)
        value = stated.get(number)
        if f"{BLOCK}.{number}" in given or None in (own, value) or value == own:
            continue
        lines.append(
            f"{BLOCK}.{number}: {value} of {path} stays; {name}'s own is {own:g} "
            f"(--{BLOCK} '{{preset: {name}}}' takes the preset whole)"
        )
    return lines


def _parts(preset: str) -> tuple[object, object]:
    return PRESETS[preset].trust_region, PRESETS[preset].correction
