"""The story of the runs in words: collapses with their steps and rules, runs that held, accuracy and KL.

Every number comes from the records. The words state measurements and the effect of a remedy, never why a run held.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lab.report.runs import ACCURACY, ReportRun
from lab.report.style import listed, number
from lab.report.treatments import Treatment, TreatmentGroup, groups
from lab.verdict import KL

OUTCOMES = {"collapsed": "collapsed", "stable": "held", "undecided": "is undecided", "unfinished": "is unfinished"}
"""The verb of each verdict, in the order of the story."""
MANY = 8
"""Most groups that are named; more are counted, and their names are in the table."""


@dataclass(frozen=True)
class Words:
    """Words of a sentence, in the colour of a run or treatment where they name it."""

    text: str
    run: int | None = None


Sentence = list[Words]


@dataclass(frozen=True)
class Story:
    """The headline, the sentences under it, and notes on the remedies and on chance."""

    headline: list[Sentence]
    sentences: list[Sentence]
    notes: list[str]

    @property
    def text(self) -> str:
        """All of it as plain text."""
        spoken = ("".join(words.text for words in some) for some in (*self.headline, *self.sentences))
        return " ".join([*spoken, *self.notes])


def story(runs: Sequence[ReportRun]) -> Story:
    """The story of these runs, in their order."""
    found = groups(runs)
    told = [*map(_collapse, found), *map(_remarks, found), _accuracy(found), _kl(found)] if len(found) <= MANY else []
    return Story(_headline(found), [sentence for sentence in (*told, _seeds(found)) if sentence], _notes(found))


def first_step(run: ReportRun) -> int | None:
    """The first step at which a fired rule held; None for a run that did not collapse."""
    step = (run.verdict or {}).get("first_step") if run.verdict_word == "collapsed" else None
    return None if step is None else int(step)


def reasons(run: ReportRun) -> list[str]:
    """The rules that fired, each as a clause: `the reward fell to 0.09, below half of its peak, at step 24`."""
    verdict = run.verdict or {}
    return [_reason(reason, verdict.get("thresholds", {})) for reason in verdict.get("reasons", ())]


def _reason(reason: dict[str, Any], thresholds: dict[str, Any]) -> str:
    rule, limit, step = reason.get("rule"), reason.get("threshold"), int(reason["step"])
    if rule == "reward_fall":
        share = thresholds.get("reward_fall")
        part = "half" if share == 0.5 else number(share)
        end = ", and recovered" if reason.get("recovered") else ""
        return f"the reward fell to {_two(reason.get('value'))}, below {part} of its peak, at step {step}{end}"
    if rule == "kl_blowup":
        return f"the KL between mu and old rose above {_two(limit)} nats per token at step {step}"
    if rule == "entropy_collapse":
        end = ", while the reward held" if reason.get("reward_held") else ""
        return f"the entropy fell below {_two(limit)} nats per token at step {step}{end}"
    return str(reason["sentence"]).rstrip(".")


# ---- the parts of the story ------------------------------------------------------------------------------------------


def _headline(found: Sequence[TreatmentGroup]) -> list[Sentence]:
    runs = [run for group in found for run in group.runs]
    words = [run.verdict_word for run in runs]
    if len(runs) == 1:
        return [[Words(f"{alone(runs[0])}.")]]
    # Groups are named by outcome only if the seeds of each agree.
    pure = all(len({run.verdict_word for run in group.runs}) == 1 for group in found)
    if len(set(words)) == 1 or len(found) > MANY or not pure:
        return [[Words(f"{_counts(words)}.")]]
    sentences: list[Sentence] = []
    for word, verb in OUTCOMES.items():
        some = [group for group in found if group.runs[0].verdict_word == word]
        if some:
            sentences.append([Words(f"{'It' if sentences else 'Training'} {verb} "), *_adverbial(some), Words(".")])
    return sentences


def alone(run: ReportRun) -> str:
    """A run's verdict in a clause: `Training collapsed at step 24 of 60`."""
    num_steps = run.metrics[-1]["step"] if run.metrics else 0
    if run.verdict_word == "collapsed":
        return f"Training collapsed at step {first_step(run)} of {num_steps}"
    held = "Training held for" if run.verdict_word == "stable" else f"The run is {run.verdict_word} after"
    return f"{held} {num_steps} step{'' if num_steps == 1 else 's'}"


