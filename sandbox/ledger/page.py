"""The ledger's page: the table of verdicts, then every claim with its predictions, numbers and criterion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lab.ladder import markdown_table
from sandbox.ledger.cells import NUM_WINDOWS, Regime
from sandbox.ledger.claim import Claim, Prediction, Row
from sandbox.ledger.early_warning import LEAD, warnings
from sandbox.ledger.verdicts import Outcome, together

INTRO = """# The claims ledger

Findings of the source papers, tried again in the sandbox. Written by `firstorder reproduce` from the rows in
cells.jsonl; no verdict is typed by hand. Each prediction names runs, measure and the smallest effect that counts,
and stood in `sandbox/claims/` before the runs were made.

- **reproduced**: the effect lies beyond the margin, as predicted. **not reproduced**: it does not reach it.
  **opposite**: it lies beyond the margin on the other side. **inconclusive**: the seeds do not decide; it *leans* for
  or against the prediction where its own test would have decided, without the correction. **not applicable**:
  the prediction is of a collapse, and no run of the arm that should have one collapsed. **–**: not all runs have been
  made.
- Effects are means of differences within a seed, with 95% Student intervals (Fieller's for a ratio of means); p is of
  the two-sided test at the margin after Holm's correction over all predictions of the ledger ({num_tests} have their
  runs). The level is 5% for all.
- Where most seeds tie, since a collapse is a rare event, no p is below the chance that n seeds show none of what would
  move the mean to the margin: 14 runs without a collapse do not rule out one in ten.
- Seeds vary streams and, in claims 9 to 11, the initial model; all other runs of a shape start from one model, and all
  runs see the same prompts. Numbers of seeds above five were chosen when five had been seen (docs/decisions/0007), and
  those five count: what is *reproduced* by a hair may lean on them.
- In rows made before the rule was mended (LOG.md, 2026-11-23) the verdict of a run compares with its first tenth, so
  that a collapse within that is not seen. A run that fell and rose again has collapsed.
- A claim is reproduced in a regime where all its predictions are.
"""


def markdown(
    claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Outcome], rows: Mapping[str, Row]
) -> str:
    """The whole page."""
    num_tests = sum(outcome.p is not None for outcome in found)
    parts = [INTRO.format(num_tests=num_tests), _regimes(regimes), _table(claims, regimes, found), spent(rows) + "\n"]
    parts.append(_early_warning(rows))
    parts += [_claim(claim, regimes, [o for o in found if o.claim == claim]) for claim in claims]
    return "\n".join(parts)


def _regimes(regimes: Sequence[Regime]) -> str:
    return "## Regimes\n\n" + "".join(f"- {regime.words}\n" for regime in regimes)


def _table(claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Outcome]) -> str:
    note = "In brackets, how many of a claim's predictions are reproduced, and where the inconclusive ones lean."
    return f"## Verdicts\n\n{note}\n\n{verdict_table(claims, regimes, found)}"


def verdict_table(claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Outcome]) -> str:
    """One line a claim with its verdict in each regime, and the counts of every word at the end."""
    rows, counts = [], {regime.name: Counter[str]() for regime in regimes}
    for claim in claims:
        cells = []
        for regime in regimes:
            own = [o for o in found if o.claim == claim and o.regime == regime.name]
            word: str = together([o.word for o in own]) or ("–" if own else "")
            counts[regime.name][word] += bool(own)
            inner = tally(own)
            cells.append(f"{word} ({inner})" if inner else word)
        rows.append((str(claim.number), claim.sentence, claim.source, *cells))
    sums = ("", "", "", *(", ".join(f"{n} {word}" for word, n in counts[r.name].most_common() if n) for r in regimes))
    titles = ("", "claim", "source", *(regime.name for regime in regimes))
    return markdown_table(titles, [*rows, sums])


def tally(own: Sequence[Outcome]) -> str:
    """How many of a claim's predictions are reproduced in one regime, and where the inconclusive ones lean, in words;
    empty while runs are missing, and where none is applicable."""
    if any(o.word is None for o in own):
        return ""
    own = [o for o in own if o.word != "not applicable"]
    if not own:
        return ""
    sides = Counter(o.leans for o in own if o.leans)
    if len(own) == 1:
        return next((f"leans {side}" for side in sides), "")
    held = f"{sum(o.word == 'reproduced' for o in own)} of {len(own)}"
    leaning = ", ".join(f"{sides[side]} {side}" for side in ("for", "against") if sides[side])
    return f"{held}; leaning: {leaning}" if leaning else held


def word_text(outcome: Outcome) -> str:
    """The verdict on one prediction, with the side to which it leans; how many seeds it has where some are missing."""
    if outcome.word is None:
        return f"– ({len(outcome.values)} seeds)"
    return f"{outcome.word}, leans {outcome.leans}" if outcome.leans else outcome.word


def spent(rows: Mapping[str, Row]) -> str:
    """How many runs were made, in how many hours of one thread, and on what, in a sentence."""
    machines = Counter(f"{row['machine']}, torch {row['torch']}" for row in rows.values())
    seconds = math.fsum(row.get("seconds") or 0.0 for row in rows.values())
    names = "; ".join(f"{count} on {name}" for name, count in machines.most_common())
    compiled = sum(bool(row.get("compiled")) for row in rows.values())
    names += f"; {compiled} with compiled kernels" if compiled else ""
    return f"{len(rows)} runs, {seconds / 3600:.1f} hours of one thread: {names}." if rows else "No run has been made."


WARNING = (
    f"How often does a metric stand further from its beginning in a window within the {LEAD * 100 // NUM_WINDOWS}% of "
    "the updates before a collapse than in quiet windows of the same regime at the same place of a run? The area under "
    "the ROC curve (0.5 knows nothing), with a 95% bootstrap interval over runs; the same for windows that are "
    f"{', '.join(str(k) for k in range(1, LEAD + 1))} windows ahead of it, each {100 // NUM_WINDOWS}% of a run; the "
    "share of windows seen at 5% false alarms. The reward is what the verdict itself reads."
)


def warning_rows(rows: Mapping[str, Row]) -> list[tuple[str, str, str, str, str]]:
    """Each metric's area with its interval, by lead, its hits at 5% false alarms, and the windows before a collapse."""
    return [
        (f"`{one.metric}`", f"{one.auc:.2f} ({one.low:.2f} to {one.high:.2f})",
         " / ".join("–" if math.isnan(x) else f"{x:.2f}" for x in one.by_lead), f"{one.hits:.0%}",
         f"{one.num_before} in {one.num_collapsed} run{'s' * (one.num_collapsed > 1)}")
        for one in warnings(list(rows.values()))
    ]  # fmt: skip


