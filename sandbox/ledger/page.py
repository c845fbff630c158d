"""The ledger's page: the verdicts, claims out of reach, exploratory results, then every claim with its numbers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from lab.markdown import markdown_table
from sandbox.ledger import exact
from sandbox.ledger.cells import NUM_WINDOWS, Regime
from sandbox.ledger.claim import FRESH, Claim, Row
from sandbox.ledger.course import collapse_step
from sandbox.ledger.early_warning import LEAD, warnings
from sandbox.ledger.power import MOST, MOST_HOURS, POWER, Need, assumed_text, needs
from sandbox.ledger.summary import (
    OPEN,
    OUT_OF_REACH,
    UNDECIDED_TITLES,
    ClaimLine,
    cost_text,
    counts_text,
    criterion_text,
    effect_text,
    lines,
    low_power_text,
    means_text,
    reach_text,
    spent,
    state_words,
    test_text,
    undecided,
    undecided_row,
    waiting_text,
    word_text,
)
from sandbox.ledger.verdicts import Finding

INTRO = """# The claims ledger

Findings of the source papers, tried again in the sandbox. `firstorder reproduce` writes this page from the rows in
cells.jsonl; no verdict is typed by hand. Each prediction names runs, a measure and the smallest effect that counts,
and was written in `sandbox/claims/` before the runs that decide it. How to read the columns follows the table.
"""

READING = f"""## How to read it

- A claim is tested in one regime, its home, on seeds from {FRESH} on. **reproduced**: all its predictions hold.
  **not reproduced**: one fails. **opposite**: it is beyond its margin on the other side. **inconclusive**: the seeds
  do not decide. **not applicable**: it is about a collapse, and no run of the arm that should collapse did.
  **tried again**: inconclusive, and repeated on later seeds by the claim whose name ends in "again", which answers the
  question in its place. **–**: runs are missing. **out of reach**: {POWER:.0%} power needs more
  than {MOST} seeds; none are run. A question is within reach if it has deciding seeds; it is one question, however
  often it was tried. A second trial has as many seeds as it needs at the effect found, planned for {MOST_HOURS:g}
  hours of one thread at most.
- *Inconclusive, why*: the *effect at its margin* lies within a standard error of it; else there were *too few seeds*.
  Either way, the seeds that {POWER:.0%} power would need if the truth were what the claim's own runs found, at the
  level of Holm's first step: a look back, which changes no verdict.
- All predictions hold by an intersection-union test, with the largest of their p's; for one to fail, p is their
  number times the least. Holm's correction runs over every claim that has deciding seeds, with p = 1 while it lacks
  runs: the level is 5% for all of them together at every look, and no verdict is lost when another claim's runs come.
  A claim that is added may undo a verdict until it is decided itself. *Opposite* has the same correction.
- *Predictions*: how many of the claim's hold (*for*), fail (*against*) or are *open* by their own tests at 5%, without
  correction. They say what an inconclusive claim leaves open, and decide nothing.
- *p* is the claim's, two-sided, after Holm's correction; below 0.05 the claim is decided.
- *Effect*, with its 95% interval, is that of the prediction on which the verdict rests. *Power* is the chance that the
  claim's least powerful prediction is found to hold at the effect for which its seeds are planned
  (sandbox/ledger/power.py), at the level of Holm's first step. *Cost* is hours of one thread.
- All other regimes, and seeds below {FRESH}, are exploratory: *for*, *against* and *open* by the same tests without
  correction. They decide nothing; these statistics were designed after they had been seen (docs/decisions/0007).
- *Exact* is the answer of exact training to claims about an expectation (docs/exact-training.md): *for* if every
  question that bears on the claim says so, *against* if one says the opposite, else *open*, with the number of
  problems. Its policies are small ones on a tree, so it explains but decides nothing. **–**: no question bears on the
  claim. Questions w1 to w5 were asked of existing rows.
- Words such as *stable* in rows older than the mended rule (LOG.md, 2026-11-23) compare with a run's first tenth. No
  decision rests on them: collapse is measured on pi's accuracy (sandbox/ledger/course.py).
