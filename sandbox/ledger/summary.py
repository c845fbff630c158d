"""One line of the ledger per claim: state, seeds, effect, power and cost; and the words for numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox.ledger.claim import Claim, Prediction, Row
from sandbox.ledger.hindsight import AsFound, as_found
from sandbox.ledger.power import MOST_HOURS, POWER, SEARCHED, Need
from sandbox.ledger.statistics import ALPHA
from sandbox.ledger.verdicts import Finding, Outcome, among_ready, mean_of

OUT_OF_REACH, TRIED_AGAIN, OPEN = "out of reach", "tried again", "–"
ORDER = ("reproduced", "not reproduced", "opposite", "not applicable", "inconclusive", TRIED_AGAIN, OPEN, OUT_OF_REACH)
"""States in the order of the page: decided ones first."""
DECIDED = ORDER[:4]
AIM = 0.2
"""At most this share of the questions within reach is to be left undecided."""
LOW = 0.7
"""A power below which the page explains how a claim was decided."""


@dataclass(frozen=True)
class ClaimLine:
    """A claim's line: its state, one of ORDER, and its numbers as text, empty if there are none."""

    claim: Claim
    state: str
    predictions: str
    p: str
    n: str
    effect: str
    power: str
    cost: str


def state_words(state: str) -> str:
    """The state in words that stand alone."""
    return "without all runs" if state == OPEN else state


def lines(claims: Sequence[Claim], found: Sequence[Finding], needed: Mapping[int, Need]) -> list[ClaimLine]:
    """A line for every claim, sorted by state (decided first), then by number."""
    deciding = {one.claim.number: one for one in found if one.decides}
    states = states_of(claims, found)
    made = [_line(claim, deciding.get(claim.number), needed[claim.number], states[claim.number]) for claim in claims]
    return sorted(made, key=lambda line: (ORDER.index(line.state), line.claim.number))


def states_of(claims: Sequence[Claim], found: Sequence[Finding]) -> dict[int, str]:
    """Every claim's verdict by its number: TRIED_AGAIN if it is inconclusive and one of the claims repeats it, OPEN
    without a verdict."""
    words = {one.claim.number: one.word for one in found if one.decides}
    repeated = {claim.repeats for claim in claims}
    made = {claim.number: words.get(claim.number) or OPEN for claim in claims}
    return {n: TRIED_AGAIN if word == "inconclusive" and n in repeated else word for n, word in made.items()}


def _line(claim: Claim, found: Finding | None, need: Need, state: str) -> ClaimLine:
    asked = len(claim.deciding()) if found is None else len(found.seeds)
    if found is None and need.is_out_of_reach:
        return ClaimLine(claim, OUT_OF_REACH, "", "", "", "", "", cost_text(need.hours))
    power = need.power(asked)
    shown = (OPEN if math.isnan(power) else f"{power:.0%}", cost_text(asked * need.hours_per_seed))
    if found is None or found.word is None:
        runs = 0 if found is None else min((len(one.values) for one in found.outcomes), default=0)
        n = f"{runs}/{asked}" if asked else ""
        return ClaimLine(claim, OPEN, "", "", n, "", *(shown if asked else ("", "")))
    key = key_outcome(found)
    effect = "" if key is None else effect_text(key)
    return ClaimLine(claim, state, stands_text(found.outcomes), p_text(found.p), str(asked), effect, *shown)


def p_text(p: float | None) -> str:
    """A p with two digits, or with as many more as it takes to stay on its side of ALPHA; empty for None."""
    if p is None:
        return ""
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))
    return next(text for text in texts if (float(text) < ALPHA) == (p < ALPHA))


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


def questions(made: Sequence[ClaimLine]) -> list[ClaimLine]:
    """The claims within reach: those with deciding seeds, but not those whose question a second trial answers."""
    return [line for line in made if line.claim.deciding() and line.state not in (TRIED_AGAIN, OUT_OF_REACH)]


