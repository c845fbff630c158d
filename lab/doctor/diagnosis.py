"""From a trace to a diagnosis: the causes by strength, and the words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.evidence import CLUES, gather
from lab.doctor.reliability import share_right
from lab.doctor.undecided import UNDECIDED, candidates
from lab.doctor.words import HARMLESS
from lab.report.style import number
from lab.traces import Trace

NAMED = 0.25
"""A second cause of at least this strength is named beside the first."""
TRIED_ON = 2500
"""Sampled tokens of the smallest traces whose planted faults docs/doctor.md counts."""


@dataclass(frozen=True)
class Diagnosis:
    """The evidence, and the strength of every cause in [0, 1], the strongest first."""

    seen: Mapping[str, float]
    strengths: Mapping[Cause, float]

    @property
    def candidates(self) -> list[Cause]:
        """The causes that one step does not tell apart, the strongest first; none where the strongest stands alone."""
        return candidates(self.seen, self.strengths)

    @property
    def named(self) -> list[Cause]:
        """The strongest cause, and the next one if it is strong enough to be named; UNDECIDED alone with candidates."""
        if self.candidates:
            return [UNDECIDED]
        first, second, *_ = self.strengths
        return [first, second] if self.strengths[second] >= NAMED else [first]

    @property
    def share_right(self) -> float | None:
        """The share of planted causes that were right when named at this strength, in [0, 1]; None where undecided."""
        return None if self.candidates else share_right(self.strengths[self.named[0]])

    @property
    def fault(self) -> Cause | None:
        """The strongest cause where it is a fault; None for nothing wrong and for rounding too small to matter."""
        first = self.named[0]
        harmless = first.name == "precision" and self.seen["k3_kl"] < HARMLESS
        return None if first.name == "nothing" or harmless else first

    @property
    def verdict(self) -> str:
        """The likely cause, in one sentence."""
        first = self.named[0]
        lead = "it looks like" if self.fault else "nothing to mend; it looks like"
        if first is UNDECIDED:
            of = " or ".join(f"{cause.title} ({self.strengths[cause]:.2f})" for cause in self.candidates)
            return f"undecided: {lead} {of}."
        return f"{lead} {first.title} (strength {self.strengths[first]:.2f})."

    @property
    def caution(self) -> str | None:
        """A caution that there are fewer tokens than the rules were tried on; None where there are enough."""
        num = int(self.seen["num_tokens"])
        if num >= TRIED_ON:
            return None
        return f"{num:,} tokens are few: the rules were tried on {TRIED_ON:,} and more. A larger trace tells more."

    def lines(self) -> list[str]:
        """The verdict, what to do first, and for each named cause what it is with its evidence, in plain words."""
        first, *others = self.named
        out = [self.verdict, f"Do first: {first.fix}", *([] if self.caution is None else [self.caution])]
        out += self._told(first)
        for cause in others:
            out += [f"Or, less likely, {cause.title} (strength {self.strengths[cause]:.2f}).", *self._told(cause)]
            out.append(f"  Then: {cause.fix}")
        return out

    def _told(self, cause: Cause) -> list[str]:
        return [f"  {cause.words(self.seen)}", *(f"    {name:<34} {value}" for name, value in self.evidence(cause))]

    def evidence(self, cause: Cause) -> list[tuple[str, str]]:
        """The clues that speak for or against a cause: title and value."""
        titles = {"nonfinite_share": "values that are not finite"} | {name: clue.title for name, clue in CLUES.items()}
        return [(titles[name], number(self.seen[name])) for name in cause.shows if name in self.seen]


def diagnose(trace: Trace) -> Diagnosis:
    """The diagnosis of one trace; ValueError where no token was sampled."""
    seen = gather(trace)
    return Diagnosis(seen, weigh(seen))


def weigh(seen: Mapping[str, float]) -> dict[Cause, float]:
    """Each cause's strength, the largest first: its weight times what the causes before it have left unexplained."""
    left, strengths = 1.0, {}
    for cause in CAUSES:
        weight = 0.0 if "nonfinite_share" in seen and cause.name != "not_finite" else cause.rule(seen)
        strengths[cause] = left * weight
        if cause.explains:
            left *= 1 - weight
    strengths[UNKNOWN] = 0.0 if seen.get("exact_share") == 1 else left
    return dict(sorted(strengths.items(), key=lambda item: -item[1]))
