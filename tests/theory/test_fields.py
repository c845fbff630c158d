"""Laws of the words beside a field: they hold for every number, in a part, in a preset and in the config."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from lab.config.algorithm import AlgorithmConfig, ObjectiveBlock
from lab.strict import ConfigError, validate
from theory.fields import About, about, require_ranges
from theory.objectives import NUMBERS, PRESETS, preset


@dataclass(frozen=True)
class Widths:
    low: Annotated[float, About("lower width", ge=0)] = 0.1
    share: Annotated[float, About("a share", gt=0, le=1)] = 0.5
    count: Annotated[int, About("how many", ge=1, lt=4)] = 2
    word: Annotated[str, About("no number")] = "x"


@dataclass(frozen=True)
class Narrow(Widths):
    low: float = 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"low": -1.0}, r"low: expected low >= 0, got -1\.0"),
        ({"low": math.nan}, "low: expected low >= 0, got nan"),
        ({"share": 0.0}, r"share: expected 0 < share <= 1, got 0\.0"),
        ({"share": 1.5}, r"share: expected 0 < share <= 1, got 1\.5"),
        ({"count": 4}, "count: expected 1 <= count < 4, got 4"),
    ],
)
def test_a_number_out_of_range_is_named(changes: dict, message: str) -> None:
    """The line names the field, its range and the value; a class that changes a default keeps words and range."""
    with pytest.raises(ValueError, match=f"^{message}$"):
        require_ranges(Widths(**changes))
    with pytest.raises(ValueError, match=f"^{message.replace(next(iter(changes)) + ':', 'part:', 1)}$"):
        require_ranges(Narrow(**changes), "part")
    assert about(Narrow) == about(Widths)
    require_ranges(Narrow(share=1.0, count=1))


def test_every_number_of_a_preset_is_described() -> None:
    """No float field of a preset's own parts lacks words: each can be set by its name, in theory and in a config."""
    for objective in PRESETS.values():
        for part in (objective.trust_region, objective.correction):
            numbers = {f.name for f in dataclasses.fields(part) if isinstance(getattr(part, f.name), float)}
            assert numbers <= NUMBERS.keys()
    assert NUMBERS.keys() <= ObjectiveBlock.model_fields.keys()


def test_a_number_reaches_its_part_from_the_config() -> None:
    """A number of each preset's parts, set in the config, is the one that the built objective has, and no other is."""
    for name, objective in PRESETS.items():
        for part in ("trust_region", "correction"):
            for number in about(type(getattr(objective, part))):
                value = getattr(getattr(objective, part), number) / 2
                raw = {"objective": {"preset": name, number: value}}
                built = validate(AlgorithmConfig, raw, "here").build().objective
                assert built == preset(name, **{number: value})
                changed = dataclasses.replace(getattr(objective, part), **{number: value})
                assert built == dataclasses.replace(objective, **{part: changed})


def test_the_config_has_the_ranges_of_the_theory() -> None:
    """A value beyond a bound of the theory is refused by the config, with the field's dotted name and the bound."""
    for number, words in NUMBERS.items():
        owner = next(p for p, o in PRESETS.items() if number in about(type(o.trust_region)) | about(type(o.correction)))
        for bound, step in ((words.gt, 0), (words.ge, -1), (words.lt, 0), (words.le, 1)):
            if bound is not None:
                with pytest.raises(ConfigError, match=f"objective.{number}: expected a value"):
                    validate(AlgorithmConfig, {"objective": {"preset": owner, number: bound + step}}, "here")
