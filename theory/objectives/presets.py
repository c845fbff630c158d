"""The named compositions: fourteen objectives of the literature, each a row of parts.

Differences from the sources. GRPO averages over each response (MiniRL App. A) and GRPO-DAPO over all tokens (DAPO),
with R3's upper bound (Tab. 12; DAPO's own and Pr2's is 0.28). All tokens are the mini-batch's, as in verl; for CISPO
MiniRL App. A prints those of each prompt's group, and then the mean over prompts. Pr2 prints neither length for GRPO
and GRPO-DAPO (Eq. 13 and 14), which is `aggregation="token_sum"`. PPO has no critic here: its advantage is
the group mean. Dr. GRPO divides by the number of responses, not by a constant length. CISPO's papers print no bounds:
there is no lower one, and the weight is capped at 5. `minirl_no_is` leaves out old/mu and keeps sg[pi/old]; on-policy
that factor is 1, which is the equation of MiniRL sec. 4.3. MinPRO's soft clip has CISPO's bounds here. DPPO and CPPO
weigh by pi/mu whole, untruncated, as their papers print it; DPPO's mean baseline and token sum are those of its
authors' recipe in verl (whose constant divisor of the sum is none here), CPPO's advantage and token mean its paper's.
Papers: MiniRL (arXiv 2512.01374), Pr2 (2606.00395), GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783),
CISPO (2506.13585), GSPO (2507.18071), MinPRO (2601.22718), DPPO (2602.04879), CPPO (2606.10968).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from theory.names import number, unknown_name
from theory.objectives import ratios
from theory.objectives.aggregations import AGGREGATIONS, Aggregation, length_norm, token_mean, token_sum
from theory.objectives.corrections import Correction, MinPRO, NoCorrection, TokenIS, TokenTIS, correction
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import CPPO, BinaryKL, BinaryTV, MinClip, MiniRLMask, NoRegion, WeightClip

_NONE = NoCorrection()
_MINIRL_TIS = TokenTIS(numerator="pi", cap=5.0)
_WHOLE = TokenIS(numerator="pi")

_ROWS = (
    # name, advantage, ratio, trust region, correction, aggregation
    Objective("minirl", "group_mean", ratios.token, MiniRLMask(0.2, 0.27), _MINIRL_TIS, token_sum),
    Objective("minirl_lengthnorm", "group_mean", ratios.token, MiniRLMask(0.2, 0.27), _MINIRL_TIS, length_norm),
    Objective("minirl_no_is", "group_mean", ratios.token, MiniRLMask(0.2, 0.27), _NONE, token_sum),
    Objective("reinforce", "group_mean", ratios.none, NoRegion(), _NONE, token_sum),
    Objective("ppo", "group_mean", ratios.token, MinClip(0.2, 0.2), _NONE, token_sum),
    Objective("grpo", "group_norm", ratios.token, MinClip(0.2, 0.2), _NONE, length_norm),
    Objective("grpo_dapo", "group_norm", ratios.token, MinClip(0.2, 0.27), _NONE, token_mean),
    Objective("dr_grpo", "group_mean", ratios.token, MinClip(0.2, 0.2), _NONE, token_sum),
    Objective("cispo", "group_norm", ratios.token, WeightClip(1.0, 4.0), _NONE, token_mean),
    Objective("gspo", "group_norm", ratios.sequence_geometric, MinClip(3e-4, 4e-4), _NONE, length_norm),
    Objective("minpro", "group_norm", ratios.token, NoRegion(), MinPRO(numerator="pi", cap=5.0), token_mean),
    Objective("dppo_tv", "group_mean", ratios.token, BinaryTV(), _WHOLE, token_sum),
    Objective("dppo_kl", "group_mean", ratios.token, BinaryKL(), _WHOLE, token_sum),
    Objective("cppo", "group_norm", ratios.token, CPPO(), _WHOLE, token_mean),
)

PRESETS: dict[str, Objective] = {objective.name: objective for objective in _ROWS}
"""The presets by name, with their papers' defaults."""

OVERRIDES = (
    "eps_low", "eps_high", "delta_b", "w_min", "cap", "correction", "aggregation", "advantage", "ratio",
    "kl_coefficient", "kl_estimator",
)  # fmt: skip
"""What `preset` lets a caller change."""


def preset(name: str, **overrides: Any) -> Objective:
    """The named objective, with these overrides.

    `eps_low`, `eps_high`, `delta_b`, `w_min`: the numbers of its trust region; `cap`: that of its correction (after
    `correction` is replaced); `correction`, `aggregation`: an object, or its name; `advantage`, `kl_estimator`: a
    name; `ratio`: a name (`sequence_geometric_token` makes GSPO-token of GSPO); `kl_coefficient`: beta of the penalty
    KL(pi || ref).
    Raises ValueError for an unknown preset or override, naming the nearest valid one, and for an override that the
    preset has no use for.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    for override in overrides:
        if override not in OVERRIDES:
            raise unknown_name(f"override of {name}", override, OVERRIDES)
    objective = PRESETS[name]
    parts: dict[str, Any] = {k: _name(k, v) for k, v in _some(overrides, "advantage", "kl_estimator").items()}
    if "kl_coefficient" in overrides:
        parts["kl_coefficient"] = number(f"{name}: kl_coefficient", overrides["kl_coefficient"])
    if "ratio" in overrides:
        parts["ratio"] = _ratio(overrides["ratio"])
    if "aggregation" in overrides:
        parts["aggregation"] = _aggregation(overrides["aggregation"])
    chosen = _correction(overrides["correction"]) if "correction" in overrides else objective.correction
    parts["correction"] = _replace_numbers(name, chosen, f"correction {chosen.name}", _some(overrides, "cap"))
    region, bounds = objective.trust_region, _some(overrides, "eps_low", "eps_high", "delta_b", "w_min")
    parts["trust_region"] = _replace_numbers(name, region, f"trust region {region.name}", bounds)
    return replace(objective, **parts)


def _some(overrides: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: overrides[name] for name in names if name in overrides}


def _replace_numbers(preset_name: str, part: Any, label: str, values: dict[str, Any]) -> Any:
    for key, value in values.items():
        if not hasattr(part, key):
            raise ValueError(f"{preset_name} has no use for {key}: its {label} has no such number (got {value!r})")
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
        raise ValueError(f"expected {kind} to be a name or such an object, got {value!r}")
    return value


__all__ = ["OVERRIDES", "PRESETS", "preset"]