WARNING_TITLES = (
    "metric", "area", f"{' / '.join(str(k) for k in range(1, LEAD + 1))} ahead", "seen at 5% false alarms",
    "windows before a collapse",
)  # fmt: skip


def _early_warning(rows: Mapping[str, Row]) -> str:
    found = warning_rows(rows)
    num_collapsed = sum(row["first_step"] is not None for row in rows.values())
    if found:
        table = markdown_table(WARNING_TITLES, found)
    elif num_collapsed == 0:
        table = "No run has collapsed.\n"
    else:
        table = f"Collapsed runs: {num_collapsed}. None was late enough to have windows before it.\n"
    return f"## Early warning\n\n{WARNING}\n\n{table}"


def _claim(claim: Claim, regimes: Sequence[Regime], found: Sequence[Outcome]) -> str:
    lines = [f"## {claim.number}. {claim.sentence}", "", f"{claim.source}. `sandbox/claims/`, `{claim.name}`.", ""]
    rows = []
    for prediction in claim.predictions:
        for outcome in (o for o in found if o.prediction == prediction):
            rows.append((
                prediction.words, outcome.regime, *prediction.side_names, means_text(outcome, 0),
                means_text(outcome, 1), effect_text(outcome), criterion_text(prediction),
                word_text(outcome),
            ))  # fmt: skip
    titles = ("prediction", "regime", "arm", "against", "arm's mean", "other's", "effect", "holds if", "verdict")
    lines.append(markdown_table(titles, [[text.replace("|", "\\|") for text in row] for row in rows]))
    measures = dict.fromkeys((p.measure.name, p.measure.words, p.measure.unit) for p in claim.predictions)
    lines += [f"- `{name}`: {words} [{unit}]" for name, words, unit in measures]
    lines += [f"- In `{regime}`: {words}" for regime, words in claim.remarks.items()]
    return "\n".join([*lines, ""])


def means_text(outcome: Outcome, side: int) -> str:
    """The mean over seeds of the measure, on the treatment's side (0) or the control's (1)."""
    values = [pair[side] for pair in outcome.values]
    return f"{math.fsum(values) / len(values):.3g}" if values else "–"


def effect_text(outcome: Outcome) -> str:
    """The effect with its interval and p, factors where the scale is a ratio."""
    found = outcome.effect
    if found is None or outcome.p is None:
        return "–"
    numbers = [found.mean, found.low, found.high]
    if outcome.prediction.is_factor:
        numbers = [_factor(x) for x in numbers]
    mean, low, high = (f"{x:.3g}" for x in numbers)
    times = "× " if outcome.prediction.is_factor else ""
    return f"{times}{mean} ({low} to {high}), n = {found.n}, p = {outcome.p:.2g}"


def _factor(logarithm: float) -> float:
    return math.exp(logarithm) if logarithm < 700.0 else math.inf


def criterion_text(prediction: Prediction) -> str:
    """When the prediction holds, as an inequality on the effect e."""
    m = prediction.margin
    if prediction.is_factor:
        return {
            "more": f"e > × {m:g}", "less": f"e < × {1 / m:.3g}", "at_most": f"e < × {m:g}",
            "same": f"× {1 / m:.3g} < e < × {m:g}",
        }[prediction.expected]  # fmt: skip
    return {"more": f"e > {m:g}", "less": f"e < {-m:g}", "at_most": f"e < {m:g}", "same": f"|e| < {m:g}"}[
        prediction.expected
    ]


__all__ = [
    "criterion_text", "effect_text", "markdown", "means_text", "spent", "tally", "verdict_table", "warning_rows",
    "word_text",
]  # fmt: skip
