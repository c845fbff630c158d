"""The verdict on a run: stable, collapsed or undecided, by written rules on its metrics alone.

A rule fires on a condition that lasts, not on one bad step; a run that it cannot judge is undecided, never stable.
The reward is compared with its highest level from the first global step on, whose responses are sampled before any
update. A mean of fewer steps than the window is noisy, and counts as a peak only as far as noise cannot explain it.
Papers: collapse of the reward with a sharp fall of the entropy and a sharp rise of the training-inference KL, MiniRL
(arXiv 2512.01374) sec. 4.2 to 4.4; high KL before a collapse, R3 (2510.11370) sec. 5.2 and Fig. 5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pydantic import Field, model_validator

from lab.levels import Level, highest, levels, noise, series, trailing_mean
from lab.strict import Strict

REWARD = "reward/mean"
KL = "rollout_corr/k3_kl"
ENTROPY = "actor/entropy"


def _later(default: float, **constraints: Any) -> Any:
    """A field newer than some runs on disk: a dump omits it at its default, so that their hashes stay."""
    return Field(default=default, exclude_if=lambda value: value == default, **constraints)


class VerdictRules(Strict):
    """The thresholds of the four rules, as the `verdict:` block of a config; `describe` gives them as sentences."""

    min_steps: int = Field(default=20, ge=1, description="recorded steps below which a finite run is undecided")
    window: int = Field(
        default=5, ge=1, description="steps of the trailing mean that smooths the reward; fewer at the start"
    )
    patience: int = Field(default=5, ge=1, description="recorded steps in a row for which a condition must hold")
    early_steps: int = Field(
        default=5, ge=1, description="recorded steps at the start whose median is the run's own reference"
    )
    reward_fall: float = Field(
        default=0.5, gt=0, lt=1, description="fraction of its peak so far below which the smoothed reward has fallen"
    )
    reward_min: float = Field(default=0.05, ge=0, description="a peak of at most this is noise: nothing falls from it")
    noise_margin: float = _later(
        2.0, ge=0, description="standard errors by which a mean of fewer steps than the window is lowered as a peak"
    )
    end_fraction: float = _later(
        0.75, gt=0, le=1, description="fraction of its first reward below which a stable run's last earns a remark"
    )
    kl_limit: float = Field(default=0.1, ge=0, description="k3 KL(mu || old), nats per token, that is always a blow-up")
    kl_factor: float = Field(default=20.0, gt=1, description="multiple of the early median KL that is a blow-up")
    kl_floor: float = Field(default=1e-3, ge=0, description="KL, nats per token, below which no multiple is a blow-up")
    entropy_floor: float = Field(default=1e-3, ge=0, description="entropy, nats per token, below which it is lost")
    entropy_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="fraction of the early median entropy below which the run is collapsed"
    )
    solved_reward: float = Field(
        default=0.9, description="smoothed reward from which on low entropy is fine: a solved task needs no exploration"
    )

    @model_validator(mode="after")
    def _has_room(self) -> VerdictRules:
        if self.min_steps < self.early_steps + self.patience:
            needed = f"early_steps + patience = {self.early_steps + self.patience}"
            raise ValueError(f"min_steps: expected at least {needed}, got {self.min_steps}")
        return self

    def describe(self) -> dict[str, str]:
        """Each rule by name, as one sentence with its thresholds."""
        lasting = f"for {self.patience} recorded steps in a row"
        return {
            "non_finite": "A metric is NaN or infinite at any step.",
            "reward_fall": f"The trailing mean of {REWARD} over {self.window} steps (before step {self.window} over "
            f"all so far) is below {self.reward_fall:g} times its peak so far {lasting}. As a peak, a mean of fewer "
            f"steps is lowered by {self.noise_margin:g} standard errors; peaks of at most {self.reward_min:g} do not "
            "count, and without another the run is undecided.",
            "kl_blowup": f"{KL} is above {self.kl_limit:g}, or above {self.kl_factor:g} times its median over the "
            f"first {self.early_steps} steps and above {self.kl_floor:g}, {lasting}.",
            "entropy_collapse": f"{ENTROPY} is below {self.entropy_floor:g} or below {self.entropy_fraction:g} times "
            f"its median over the first {self.early_steps} steps {lasting}, while the smoothed reward is below "
            f"{self.solved_reward:g}.",
            "remarks": f"A run stays stable, and is remarked on, where its last trailing mean of {REWARD} is below "
            f"{self.end_fraction:g} times its peak in the first {self.window} steps, and by more than "
            f"{self.noise_margin:g} standard errors.",
        }


@dataclass(frozen=True)
class Reason:
    """One rule that fired: the step where its condition began to hold, what was measured, and the threshold.

    `recovered` (reward_fall alone): whether the run ends at or above the threshold from its peak so far. `reward_held`
    (entropy_collapse alone): whether the smoothed reward ends at or above `end_fraction` of its peak.
    """

    rule: str
    step: int
    value: float | None
    threshold: float | None
    sentence: str
    recovered: bool | None = None
    reward_held: bool | None = None


@dataclass(frozen=True)
class Verdict:
    """Stable (True), collapsed (False) or undecided (None), and why; `first_step` is where the first reason begins.

    `remarks` are sentences on a stable run that change no verdict. Of the reward, `summary` has the highest trailing
    mean of the first window (`reward_first`) and of the run (`reward_peak`), both as the rules rank them, the last one
    (`reward_final`), and `drawdown` = 1 - final / peak, in [0, 1]; absent where the peak is not above 0.
    """

    stable: bool | None
    reasons: tuple[Reason, ...]
    undecided: tuple[str, ...]
    summary: dict[str, float | int]
    rules: VerdictRules
    remarks: tuple[str, ...] = ()

    @property
    def first_step(self) -> int | None:
        """The step of the earliest reason; None where no rule fired."""
        return min((reason.step for reason in self.reasons), default=None)

    @property
    def word(self) -> str:
        """stable, collapsed or undecided."""
        return {True: "stable", False: "collapsed", None: "undecided"}[self.stable]

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain values for verdict.json, with the rules behind it."""
        return {
            "stable": self.stable,
            "verdict": self.word,
            "first_step": self.first_step,
            "reasons": [asdict(reason) for reason in self.reasons],
            "undecided": list(self.undecided),
            "remarks": list(self.remarks),
            "summary": self.summary,
            "thresholds": dict(self.rules),
            "rules": self.rules.describe(),
        }