"""


def markdown(
    claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Finding], rows: Mapping[str, Row]
) -> str:
    """The whole page."""
    needed = needs(claims, regimes, rows)
    made = lines(claims, found, needed)
    low = low_power_text(made, needed)
    parts = [INTRO, _verdicts(made, found, rows, needed), READING + (f"- {low}\n" if low else "")]
    parts += [
        _unreachable(made, needed),
        _exploratory(claims, regimes, found),
        "## Regimes\n\ndocs/border.md says which are quiet, at the border or beyond it.\n\n"
        + "".join(f"- {regime.words}\n" for regime in regimes),
        _early_warning(rows),
    ]
    states = {line.claim.number: line.state for line in made}
    parts.append("## Claims\n\nA claim's predictions, with their numbers, open below its verdict.\n")
    for claim in claims:
        parts.append(_claim(claim, [one for one in found if one.claim == claim], states[claim.number]))
    return "\n".join(parts)


VERDICT_TITLES = ("claim", "home", "verdict", "predictions", "p", "n", "effect", "power", "cost", "exact")


def _verdicts(
    made: Sequence[ClaimLine], found: Sequence[Finding], rows: Mapping[str, Row], needed: Mapping[int, Need]
) -> str:
    table = [
        (link(line.claim), line.claim.home, line.state, line.predictions, line.p, line.n,
         line.effect, line.power, line.cost, exact_text(line.claim))
        for line in made if line.state != OUT_OF_REACH
    ]  # fmt: skip
    open_ones = undecided(made, found, needed)
    words = (f"{counts_text(made)}.", reach_text(made, [need for _, need in open_ones]), waiting_text(found))
    parts = [
        "## Verdicts", " ".join(filter(None, words)), markdown_table(OVERVIEW_TITLES, overview(made)).rstrip(),
        "### Numbers", spent(rows), _folded("A line per claim", markdown_table(VERDICT_TITLES, table)),
    ]  # fmt: skip
    if open_ones:
        why = [(link(claim), *undecided_row(need)) for claim, need in open_ones]
        parts += ["### Inconclusive, why", markdown_table(UNDECIDED_TITLES, why).rstrip()]
    return "\n\n".join(parts) + "\n"


def _folded(summary: str, text: str) -> str:
    # GitHub ignores the attribute; the site's Markdown reads what is inside only with it.
    return f'<details markdown="1">\n<summary>{summary}</summary>\n\n{text.rstrip()}\n\n</details>'


OVERVIEW_TITLES = ("verdict", "claims")


def overview(made: Sequence[ClaimLine]) -> list[tuple[str, str]]:
    """All claims on one screen: a row per state with its number of claims, and their names."""
    states = dict.fromkeys(line.state for line in made)
    found = {state: [line.claim for line in made if line.state == state] for state in states}
    return [
        (f"{len(own)} {state_words(state)}", "; ".join(link(claim) for claim in own))
        for state, own in found.items()
    ]  # fmt: skip


def exact_text(claim: Claim) -> str:
    """The column `exact` of a claim; a dash if no question bears on it."""
    return exact.cell(claim.exact, exact.answers()) or OPEN


NAMES = {name.lower(): name for name in ("GRPO", "GSPO", "KL", "MoE", "Pr2", "Pr3", "R2", "R3")}
"""Words of claims' names that are names themselves, as they are written."""


def title(claim: Claim) -> str:
    """The claim's name in words, short enough for a table."""
    return " ".join(NAMES.get(word, word) for word in claim.name.split("_"))


def link(claim: Claim) -> str:
    """The claim's number and name, which lead to its section on this page."""
    return f"[{claim.number}. {title(claim)}](#claim-{claim.number})"


REACH_TITLES = ("claim", "home", "asks for most", "effect assumed", "SD", "seeds needed", "cost")


def reach_row(need: Need) -> tuple[str, ...]:
    """The cost of deciding a claim that is out of reach."""
    return (f"{need.claim.number}. {title(need.claim)}", need.claim.home, need.limiting.words, *power_row(need)[2:6])


def _unreachable(made: Sequence[ClaimLine], needed: Mapping[int, Need]) -> str:
    table = [reach_row(needed[line.claim.number]) for line in made if line.state == OUT_OF_REACH]
    return f"## Out of reach\n\n{markdown_table(REACH_TITLES, table) if table else 'None.'}\n"


POWER_TITLES = ("claim", "home", "effect assumed", "SD (of)", "seeds needed", "core hours", "seeds asked", "power")


