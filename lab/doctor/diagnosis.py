"""The diagnosis of a trace: the causes by strength, and the words."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.evidence import CLUES, gather
from lab.doctor.layers.reference import ReferenceModules
from lab.doctor.reliability import share_right
from lab.doctor.replay_trial import ReplayTrial, try_replay, with_experts_old
from lab.doctor.undecided import DECIDED, NAMED, UNDECIDED, between, candidates, either, lacks_routes
from lab.doctor.words import HARMLESS
from lab.report.style import number
from lab.traces import Trace

OTHER_TITLES = {"nonfinite_share": "values that are not finite", "replay_removes": "share that replay removes"}
"""Titles of the clues that are no function of the trace's tokens."""
TRIED_ON = 2500
"""Sampled tokens in the smallest traces that docs/doctor.md counts."""


@dataclass(frozen=True)
class Diagnosis:
    """The evidence, and the strength of every cause in [0, 1], in the order of `weigh`."""

    seen: Mapping[str, float]
    strengths: Mapping[Cause, float]
    trial: ReplayTrial | None = None

    @property
    def candidates(self) -> list[Cause]:
        """The causes that one step cannot tell apart, the strongest first; none where the strongest is clear."""
        return candidates(self.seen, self.strengths)

    @property
    def named(self) -> list[Cause]:
        """The first cause, and the next one if it reaches NAMED; *undecided* in place of the candidates."""
        if causes := self.candidates:
            others = [c for c, s in self.strengths.items() if not c.explains and c not in causes and s >= NAMED]
            num_sure = sum(self.strengths[cause] >= DECIDED for cause in others)
            return [*others[:num_sure], between(causes, self.seen), *others[num_sure : num_sure + 1]]
        first, second, *_ = self.strengths
        return [first, second] if self.strengths[second] >= NAMED else [first]

    @property
    def strength_words(self) -> str:
        """The strength of the named cause; where undecided, the candidates, with theirs if they were counted."""
        return self._doubt if self.named[0].name == UNDECIDED.name else f"{self.strengths[self.named[0]]:.2f}"

    @property
    def _doubt(self) -> str:
        if lacks_routes(self.seen):
            return f"{either(self.candidates)} (without the experts of both sides this dump cannot tell)"
        # A candidate by the size of the gap alone has no strength: "(0.00)" would say that it is ruled out.
        strengths = [(cause.title, self.strengths[cause]) for cause in self.candidates]
        return " or ".join(title + (f" ({strength:.2f})" if strength >= 0.005 else "") for title, strength in strengths)

    @property
    def share_right(self) -> float | None:
        """The share of planted faults, in [0, 1], named rightly at this strength.

        None where it was not counted: undecided, where a trial decided, and without the experts of both sides."""
        is_counted = "router_disagreement" in self.seen and not self.candidates and self.trial is None
        return share_right(self.strengths[self.named[0]]) if is_counted else None

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
        if first.name == UNDECIDED.name:
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
            is_open = cause.name == UNDECIDED.name
            lead = "Or, less likely" if first.explains else "Besides"
            told = f"undecided: {self._doubt}" if is_open else f"{cause.title} (strength {self.strengths[cause]:.2f})"
            out += [f"{lead}, {told}.", *self._told(cause), f"  Then: {cause.fix}"]
        return out

    def _told(self, cause: Cause) -> list[str]:
        return [f"  {cause.words(self.seen)}", *(f"    {name:<34} {value}" for name, value in self.evidence(cause))]

    def evidence(self, cause: Cause) -> list[tuple[str, str]]:
        """The clues for or against a cause: title and value."""
        # `shows` lists every clue that may bear on a cause; a trace without routes or entropies has only some of them.
        titles = OTHER_TITLES | {name: clue.title for name, clue in CLUES.items()}
        return [(titles[name], number(self.seen[name])) for name in cause.shows if name in self.seen]


def diagnose(trace: Trace, reference: ReferenceModules | None = None, is_dense: bool = False) -> Diagnosis:
    """The diagnosis of one trace, with the replay trial where the model of old's weights is given and the sides differ.

    `is_dense`: the model is known to have no routers. Raises ValueError where no token was sampled, and where a trial
    would tell nothing.
    """
    seen = gather(trace)
    records = (trace.experts_mu, trace.experts_old)
    if is_dense or any(experts is not None and experts.shape[1] == 0 for experts in records):
        seen |= {"is_dense": 1.0}
    if trace.old_pass == "replay_rollout":
        seen |= {"is_replayed": 1.0}
    if reference is None or not seen.get("k3_kl", 0.0) > 0:  # values that are not finite have no k3
        return Diagnosis(seen, weigh(seen))
    trial = try_replay(trace, reference)
    if trace.experts_old is None:
        # The model scores as old does, so that its own experts are old's.
        seen = gather(with_experts_old(trace, reference, trial.precision))
    seen |= {"replay_removes": trial.removed}
    return Diagnosis(seen, weigh(seen), trial)


def weigh(seen: Mapping[str, float], refuted: Container[str] = ()) -> dict[Cause, float]:
    """Each cause's strength in [0, 1]: its weight times the share that earlier causes leave; 0 for `refuted` causes.

    The largest comes first, after the faults from DECIDED on that explain no gap.
    """
    left, strengths = 1.0, {}
    for cause in CAUSES:
        # With NaN or infinite values no other clue was computed.
        is_out = cause.name in refuted or ("nonfinite_share" in seen and cause.name != "not_finite")
        weight = 0.0 if is_out else cause.rule(seen)
        strengths[cause] = left * weight
        if cause.explains:
            left *= 1 - weight
    # Equal bits leave no gap that would need a cause.
    strengths[UNKNOWN] = 0.0 if seen.get("exact_share") == 1 else left
    # A stable sort: of equal strengths the earlier cause comes first. A fault that explains no gap competes with no
    # other cause; harmless rounding, whose strength is often 1, would hide it.
    return dict(sorted(strengths.items(), key=lambda item: (item[0].explains or item[1] < DECIDED, -item[1])))
