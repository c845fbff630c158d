"""The named compositions: each file of this folder has a tuple `PRESETS` of them, and its own parts where needed.

A new objective is a new file. The numbers of its parts (theory/fields.py) determine the fields that a config may
change, their ranges and their comments.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from theory.fields import About, about
from theory.names import number, unknown_name
from theory.objectives import ratios
from theory.objectives.aggregations import AGGREGATIONS, Aggregation
from theory.objectives.corrections import Correction, correction
from theory.objectives.objective import Objective


def _rows() -> Iterator[Objective]:
    """The presets of the classics, then those of the other files by name."""
    files = sorted(file.name for file in pkgutil.iter_modules(__path__))
    for file in sorted(files, key=lambda name: name != "classic"):
        yield from import_module(f"{__name__}.{file}").PRESETS


PRESETS: dict[str, Objective] = {objective.name: objective for objective in _rows()}
"""The presets by name, with their papers' defaults."""


def _numbers(part: str) -> dict[str, About]:
    """The numbers that this part has in any preset."""
    found: dict[str, About] = {}
    for objective in PRESETS.values():
        for name, words in about(type(getattr(objective, part))).items():
            assert found.setdefault(name, words) == words, f"{name} is described twice"
    return found


_OF_REGIONS, _OF_CORRECTIONS = _numbers("trust_region"), _numbers("correction")
NUMBERS: dict[str, About] = _OF_REGIONS | _OF_CORRECTIONS
"""Every number of any preset, by name, with its words and range."""

assert len(NUMBERS) == len(_OF_REGIONS) + len(_OF_CORRECTIONS), "a region and a correction have a number of one name"

OVERRIDES = (
    *NUMBERS, "correction", "rejection", "normalise_weights", "aggregation", "advantage", "ratio", "kl_coefficient",
    "kl_estimator", "centering", "centering_k", "router_shift_floor",
    "m2_budget",
)  # fmt: skip
"""The settings that a caller of `preset` may change."""

MANY = 4
"""From this many presets with a number on, the error for one that lacks it no longer names them."""


def preset(name: str, **overrides: Any) -> Objective:
    """The named objective, with these overrides.

    A number of its trust region or of its correction (after `correction` is replaced) has its own name, as in
    `NUMBERS`; `correction`, `aggregation`: an object, or its name; `advantage`, `kl_estimator`: a name; `ratio`: a
    name (`sequence_geometric_token` makes GSPO-token of GSPO); `kl_coefficient`: beta of the penalty KL(pi || ref);
    `centering`: none, full or top_k, of `centering_k` tokens. `rejection` is one more correction, which only rejects,
    beside the weight; `normalise_weights`: weights over their mean. `router_shift_floor`: the least router-shift ratio
    (0.8 makes RSPO of GMPO). `m2_budget`: a budget that widens the clip (0.04 makes M2PO of DAPO's GRPO).
    Raises ValueError for an unknown preset or override, naming the nearest valid one, and for an override that the
    preset has no use for.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    for override in overrides:
        if override not in OVERRIDES:
            raise unknown_name(f"override of {name}", override, OVERRIDES)
    objective = PRESETS[name]
    named = _some(overrides, "advantage", "kl_estimator", "centering")
    parts: dict[str, Any] = {k: _name(k, v) for k, v in named.items()}
    parts |= _some(overrides, "centering_k", "normalise_weights")
    for key in ("kl_coefficient", "router_shift_floor", "m2_budget"):
        if key in overrides:
            parts[key] = number(f"{name}: {key}", overrides[key])
    if "ratio" in overrides:
        parts["ratio"] = _ratio(overrides["ratio"])
    if "aggregation" in overrides:
        parts["aggregation"] = _aggregation(overrides["aggregation"])
    if "rejection" in overrides:
        parts["rejection"] = _correction(overrides["rejection"])
    # Numbers belong to the parts as overridden: a cap goes to the correction that replaces the preset's.
    chosen = _correction(overrides["correction"]) if "correction" in overrides else objective.correction
    weights, region, bounds = _some(overrides, *_OF_CORRECTIONS), objective.trust_region, _some(overrides, *_OF_REGIONS)
    parts["correction"] = _replace_numbers(name, chosen, f"correction {chosen.name}", weights)
    parts["trust_region"] = _replace_numbers(name, region, f"trust region {region.name}", bounds)
    # In one go: parts are checked against each other, and an override may fit only beside another one.
    return replace(objective, **parts)


def _some(overrides: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: overrides[name] for name in names if name in overrides}


def _replace_numbers(preset_name: str, part: Any, label: str, values: dict[str, Any]) -> Any:
    for key, value in values.items():
        # `replace` would raise a TypeError that names neither the preset nor its part.
        if not hasattr(part, key):
            owners = [one.name for one in PRESETS.values() if hasattr(one.trust_region, key)]
            hint = f"; presets with it: {', '.join(owners)}" if 0 < len(owners) < MANY else ""
            raise ValueError(
                f"{preset_name} has no use for {key}: its {label} has no such number{hint} (got {value!r})"
            )
    return replace(part, **{key: number(f"{preset_name}: {key}", value) for key, value in values.items()})


def _correction(value: Any) -> Correction:
    return value if isinstance(value, Correction) else correction(_name("correction", value))


def _aggregation(value: Any) -> Aggregation:
    if isinstance(value, Aggregation):
        return value
    if _name("aggregation", value) not in AGGREGATIONS:
        raise unknown_name("aggregation", value, AGGREGATIONS)
    return AGGREGATIONS[value]


def _ratio(value: Any) -> ratios.Ratio:
    if _name("ratio", value) not in ratios.RATIOS:
        raise unknown_name("ratio", value, ratios.RATIOS)
    return ratios.RATIOS[value]


def _name(kind: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected {kind} to be a name or an object, got {value!r}")
    return value


__all__ = ["NUMBERS", "OVERRIDES", "PRESETS", "preset"]
