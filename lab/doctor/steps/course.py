"""The doctor over the steps of a run: each step's diagnosis, the growth of the gap, and the faults that span steps.

Steps are read one after the other and freed; only a few numbers of each remain, and a table of draws whose size does
not depend on the number of steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from lab.doctor import routes
from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.diagnosis import Diagnosis, diagnose, weigh
from lab.doctor.steps.arrival import Arrivals, Slope, Version
from lab.doctor.steps.causes import GROWN, STEPS_CAUSES
from lab.doctor.steps.places import GapGroup, Places, named
from lab.doctor.steps.shape import FLOOR, Growth, growth
from lab.doctor.undecided import UNDECIDED, of_run
from lab.doctor.view import View
from lab.doctor.words import HARMLESS
from lab.traces import Trace

FIGURES: Mapping[str, str] = {
    "k3_kl": "k3 KL(mu, old)",
    "extreme_frac_tau2": "F(2)",
    "mean_gap": "mean |log old - log mu|",
    "router_disagreement": "share of routers that differ",
}
"""The figures followed over the steps: clues by name, and the mean gap in nats."""
BY_NAME: Mapping[str, Cause] = {cause.name: cause for cause in (*CAUSES, UNKNOWN, UNDECIDED, *STEPS_CAUSES)}


@dataclass(frozen=True)
class StepRecord:
    """The record of one step."""

    number: int
    num_responses: int
    diagnosis: Diagnosis
    mean_gap: float | None
    kl_by_layer: Mapping[int, float] | None = None
    """The k3 KL, nats per token, by the first layer whose experts differ (routes.py)."""

    def figure(self, name: str) -> float | None:
        """One of FIGURES; None where the step has no data for it, and where it is not finite."""
        value = self.mean_gap if name == "mean_gap" else self.diagnosis.seen.get(name)
        return value if value is not None and math.isfinite(value) else None

    @property
    def is_endless(self) -> bool:
        """Whether a ratio is beyond float64, so that the k3 KL is infinite although every log-probability is finite."""
        return self.diagnosis.seen.get("k3_kl", 0.0) == math.inf

    @property
    def shares(self) -> dict[str, float]:
        """The strengths of the causes that explain a gap, by name, as shares that sum to 1."""
        strengths = {c.name: s for c, s in self.diagnosis.strengths.items() if c.explains}
        total = sum(strengths.values())
        return {name: s / total for name, s in strengths.items()} if total else {}


@dataclass(frozen=True)
class Course:
    """The steps of a run in order, and their joint reading."""

    steps: Sequence[StepRecord]
    version: Version | None
    slope: Slope | None
    """From the last step before the KL's change on, where the weights were right."""
    late_slope: Slope | None
    """From the change on; shows whether the gap grows on the same draws."""
    places: Sequence[GapGroup]

    @cached_property
    def growths(self) -> dict[str, Growth | None]:
        """The change of each figure over the steps that have it; its place is an index into `series`."""
        return {name: growth([value for _, value in self.series(name)]) for name in FIGURES}

    def series(self, name: str) -> list[tuple[int, float]]:
        """A figure's (step number, value) pairs."""
        return [(step.number, value) for step in self.steps if (value := step.figure(name)) is not None]

    def since(self, name: str = "k3_kl") -> int | None:
        """The step from which on the figure changes; None if it is steady."""
        found = self.growths[name]
        return None if found is None else self.series(name)[found.at][0]

    @cached_property
    def late(self) -> Sequence[StepRecord]:
        """The steps since the KL's change; all steps if it is steady."""
        since = self.since()
        return [step for step in self.steps if since is None or step.number >= since]

    @property
    def early(self) -> Sequence[StepRecord]:
        """The steps before the KL's change."""
        return [step for step in self.steps if step.number < self.late[0].number]

    @cached_property
    def seen(self) -> dict[str, float]:
        """The clues that span steps, by name."""
        seen: dict[str, float] = {"other_weights": self._share_of("stale", "unknown")}
        if self.version is not None:
            of = self.version
            seen |= {"version_left": of.left, "version_draws": of.num_draws}
            seen |= {"stopped_since": of.since} if of.since is not None else {"steps_behind": of.lag or 0}
        if self.slope is not None:
            of = self.slope
            seen |= {"slope": of.value, "slope_error": of.error, "slope_draws": of.num_draws, "gap_grown": of.grown}
        found = self.growths["k3_kl"]
        if found is not None and found.is_rising:
            seen["kl_grown"] = found.after / max(found.before, FLOOR)
        for name, found in named(self.places).items():
            seen |= {f"{name}_group": found.group, f"{name}_times": found.times, f"{name}_p": found.p}
        return seen

    def _share_of(self, *names: str) -> float:
        """The share of the late steps, in [0, 1], whose own strongest cause of the gap is one of these."""
        strongest = [next(c.name for c in step.diagnosis.strengths if c.explains) for step in self.late]
        return sum(name in names for name in strongest) / len(strongest)

    @cached_property
    def joint(self) -> Diagnosis:
        """The diagnosis of the late steps by their pooled clues."""
        return joint(self.late, self._refuted)

    @cached_property
    def spanning(self) -> list[Cause]:
        """The faults that span steps, in the order of STEPS_CAUSES."""
        return [cause for cause in STEPS_CAUSES if cause.rule(self.seen) >= 0.5]

    @property
    def named(self) -> Cause:
        """The first fault that spans steps, or else the cause over the late steps, which may be *undecided*."""
        if self.spanning:
            return self.spanning[0]
        first = self.joint.named[0]
        return of_run(first) if first.name == UNDECIDED.name else first

    @property
    def before(self) -> Cause:
        """The cause over the early steps."""
        return joint(self.early, self._refuted).named[0]

    @property
    def _refuted(self) -> frozenset[str]:
        """`stale`, if shared draws show that no earlier version fits and that the gap on them does not grow."""
        is_shown = self.late_slope is not None and self.version is None and self.late_slope.grown < GROWN
        return frozenset({"stale"}) if is_shown else frozenset()

    @property
    def fault(self) -> Cause | None:
        """The named cause if it is a fault; None for nothing wrong and for rounding too small to matter."""
        if self.named.name == "nothing":
            return None
        if self.named.name != "precision":
            return self.named
        values = [value for step in self.late if (value := step.figure("k3_kl")) is not None]
        return None if values and median(values) < HARMLESS else self.named