def judge(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules | None = None) -> Verdict:
    """The verdict on a run's metrics.jsonl: one mapping per global step, steps ascending (ValueError otherwise).

    A rule that fired makes the run collapsed, however short it is. Otherwise a run with too few steps, without a series
    that a rule needs, or whose reward is never above the noise is undecided, with the cause.
    """
    rules = VerdictRules() if rules is None else rules
    steps = [int(record["step"]) for record in metrics]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            raise ValueError(f"expected ascending steps, got {after} after {before}")
    found = [rule(metrics, rules) for rule in (_non_finite, _reward_fall, _kl_blowup, _entropy_collapse)]
    reasons = sorted((reason for reason in found if reason is not None), key=lambda reason: reason.step)
    undecided, summary = [], _summary(metrics, rules)
    num_steps = summary["num_steps"]
    if num_steps < rules.min_steps:
        recorded = "1 step is" if num_steps == 1 else f"{num_steps} steps are"
        undecided.append(f"{recorded} recorded, and the rules need {rules.min_steps}")
    for name in (REWARD, KL, ENTROPY):
        num_values = len(series(metrics, name))
        # Of a short run the line above says it already.
        if num_steps >= rules.min_steps > num_values:
            at = "1 step" if num_values == 1 else f"{num_values} steps"
            undecided.append(f"{name} is recorded at {at}, and the rules need {rules.min_steps}")
    # From noise nothing can fall: the reward does not say whether such a run holds or died at once.
    if not undecided and not (peak := highest(_levels(metrics, rules))).sure > rules.reward_min:
        undecided.append(
            f"{REWARD} peaks at {peak.value:.3g} (step {peak.step}), after its noise at most {rules.reward_min:g} "
            "(verdict.reward_min), so a fall could not be seen"
        )
    stable = False if reasons else None if undecided else True
    return Verdict(
        stable,
        tuple(reasons),
        tuple(undecided),
        summary,
        rules,
        remarks=_remarks(metrics, rules) if stable else (),
    )


