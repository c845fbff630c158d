"""The treatment of each run of a report, read from its config: the engine's gap, the remedies, and N.

A remedy is a correction of the gap, a replay mode or a dual clip. The engine and N are named where they are not those
of most configs. Runs of one config under several seeds are one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from lab.config.algorithm import ObjectiveBlock
from lab.report.runs import ReportRun, by_treatment, shared_label
from lab.strict import ConfigError, validate
from theory.objectives import CORRECTIONS, Objective
from theory.objectives.presets.dual_clip import DualClip
from theory.routing.passes import PASSES

REPLAY = {mode: f"{mode} {plan.effect}" for mode, plan in PASSES.items() if plan.effect}
"""The effect of each replay mode, in a clause."""


@dataclass(frozen=True)
class Usual:
    """The preset, the engine and N that go without saying in a report; None where none does."""

    preset: str | None
    engine: str | None
    num_minibatches: int | None


@dataclass(frozen=True)
class Treatment:
    """Engine and remedies by one run's config; a property is None where the config cannot be read."""

    run: ReportRun

    @cached_property
    def is_exact(self) -> bool:
        """Whether the inference engine computes exactly as the training engine."""
        is_named = self.run.engine == "exact" or self.run.engine.startswith("exact (")
        return is_named and not self.run.training_alone

    @cached_property
    def objective(self) -> Objective | None:
        """The objective that the run optimised."""
        block = self.run.setting("algorithm", "objective")
        try:
            return validate(ObjectiveBlock, block, "").build() if isinstance(block, dict) else None
        except ConfigError:  # written by another version of the project
            return None

    @property
    def preset(self) -> str | None:
        """The objective's preset in the papers' spelling, without the name of its dual clip."""
        return None if self.objective is None else self.objective.title.removesuffix(" with dual clip")

    @property
    def dual_clip(self) -> float | None:
        """The largest ratio where the advantage is negative; None without a dual clip."""
        region = None if self.objective is None else self.objective.trust_region
        return region.clip_ratio_c if isinstance(region, DualClip) else None

    @property
    def own_correction(self) -> str | None:
        """The correction by which the config replaces the preset's."""
        block = self.run.setting("algorithm", "objective", "correction")
        name = block.get("name") if isinstance(block, dict) else None
        return None if name is None else CORRECTIONS[name].title if name in CORRECTIONS else str(name)

    @property
    def replay(self) -> str | None:
        """The replay mode; None for `none`."""
        mode = self.run.setting("algorithm", "replay", "mode")
        return None if mode in (None, "none") else str(mode)

    @property
    def num_minibatches(self) -> int | None:
        """N; None where the config does not state it."""
        num = self.run.setting("algorithm", "batch", "num_minibatches")
        return num if isinstance(num, int) else None

    @property
    def is_untreated(self) -> bool:
        """Whether there is a gap, and no correction, centering, replay or dual clip."""
        own = self.objective
        # Settings of another trainer may be a remedy that the config does not state.
        if own is None or self.run.setting("trainer_settings"):
            return False
        # A region whose own factor holds pi/mu, such as VESPO's, corrects without a correction.
        is_corrected = own.centering != "none" or own.trust_region.weight_ratio == "none"
        is_corrected = is_corrected or {own.correction.name, own.rejection.name} != {"none"}
        return not (self.is_exact or is_corrected or self.replay or self.dual_clip)

    def parts(self, usual: Usual, engines: Literal["same", "exact", "differ"]) -> list[str]:
        """The treatment in words: preset unless it is the usual one, correction, replay, dual clip, engine likewise.

        `engines` describes the report's engines: all the same, one inexact engine beside an exact one, or more kinds.
        """
        rejection = self.objective.rejection.title if self.objective and self.objective.rejection.rejection else None
        found = [None if self.preset == usual.preset else self.preset, self.own_correction, rejection, self.replay]
        found += ["score centering"] if self.objective and self.objective.centering != "none" else []
        found += ["a dual clip"] if self.dual_clip else []
        if self.run.setting("trainer"):
            found.append("another trainer" + (" and its own settings" if self.run.setting("trainer_settings") else ""))
        if engines != "same" and self.is_exact:
            found.append("an exact engine")
        elif engines == "differ" and self.run.engine != usual.engine:
            found.append(self.run.engine)
        return [part for part in found if part]

    def clauses(self) -> list[str]:
        """The effects of the remedies, one clause each: replay by its mode, a correction by its formula."""
        clauses = [REPLAY[self.replay]] if self.replay in REPLAY else []
        if self.dual_clip:
            clauses.append(f"a dual clip bounds pi/old at {self.dual_clip:g} where the advantage is negative")
        if self.objective is None:
            return clauses
        if self.objective.centering != "none":
            clauses.append("score centering subtracts the mean of each term under mu")
        named = [(self.own_correction or self.preset, self.objective.correction)]
        named.append((self.objective.rejection.title, self.objective.rejection))
        for name, correction in named:
            if correction.symbol:
                clauses.append(f"{name} weighs each token by {correction.symbol}")
            if correction.rejection:
                clauses.append(f"{name} keeps a response only if {correction.rejection}")
        return clauses


@dataclass(frozen=True)
class TreatmentGroup:
    """Runs of one config under several seeds, with a name for them: `without a remedy`, `with R3`."""

    runs: tuple[ReportRun, ...]
    preposition: str
    name: str

    @property
    def words(self) -> str:
        """Preposition and name."""
        return f"{self.preposition} {self.name}"

    @property
    def seeds(self) -> list[int]:
        """The distinct seeds that the configs state, ascending."""
        return sorted({seed for run in self.runs if (seed := run.setting("seed")) is not None})


def groups(runs: Sequence[ReportRun]) -> list[TreatmentGroup]:
    """The runs grouped by config without the seed, each group under distinct words."""
    members = by_treatment(runs)
    treatments = [Treatment(some[0]) for some in members]
    engines = {treatment.run.engine for treatment in treatments if not treatment.is_exact}
    differ = "differ" if len(engines) > 1 else "exact" if len({t.is_exact for t in treatments}) > 1 else "same"
    presets = [treatment.preset for treatment in treatments]
    untreated = [treatment.preset for treatment in treatments if treatment.is_untreated]
    # The untreated runs' preset goes without saying; without such runs, the most frequent one.
    baseline = untreated[0] if untreated else max(presets, key=presets.count)
    engine = _of_most([treatment.run.engine for treatment in treatments])
    num = _of_most([treatment.num_minibatches for treatment in treatments])
    names = [_named(treatment, Usual(baseline, engine, num), differ) for treatment in treatments]
    return [
        TreatmentGroup(some, *(name if name and names.count(name) == 1 else ("in", shared_label(some, runs))))
        for some, name in zip(members, names, strict=True)
    ]


Value = TypeVar("Value")


def _of_most(values: Sequence[Value]) -> Value | None:
    """The value of more than half of the treatments; None without one."""
    return next((value for value in values if 2 * values.count(value) > len(values)), None)


def _named(treatment: Treatment, usual: Usual, engines: Literal["same", "exact", "differ"]) -> tuple[str, str] | None:
    """Preposition and name of a run's treatment, with N unless it is the usual one; None without a treatment."""
    parts, num = treatment.parts(usual, engines), treatment.num_minibatches
    at = "" if num in (None, usual.num_minibatches) else f" at N = {num}"
    if treatment.is_untreated and (not parts or engines == "differ"):
        return "without", " under ".join(["a remedy", *parts]) + at
    if not parts and treatment.preset:
        parts = [treatment.preset]
    return ("with", " + ".join(parts) + at) if parts else None
