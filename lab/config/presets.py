"""The numbers of a config that stay when another preset is named on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from lab.config.algorithm import ObjectiveBlock
from lab.config.load import parse_overrides
from theory.objectives import NUMBERS, PRESETS

BLOCK = "algorithm.objective"


def kept_numbers(objective: ObjectiveBlock, overrides: Sequence[str]) -> list[str]:
    """A line for each number of the objective that is not the named preset's own, and that no override gives.

    An override replaces one field: `--algorithm.objective.preset gspo` leaves the `eps_high: 0.27` that the file gives
    to GRPO. Empty unless `overrides` names a preset.
    """
    given = dict(parse_overrides(overrides))
    if f"{BLOCK}.preset" not in given:
        return []
    preset = PRESETS[objective.preset]
    lines = []
    for name in NUMBERS:
        part = next((part for part in (preset.trust_region, preset.correction) if hasattr(part, name)), None)
        own, value = getattr(part, name, None), getattr(objective, name)
        if f"{BLOCK}.{name}" not in given and None not in (own, value) and value != own:
            lines.append(
                f"{BLOCK}.{name}: the config's {value:g} stays; {objective.preset}'s own is {own:g} "
                f"(--{BLOCK} '{{preset: {objective.preset}}}' takes the preset whole)"
            )
    return lines