def power_row(need: Need) -> tuple[str, ...]:
    """A claim's line in the table of powers: the seeds that it needs, and the power of its deciding seeds."""
    asked, sd = len(need.claim.deciding()), need.spread.sd
    seeds = OPEN if need.seeds is None else f"{need.seeds}{' (out of reach)' if need.is_out_of_reach else ''}"
    power = need.power(asked) if asked else math.nan
    spread = f"{OPEN if math.isnan(sd) else f'{sd:.2g}'} ({need.spread.of})"
    words = (str(asked) if asked else "", "" if math.isnan(power) else f"{power:.0%}")
    return (str(need.claim.number), need.claim.home, f"{need.limiting.measure.name} {assumed_text(need.limiting, sd)}",
            spread, seeds, cost_text(need.hours), *words)  # fmt: skip


def explored(claim: Claim, regime: str, found: Sequence[Finding]) -> str:
    """A claim's reading in a regime by exploratory seeds, with their number; empty if it was not tried."""
    own = [one for one in found if one.claim == claim and one.regime == regime and not one.decides]
    words = ["not applicable" if not one.applicable else one.stand or OPEN for one in own]
    return ", ".join(f"{word} ({len(one.seeds)})" for word, one in zip(words, own, strict=True) if word != OPEN)


def _exploratory(claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Finding]) -> str:
    note = f"The reading of seeds below {FRESH}, without correction, and the number of seeds."
    table = [(link(c), *(explored(c, r.name, found) for r in regimes)) for c in claims]
    table = [row for row in table if any(row[1:])]
    titles = ("claim", *(regime.name for regime in regimes))
    return f"## Exploratory\n\n{note}\n\n{_folded('A line per claim', markdown_table(titles, table))}\n"


WARNING = (
    f"How often is a metric further from its initial value in a window within the {LEAD * 100 // NUM_WINDOWS}% of "
    "the updates before a collapse than in quiet windows of the same regime at the same place in a run? The area under "
    "the ROC curve (0.5 is chance), with a 95% bootstrap interval over runs; the same for windows that are "
    f"{', '.join(str(k) for k in range(1, LEAD + 1))} windows ahead of it, each {100 // NUM_WINDOWS}% of a run; the "
    "share of windows detected at 5% false alarms. A collapse is that of pi's held-out accuracy, as a mean of "
    "three evaluations, so its date comes late; the reward nearly reads the accuracy itself."
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
    num_collapsed = sum(collapse_step(row) is not None for row in rows.values())
    if found:
        table = markdown_table(WARNING_TITLES, found)
    elif num_collapsed == 0:
        table = "No run has collapsed.\n"
    else:
        table = f"Collapsed runs: {num_collapsed}. None collapsed late enough to have windows before it.\n"
    return f"## Early warning\n\n{WARNING}\n\n{table}"


def _claim(claim: Claim, found: Sequence[Finding], state: str) -> str:
    # The heading stays outside the fold, so that a link to it always finds something that is shown. Its `id` is there
    # because GitHub and the site make different ones of a sentence with signs.
    summary = f"<b>{state_words(state).capitalize()}.</b> {html.escape(claim.source, quote=False)}"
    heading = f'### <a id="claim-{claim.number}"></a>{claim.number}. {claim.sentence}'
    parts = [f"`sandbox/claims/`, `{claim.name}`.", ""]
    rows = []
    for place, prediction in enumerate(claim.predictions):
        for one in found:
            outcome = one.outcomes[place]
            rows.append((
                prediction.words, f"{one.regime}{'' if one.decides else ' (exploratory)'}", *prediction.side_names,
                means_text(outcome, 0), means_text(outcome, 1), effect_text(outcome), criterion_text(prediction),
                test_text(outcome), word_text(outcome),
            ))  # fmt: skip
    titles = ("prediction", "regime", "arm", "against", "arm's mean", "other's", "effect", "holds if",
              "test, p that it holds / fails", "by itself")  # fmt: skip
    parts.append(markdown_table(titles, [[text.replace("|", "\\|") for text in row] for row in rows]))
    measures = dict.fromkeys((p.measure.name, p.measure.words, p.measure.unit) for p in claim.predictions)
    parts += [f"- `{name}`: {words} [{unit}]" for name, words, unit in measures]
    parts += [f"- In `{regime}`: {words}" for regime, words in claim.remarks.items()]
    parts += [f"- {words}" for words in exact.lines(claim.exact, exact.answers())]
    body = "\n".join(parts)
    return f"{heading}\n\n{_folded(summary, body)}\n"


__all__ = [
    "POWER_TITLES", "REACH_TITLES", "VERDICT_TITLES", "exact_text", "explored", "markdown", "power_row", "reach_row",
    "title", "warning_rows",
]  # fmt: skip