def _counts(words: Sequence[str]) -> str:
    if len(set(words)) == 1:
        verb = OUTCOMES[words[0]].replace("is ", "are ")
        return f"{'Both' if len(words) == 2 else f'All {len(words)}'} runs {verb}"
    counts = [_verb(words.count(word), word) for word in OUTCOMES if word in words]
    return f"Of {len(words)} runs {listed(counts)}"


def _verb(num: int, word: str) -> str:
    return f"{num} {OUTCOMES[word] if num == 1 else OUTCOMES[word].replace('is ', 'are ')}"


def _collapse(group: TreatmentGroup) -> Sentence:
    """The steps and rules by which the runs of a group collapsed; empty where none did."""
    fallen = [run for run in group.runs if (run.verdict or {}).get("reasons")]
    if not fallen:
        return []
    start = _start(group)
    if len(group.runs) > 1:
        steps = sorted(min(int(reason["step"]) for reason in (run.verdict or {})["reasons"]) for run in fallen)
        return [*start, Words(f" {len(fallen)} of {len(group.runs)} runs collapsed, {_at(steps)}.")]
    return [*start, Words(f" {listed(reasons(fallen[0]))}.")]


def _at(steps: Sequence[int]) -> str:
    """`at step 24`, `at steps 20, 24 and 33`, or `both at step 24`."""
    if len(set(steps)) > 1:
        return f"at steps {listed([str(step) for step in steps])}"
    return f"{('', 'both ', 'all ')[min(len(steps), 3) - 1]}at step {steps[0]}"


def _remarks(group: TreatmentGroup) -> Sentence:
    """The remarks of verdicts on runs that held; empty where there are none."""
    remarks = [str(remark) for run in group.runs for remark in (run.verdict or {}).get("remarks", ())]
    if not remarks:
        return []
    if len(group.runs) > 1:
        return [*_start(group), Words(f" {len(remarks)} of {len(group.runs)} runs have remarks: see the table.")]
    return [*_start(group), Words(" " + " ".join([remarks[0][0].lower() + remarks[0][1:], *remarks[1:]]))]


def _accuracy(found: Sequence[TreatmentGroup]) -> Sentence:
    """Held-out accuracy at the first and last evaluation, as means over each group."""
    # The number of runs that have both, the means of the first and of the last.
    known = [(group, len(ends), *map(fmean, zip(*ends, strict=True))) for group in found if (ends := _ends(group))]
    if not known:
        return []
    # As printed: starts that differ in later digits alone read as one.
    firsts = {f"{first:.2f}" for _, _, first, _ in known}
    if len(firsts) == 1:
        values = [(group, f"{last:.2f}{_over(num, group)}") for group, num, _, last in known]
        return [Words(f"Held-out accuracy went from {firsts.pop()} to "), *_valued(values)]
    values = [(group, f"from {first:.2f} to {last:.2f}{_over(num, group)}") for group, num, first, last in known]
    return [Words("Held-out accuracy went "), *_valued(values)]


def _kl(found: Sequence[TreatmentGroup]) -> Sentence:
    """The mean KL of each group, nats per token."""
    means = [(group, [kl for run in group.runs if (kl := run.mean(KL)) is not None]) for group in found]
    known = [(group, f"{_two(fmean(values))}{_over(len(values), group)}") for group, values in means if values]
    if not known:
        return []
    return [Words("The KL between mu and old, in nats per token, was on average "), *_valued(known)]