def pooled(steps: Sequence[StepRecord]) -> dict[str, float]:
    """The clues of several steps as one step's: medians; for clues in standard errors (`_z`), the sum over root n.

    A step with log-probabilities that are not finite contributes their share, which outweighs all other clues. A clue
    that is nan at some steps (rho_z where a ratio is infinite) is that of the others.
    """
    of: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.diagnosis.seen.items():
            of[name].append(value)
    known = {name: [value for value in values if not math.isnan(value)] or values for name, values in of.items()}
    return {
        name: sum(values) / len(values) ** 0.5 if name.endswith("_z") else median(values)
        for name, values in known.items()
    }


def joint(steps: Sequence[StepRecord], refuted: Container[str] = ()) -> Diagnosis:
    """The diagnosis by pooled clues, which err less often than one step's; `refuted` causes have strength 0."""
    seen = pooled(steps)
    return Diagnosis(seen, weigh(seen, refuted))


class Watch:
    """The doctor's record of a run, from traces added in the order of their steps."""

    def __init__(self, is_dense: bool = False) -> None:
        self.is_dense = is_dense
        """Whether the model is known to have no routers."""
        self.steps: list[StepRecord] = []
        self.worst: Trace | None = None
        """The trace with the largest finite KL so far, the only one kept."""
        # Below any KL: the first trace is kept even if its KL is 0.
        self._most = -1.0
        self._arrivals, self._places = Arrivals(), Places()

    def add(self, trace: Trace) -> StepRecord:
        """Adds a step; ValueError where no token was sampled."""
        found, view = diagnose(trace, is_dense=self.is_dense), View.of(trace)
        is_finite = "nonfinite_share" not in found.seen
        gap = view.d_n.abs().mean().item() if is_finite else None
        # Parts of an infinite KL are no shares of it.
        by_layer = routes.kl_by_first_layer(view) if math.isfinite(found.seen.get("k3_kl", math.inf)) else None
        self.steps.append(StepRecord(trace.step, len(trace), found, gap, by_layer))
        if is_finite:
            self._arrivals.add(trace.step, view)
            self._places.add(trace.step, view)
        k3 = self.steps[-1].figure("k3_kl") or 0.0
        if k3 > self._most:
            self._most, self.worst = k3, trace  # the former worst is freed here
        return self.steps[-1]

    def course(self) -> Course:
        """The reading of all steps together; ValueError without any."""
        if not self.steps:
            raise ValueError("steps: expected at least 1, got none")
        # The windows of the other fields follow from the KL's change, which needs the steps alone.
        bare = Course(tuple(self.steps), None, None, None, ())
        first = bare.late[0].number
        # The slope starts one step before the change, where the weights were still right.
        begin = bare.early[-1].number if bare.early else first
        return Course(
            bare.steps,
            version=self._arrivals.version(),
            slope=self._arrivals.slope(begin),
            late_slope=self._arrivals.slope(first),
            places=self._places.found(first),
        )

    @property
    def num_shared(self) -> int:
        """Draws in memory that at least two steps share."""
        return self._arrivals.num_shared