def _non_finite(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> Reason | None:
    for record in metrics:
        # A row of metrics.jsonl names them and has null as their value; a row in memory has the value itself.
        bare = [n for n, v in record.items() if isinstance(v, float) and not math.isfinite(v)]
        names = [*record.get("non_finite", ()), *bare]
        if names:
            sentence = f"{', '.join(names)} was not finite at step {record['step']}."
            return Reason("non_finite", int(record["step"]), None, None, sentence)
    return None


def _reward_fall(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> Reason | None:
    found = _levels(metrics, rules)
    peaks = list(itertools.accumulate(found, lambda peak, level: highest([peak, level])))
    # A peak no higher than noise sets no limit: nothing is below -inf.
    limits = [rules.reward_fall * peak.sure if peak.sure > rules.reward_min else -math.inf for peak in peaks]
    # The lowered mean counts as a peak only; a fall is judged by the mean itself.
    fallen = [level.value < limit for level, limit in zip(found, limits, strict=True)]
    start = _first_lasting(fallen, rules.patience)
    if start is None:
        return None
    level, peak = found[start], peaks[start]
    recovered = not fallen[-1]
    end = f"; it recovered and ends at {found[-1].value:.3g}" if recovered else ""
    sentence = (
        f"The reward fell to {level.value:.3g} at step {level.step}, below {rules.reward_fall:g} of its peak "
        f"{peak.value:.3g} (step {peak.step}){end}."
    )
    return Reason("reward_fall", level.step, level.value, limits[start], sentence, recovered)


def _kl_blowup(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> Reason | None:
    values = series(metrics, KL)
    # No reason, and yet no stable run: `min_steps` exceeds `early_steps`, so `judge` has it under `undecided`.
    if len(values) < rules.early_steps:
        return None
    # A median: one early spike would lift a mean, and with it the limit of the whole run.
    early = median(value for _, value in values[: rules.early_steps])
    # kl_limit always counts; kl_floor keeps a multiple of a tiny early KL from counting.
    limit = min(rules.kl_limit, max(rules.kl_factor * early, rules.kl_floor))
    start = _first_lasting([value > limit for _, value in values], rules.patience)
    if start is None:
        return None
    step, value = values[start]
    origin = "the limit" if limit == rules.kl_limit else f"the limit from its early median {early:.3g}"
    sentence = (
        f"The training-inference KL rose to {value:.3g} nats per token at step {step}, above {origin}, {limit:.3g}."
    )
    return Reason("kl_blowup", step, value, limit, sentence)


def _entropy_collapse(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> Reason | None:
    values = series(metrics, ENTROPY)
    if len(values) < rules.early_steps:
        return None
    early = median(value for _, value in values[: rules.early_steps])
    limit = max(rules.entropy_floor, rules.entropy_fraction * early)
    reward = dict(trailing_mean(series(metrics, REWARD), rules.window))
    # A step without a reward counts as unsolved.
    low = [value < limit and reward.get(step, 0.0) < rules.solved_reward for step, value in values]
    start = _first_lasting(low, rules.patience)
    if start is None:
        return None
    step, value = values[start]
    found = _levels(metrics, rules)
    peak, final = (highest(found).value, found[-1].value) if found else (0.0, 0.0)
    has_held = peak > rules.reward_min and final >= rules.end_fraction * peak
    end = f"; the reward ends at {final:.3g}, its peak is {peak:.3g}" if has_held else ""
    sentence = (
        f"The entropy fell to {value:.3g} nats per token at step {step}, below {limit:.3g} (early median {early:.3g})"
        f"{end}."
    )
    return Reason("entropy_collapse", step, value, limit, sentence, reward_held=has_held)


def _levels(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> list[Level]:
    """The smoothed reward; its first value precedes every update, because a global step samples before it updates."""
    return levels(series(metrics, REWARD), rules.window, rules.noise_margin)


def _remarks(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> tuple[str, ...]:
    """A remark if a stable run's reward ends well below its start, by more than the noise of both means."""
    found = _levels(metrics, rules)
    first, final = highest(found[: rules.window]), found[-1].value
    # Variances add: the standard error of a difference of two means of the window's length, in units of the noise.
    both = math.sqrt(2 / min(rules.window, len(found)))
    margin = rules.noise_margin * noise(series(metrics, REWARD)) * both
    if final >= min(rules.end_fraction * first.value, first.sure - margin):
        return ()
    start = f"{first.value:.3g} at the start (step {first.step})"
    return (f"The reward ends at {final:.3g}, below {rules.end_fraction:g} of its {start}.",)


def _first_lasting(condition: Sequence[bool], patience: int) -> int | None:
    """The index at which the first `patience` Trues in a row begin."""
    length = 0
    for i, is_true in enumerate(condition):
        length = length + 1 if is_true else 0
        if length == patience:
            return i + 1 - patience
    return None


def _summary(metrics: Sequence[Mapping[str, Any]], rules: VerdictRules) -> dict[str, float | int]:
    """The numbers behind the rules; a series without values is omitted."""
    # Row 0 is an evaluation before the first step.
    summary: dict[str, float | int] = {"num_steps": sum(int(record["step"]) > 0 for record in metrics)}
    if metrics:
        summary["last_step"] = int(metrics[-1]["step"])
    found = _levels(metrics, rules)
    if found:
        first, peak, final = highest(found[: rules.window]).value, highest(found).value, found[-1].value
        summary |= {"reward_first": first, "reward_peak": peak, "reward_final": final}
        if peak > 0:
            # Peaks rank by their lowered means, so the last mean may be above the peak; rewards may be below 0.
            summary["drawdown"] = min(1.0, max(0.0, 1 - final / peak))
    for name, label in ((KL, "k3_kl"), (ENTROPY, "entropy")):
        values = [value for _, value in series(metrics, name)]
        if values:
            summary |= {f"{label}_early": median(values[: rules.early_steps]), f"{label}_final": values[-1]}
            summary[f"{label}_max"] = max(values)
    return summary
