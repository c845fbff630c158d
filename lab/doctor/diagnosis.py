"""The diagnosis of a trace: the causes by strength, and the words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.evidence import CLUES, gather
from lab.doctor.layers.reference import ReferenceModules
from lab.doctor.reliability import share_right
from lab.doctor.replay_trial import ReplayTrial, try_replay
from lab.doctor.undecided import between, candidates
from lab.doctor.words import HARMLESS
from lab.report.style import number
from lab.traces import Trace

NAMED = 0.25
"""A second cause of at least this strength is named beside the first."""
OTHER_TITLES = {"nonfinite_share": "values that are not finite", "replay_removes": "share that replay removes"}
"""Titles of the clues that are no function of the trace's tokens."""
TRIED_ON = 2500
"""Sampled tokens in the smallest traces that docs/doctor.md counts."""


@dataclass(frozen=True)
class Diagnosis:
    """The evidence, and the strength of every cause in [0, 1], the strongest first."""

    seen: Mapping[str, float]
    strengths: Mapping[Cause, float]
    trial: ReplayTrial | None = None

    @property
    def candidates(self) -> list[Cause]:
        """The two causes that one step cannot tell apart, the strongest first; none where the strongest is clear."""
        return candidates(self.seen, self.strengths)

    @property
    def named(self) -> list[Cause]:
        """The strongest cause, and the next one if it reaches NAMED; *undecided* alone where there are candidates."""
        if pair := self.candidates:
            return [between(*pair, is_tried=self.trial is not None)]
        first, second, *_ = self.strengths
        return [first, second] if self.strengths[second] >= NAMED else [first]

    @property
    def strength_words(self) -> str:
        """The strength of the named cause; where undecided, both candidates with theirs."""
        pair = [f"{cause.title} ({self.strengths[cause]:.2f})" for cause in self.candidates]
        return " or ".join(pair) if pair else f"{self.strengths[self.named[0]]:.2f}"

    @property
    def share_right(self) -> float | None:
        """The share of planted faults, in [0, 1], named rightly at this strength.

        None where undecided, and where a trial decided, as it is counted without trials."""
        return None if self.candidates or self.trial is not None else share_right(self.strengths[self.named[0]])

    @property
    def fault(self) -> Cause | None:
        """The strongest cause if it is a fault; None for nothing wrong and for rounding too small to matter."""
        first = self.named[0]
        harmless = first.name == "precision" and self.seen["k3_kl"] < HARMLESS
        return None if first.name == "nothing" or harmless else first

    @property
    def verdict(self) -> str:
        """The likely cause, in one sentence."""
        first = self.named[0]
        lead = "it looks like" if self.fault else "nothing to fix; it looks like"
        if self.candidates:
            return f"undecided: {lead} {self.strength_words}."
        return f"{lead} {first.title} (strength {self.strength_words})."

    @property
    def caution(self) -> str | None:
        """A warning that the trace has fewer tokens than the rules were tested on; None where it has enough."""
        num = int(self.seen["num_tokens"])
        if num >= TRIED_ON:
            return None
        return f"{num:,} tokens are few: the rules were tested on {TRIED_ON:,} or more. A larger trace tells more."

    def lines(self) -> list[str]:
        """The verdict, the first thing to do, and each named cause in plain words with its evidence."""
        first, *others = self.named
        out = [self.verdict, f"Do first: {first.fix}", *([] if self.caution is None else [self.caution])]
        out += [] if self.trial is None else [self.trial.sentence]
        out += self._told(first)
        for cause in others:
            out += [f"Or, less likely, {cause.title} (strength {self.strengths[cause]:.2f}).", *self._told(cause)]
            out.append(f"  Then: {cause.fix}")
        return out

    def _told(self, cause: Cause) -> list[str]:
        return [f"  {cause.words(self.seen)}", *(f"    {name:<34} {value}" for name, value in self.evidence(cause))]

    def evidence(self, cause: Cause) -> list[tuple[str, str]]:
        """The clues for or against a cause: title and value."""
        # `shows` lists every clue that may bear on a cause; a trace without routes or entropies has only some of them.
        titles = OTHER_TITLES | {name: clue.title for name, clue in CLUES.items()}
        return [(titles[name], number(self.seen[name])) for name in cause.shows if name in self.seen]


def diagnose(trace: Trace, reference: ReferenceModules | None = None) -> Diagnosis:
    """The diagnosis of one trace, with the replay trial where the model of old's weights is given and the sides differ.

    Raises ValueError where no token was sampled, and where a trial would tell nothing.
    """
    seen = gather(trace)
    if reference is None or not seen.get("k3_kl", 0.0) > 0:  # values that are not finite have no k3
        return Diagnosis(seen, weigh(seen))
    trial = try_replay(trace, reference)
    seen |= {"replay_removes": trial.removed}
    return Diagnosis(seen, weigh(seen), trial)


def weigh(seen: Mapping[str, float]) -> dict[Cause, float]:
    """Each cause's strength in [0, 1], the largest first: its weight times the share that earlier causes leave."""
    left, strengths = 1.0, {}
    for cause in CAUSES:
        # With NaN or infinite values no other clue was computed.
        weight = 0.0 if "nonfinite_share" in seen and cause.name != "not_finite" else cause.rule(seen)
        strengths[cause] = left * weight
        if cause.explains:
            left *= 1 - weight
    # Equal bits leave no gap that would need a cause.
    strengths[UNKNOWN] = 0.0 if seen.get("exact_share") == 1 else left
    # A stable sort: of equal strengths the earlier cause comes first.
    return dict(sorted(strengths.items(), key=lambda item: -item[1]))