def _seeds(found: Sequence[TreatmentGroup]) -> Sentence:
    """The different seeds: of replicates, or across which configs are compared; empty where all runs have one."""
    each = [(group, group.seeds) for group in found if group.seeds]
    every = sorted({seed for _, seeds in each for seed in seeds})
    if len(every) < 2:
        return []
    if all(seeds == every for _, seeds in each):
        whose = "The runs are replicates of one config" if len(each) == 1 else "Runs of one config are replicates"
        return [Words(f"{whose}, with {_seed_words(every)}.")]
    if len(found) > MANY:
        across = _seed_words(every) if len(every) <= MANY else f"{len(every)} seeds"
        return [Words(f"Configs are compared across {across}.")]
    both = ", and runs of one config are replicates" if any(len(seeds) > 1 for _, seeds in each) else ""
    values = [(group, _seed_words(seeds)) for group, seeds in each]
    return [Words(f"Configs are compared across seeds{both}: "), *_valued(values)]


def _notes(found: Sequence[TreatmentGroup]) -> list[str]:
    """The effect of each remedy, each once, and the number of seeds."""
    clauses = dict.fromkeys(clause for group in found for clause in Treatment(group.runs[0]).clauses())
    effects = "; ".join(clauses)
    notes = [f"{effects[0].upper()}{effects[1:]}."] if effects else []
    if len(found) > 1 and max(len(group.runs) for group in found) == 1:
        notes.append("One run each: small differences may be chance.")
    elif several := [group for group in found if len(group.runs) > 1]:
        if all(len(group.seeds) > 1 for group in several):
            notes.append("Where a config ran with several seeds, accuracy and KL are their means.")
        else:
            notes.append("Where a config ran several times, accuracy and KL are means over its runs.")
    return notes


# ---- words -----------------------------------------------------------------------------------------------------------


def _ends(group: TreatmentGroup) -> list[tuple[float, float]]:
    """The first and last held-out accuracy of each run that has two."""
    values = [[value for _, value in run.series(ACCURACY)] for run in group.runs]
    return [(some[0], some[-1]) for some in values if len(some) >= 2]


def _over(num: int, group: TreatmentGroup) -> str:
    """The number of runs under a mean, where some of the group's have no number: a seed that fell early has none."""
    return "" if num == len(group.runs) else f" (over {num} of {len(group.runs)} runs)"


def _seed_words(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {listed([*map(str, seeds)])}"


def _two(value: float | None) -> str:
    """Two significant digits, enough for a sentence; the table has three."""
    return number(value if value is None else float(f"{value:.2g}"))


def _named(group: TreatmentGroup, *, preposition: bool = True) -> Sentence:
    """`with R3`, `without a remedy`; the name in its colour, with a preposition that is part of it."""
    inks = {run.index for run in group.runs}
    ink = inks.pop() if len(inks) == 1 else None
    if group.preposition == "without":
        return [Words(group.words if preposition else group.name, ink)]
    return [*([Words(f"{group.preposition} ")] if preposition else []), Words(group.name, ink)]


def _start(group: TreatmentGroup) -> Sentence:
    """The group's words at the start of a sentence."""
    first, *rest = _named(group)
    return [Words(first.text[0].upper() + first.text[1:], first.run), *rest]


def _adverbial(some: Sequence[TreatmentGroup]) -> Sentence:
    """`without a remedy and with R2, R3`: the groups' names, with one preposition for adjacent groups that share it.

    `without` is repeated: after `without a remedy and a remedy at N = 1` the second group would seem to have one.
    """
    rows = [list(row) for _, row in itertools.groupby(some, key=lambda group: group.preposition)]
    sentence: Sentence = []
    for place, row in enumerate(rows):
        names = [_named(group, preposition=group is row[0] or group.preposition == "without") for group in row]
        sentence += [*([Words(" and ")] if place else []), *_joined(names)]
    return sentence


def _valued(values: Sequence[tuple[TreatmentGroup, str]]) -> Sentence:
    """`0.52 with an exact engine, 0.05 without a remedy and 0.32 with R3.`"""
    if len(values) == 1:
        return [Words(f"{values[0][1]}.")]
    items = [[Words(f"{value} "), *_named(group)] for group, value in values]
    return [*_joined(items), Words(".")]


def _joined(items: Sequence[Sentence]) -> Sentence:
    sentence: Sentence = []
    for place, item in enumerate(items):
        mark = "" if place == 0 else " and " if place == len(items) - 1 else ", "
        sentence += [*([Words(mark)] if mark else []), *item]
    return sentence
