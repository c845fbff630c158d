"""One line of the ledger per claim: state, seeds, effect, power and cost; and the words for numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sandbox.ledger.claim import Claim, Prediction, Row
from sandbox.ledger.power import Need
from sandbox.ledger.verdicts import Finding, Outcome, among_ready, mean_of

OUT_OF_REACH, TRIED_AGAIN, OPEN = "out of reach", "tried again", "–"
ORDER = ("reproduced", "not reproduced", "opposite", "not applicable", "inconclusive", TRIED_AGAIN, OPEN, OUT_OF_REACH)
"""States in the order of the page: decided ones first."""


@dataclass(frozen=True)
class ClaimLine:
    """A claim's line: its state, one of ORDER, and its numbers as text, empty if there are none."""

    claim: Claim
    state: str
    predictions: str
    n: str
    effect: str
    power: str
    cost: str


def lines(claims: Sequence[Claim], found: Sequence[Finding], needed: Mapping[int, Need]) -> list[ClaimLine]:
    """A line for every claim, sorted by state (decided first), then by number."""
    deciding = {one.claim.number: one for one in found if one.decides}
    made = [_line(claim, deciding.get(claim.number), needed[claim.number]) for claim in claims]
    repeated = {claim.repeats for claim in claims}
    made = [
        replace(line, state=TRIED_AGAIN) if line.state == "inconclusive" and line.claim.number in repeated else line
        for line in made
    ]
    return sorted(made, key=lambda line: (ORDER.index(line.state), line.claim.number))


def _line(claim: Claim, found: Finding | None, need: Need) -> ClaimLine:
    asked = len(claim.deciding()) if found is None else len(found.seeds)
    if found is None and need.is_out_of_reach:
        return ClaimLine(claim, OUT_OF_REACH, "", "", "", "", cost_text(need.hours))
    power = need.power(asked)
    shown = (OPEN if math.isnan(power) else f"{power:.0%}", cost_text(asked * need.hours_per_seed))
    if found is None or found.word is None:
        runs = 0 if found is None else min((len(one.values) for one in found.outcomes), default=0)
        return ClaimLine(claim, OPEN, "", f"{runs}/{asked}" if asked else "", "", *(shown if asked else ("", "")))
    key = key_outcome(found)
    effect = "" if key is None else effect_text(key)
    return ClaimLine(claim, found.word, stands_text(found.outcomes), str(asked), effect, *shown)


def stands_text(outcomes: Sequence[Outcome]) -> str:
    """The number of predictions in each reading by its own test."""
    counts = Counter(word_text(one) for one in outcomes)
    return ", ".join(f"{counts[word]} {word}" for word in ("for", "against", "open", "not applicable") if counts[word])


def key_outcome(found: Finding) -> Outcome | None:
    """The outcome on which a claim's verdict rests: the least sure to hold, or, if it fails, the surest to fail."""
    known = [one for one in found.applicable if one.p is not None]
    if not known or found.joint is None:
        return None
    holds = found.joint[0] < found.joint[1]
    return max(known, key=lambda o: o.p[0]) if holds else min(known, key=lambda o: o.p[1])  # pyright: ignore


def counts_text(made: Sequence[ClaimLine]) -> str:
    """The number of claims in each state, in words."""
    counts = Counter("without all runs" if line.state == OPEN else line.state for line in made)
    order = [*ORDER[:6], "without all runs", OUT_OF_REACH]
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])


def waiting_text(found: Sequence[Finding]) -> str:
    """A sentence on the claims that are inconclusive only because others lack runs; empty if there are none."""
    words = {one.claim.number: one.word for one in found if one.decides}
    other = [one for one in among_ready(found) if one.word != words[one.claim.number]]
    if not other:
        return ""
    named = ", ".join(f"{one.claim.number} ({one.word})" for one in sorted(other, key=lambda one: one.claim.number))
    return f"Corrected only over the claims that have their runs, these would be decided too: {named}."


def spent(rows: Mapping[str, Row]) -> str:
    """The number of runs, their hours of one thread, and their machines, in a sentence."""
    machines = Counter(f"{row['machine']}, torch {row['torch']}" for row in rows.values())
    seconds = math.fsum(row.get("seconds") or 0.0 for row in rows.values())
    names = "; ".join(f"{count} on {name}" for name, count in machines.most_common())
    compiled = sum(bool(row.get("compiled")) for row in rows.values())
    names += f"; {compiled} with compiled kernels" if compiled else ""
    return f"{len(rows)} runs, {seconds / 3600:.1f} hours of one thread: {names}." if rows else "No run has been made."


def cost_text(hours: float) -> str:
    return OPEN if math.isnan(hours) else f"{hours:.1f} h"


def word_text(outcome: Outcome) -> str:
    """The reading of one prediction by its own test, or its number of seeds if some are missing."""
    if outcome.is_moot:
        return "not applicable"
    return f"{OPEN} ({len(outcome.values)} seeds)" if outcome.stand is None else outcome.stand


def means_text(outcome: Outcome, side: int) -> str:
    """The mean over seeds of the measure, on the treatment's side (0) or the control's (1)."""
    return _digits(mean_of(outcome, side)) if outcome.values else OPEN


def effect_text(outcome: Outcome) -> str:
    """The effect with its 95% interval, as factors if the scale is a ratio."""
    found = outcome.effect
    if found is None:
        return OPEN
    numbers = [found.mean, found.low, found.high]
    if outcome.prediction.is_factor:
        numbers = [_factor(x) for x in numbers]
    mean, low, high = map(_digits, numbers)
    return f"{'× ' if outcome.prediction.is_factor else ''}{mean} ({low} to {high})"


def _digits(value: float) -> str:
    """Three significant digits, but whole numbers from 1000 to 100,000."""
    return f"{value:.0f}" if 999.5 <= abs(value) < 1e5 else f"{value:.3g}"


def test_text(outcome: Outcome) -> str:
    """The test, its seeds, and the one-sided p's that the prediction holds and that it fails."""
    if outcome.effect is None or outcome.p is None:
        return OPEN
    holds, fails = outcome.p
    return f"{outcome.effect.test}, n = {outcome.effect.n}, {holds:.2g} / {fails:.2g}"


def _factor(logarithm: float) -> float:
    # Beyond 709, exp of an end of Fieller's interval overflows a float.
    return math.exp(logarithm) if logarithm < 700.0 else math.inf


def criterion_text(prediction: Prediction) -> str:
    """The condition on which the prediction holds, as an inequality on the effect e."""
    m = prediction.margin
    if prediction.is_factor:
        return {
            "more": f"e > × {m:g}", "less": f"e < × {1 / m:.3g}", "at_most": f"e < × {m:g}",
            "same": f"× {1 / m:.3g} < e < × {m:g}",
        }[prediction.expected]  # fmt: skip
    return {"more": f"e > {m:g}", "less": f"e < {0 - m:g}", "at_most": f"e < {m:g}", "same": f"|e| < {m:g}"}[
        prediction.expected
    ]


__all__ = [
    "OPEN", "ORDER", "OUT_OF_REACH", "TRIED_AGAIN", "ClaimLine", "cost_text", "counts_text", "criterion_text",
    "effect_text", "key_outcome", "lines", "means_text", "spent", "test_text", "waiting_text", "word_text",
]  # fmt: skip