def undecided(
    made: Sequence[ClaimLine], found: Sequence[Finding], needed: Mapping[int, Need]
) -> list[tuple[Claim, AsFound]]:
    """The inconclusive claims within reach, by number, each with what it would need at the effects found."""
    deciding = {one.claim.number: one for one in found if one.decides}
    open_ones = [line.claim for line in questions(made) if line.state == "inconclusive"]
    pairs = [(claim, as_found(deciding[claim.number], needed[claim.number])) for claim in open_ones]
    return [(claim, need) for claim, need in pairs if need is not None]


UNDECIDED_TITLES = ("inconclusive", "why", "seeds needed at the effect found", "hours")


def undecided_row(need: AsFound) -> tuple[str, str, str]:
    """The reason why a claim is inconclusive, and the seeds and hours that it would need at the effect found."""
    why = "effect at its margin" if need.is_at_margin else "too few seeds"
    beyond = f"; beyond {MOST_HOURS:g} hours" if need.is_beyond else ""
    seeds = f"over {SEARCHED}" if need.seeds is None else str(need.seeds)
    return f"{why}{beyond}", seeds, cost_text(need.hours)


def reach_text(made: Sequence[ClaimLine], needs: Sequence[AsFound]) -> str:
    """The number of questions within reach that are decided, the share left, and the number of those that would need
    more than MOST_HOURS, in words; empty if none is within reach. `needs`: of the inconclusive ones."""
    asked = questions(made)
    if not asked:
        return ""
    counts = Counter("decided" if line.state in DECIDED else line.state for line in asked)
    left = len(asked) - counts["decided"]
    words = (
        f"Of {len(asked)} questions within reach {counts['decided']} are decided and {left} ({left / len(asked):.0%}) "
    )
    words += f"are not, where the aim is at most {AIM:.0%}."
    if counts[OPEN]:
        words += f" Runs are missing for {counts[OPEN]} of these."
    if needs:
        words += (
            f" At the effects found, {sum(need.is_beyond for need in needs)} of the {len(needs)} inconclusive ones "
            f"would need more than {MOST_HOURS:g} hours for {POWER:.0%} power, the most that a second trial is given."
        )
    if last := sum(line.state == "inconclusive" and line.claim.repeats is not None for line in asked):
        words += f" {last} of the inconclusive ones had a second trial already, and there is no third."
    return words


def low_power_text(made: Sequence[ClaimLine], needed: Mapping[int, Need]) -> str:
    """The reasons why claims with a power below LOW were decided all the same; empty if none was."""
    low = [line for line in made if line.state in DECIDED
           and needed[line.claim.number].power(len(line.claim.deciding())) < LOW]  # fmt: skip
    if not low:
        return ""
    held = [str(line.claim.number) for line in low if line.state == "reproduced"]
    failed = [str(line.claim.number) for line in low if line.state != "reproduced"]
    parts = [
        "Power may be far below what was planned: seeds were set with the spreads and the number of claims known in "
        "their day, and both have changed. An exact test with a seed too few has none at all at the first step (0%), "
        "and has it at later ones, which ask less.",
        f"Below {LOW:.0%}, and yet reproduced, by such a step, by effects larger than planned, or by luck: "
        f"{', '.join(held)}." if held else "",
        f"Below {LOW:.0%}, and decided since one prediction that fails is enough, of which this power says nothing: "
        f"{', '.join(failed)}." if failed else "",
    ]  # fmt: skip
    return " ".join(filter(None, parts))


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
    "OPEN", "ORDER", "OUT_OF_REACH", "TRIED_AGAIN", "UNDECIDED_TITLES", "ClaimLine", "cost_text", "counts_text",
    "criterion_text", "effect_text", "key_outcome", "lines", "low_power_text", "means_text", "questions", "reach_text",
    "spent", "states_of", "test_text", "undecided", "undecided_row", "waiting_text", "word_text",
]  # fmt: skip
