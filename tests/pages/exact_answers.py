"""The summary of docs/exact-training.md and the answers to its questions, (a) to (g), from the rows of three studies.

`python -m tests.pages.exact_answers` writes both between the page's marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.flow.table import MeanInterval, interval
from lab.report.style import number
from sandbox.ledger.claim import Prediction as Sampled
from tests.pages import drift, kinds, ledger, remedies
from tests.pages.drift import CENTRED, FIXED, LONG, SEQUENCE, SHARPER
from tests.pages.predictions import Prediction, Study
from tests.pages.remedies_rows import LARGE, NATURAL, NONE, PR2, R2, R3, TOKEN, Remedies, mean
from tests.pages.study import FRONT, Part

ANSWERS, SUMMARY = Part(FRONT, "answers"), Part(FRONT, "summary")
WORDS = {"holds": "as predicted", "fails": "against the prediction", "open": "open"}


def told(predictions: Sequence[Prediction[Study]], study: Study, letter: str) -> str:
    """A question's predictions that hold, fail and are open, by name."""
    by_word: dict[str, list[str]] = {word: [] for word in WORDS}
    for one in predictions:
        if one.name.startswith(letter):
            by_word[one.verdict(study)].append(one.name)
    return "; ".join(f"{WORDS[word]}: {', '.join(names)}" for word, names in by_word.items() if names)


def found(predictions: Sequence[Prediction[Study]], study: Study) -> dict[str, MeanInterval]:
    """The first interval of every prediction, by name."""
    return {one.name: one.intervals(study)[0] for one in predictions}


def of_drift() -> list[str]:
    """(a) and (b)."""
    study = drift.Study(drift.kept())
    at = found(drift.PREDICTIONS, study)

    def entropy(error: str, objective: str) -> str:
        return number(float(study(error, objective, "entropy").mean()))

    answers = {
        "a": f"**Which part of the harm without a weight is drift?** {drift.share(study)} Centring leaves "
        f"{at['a5']}. Entropy ends at {entropy(FIXED, NONE)}, and at {entropy(FIXED, CENTRED)} with the score centred "
        f"(the true gradient: {entropy(FIXED, SEQUENCE)}). Under an engine that is too sharp it ends at "
        f"{entropy(SHARPER, NONE)} without a weight, and no weight earns {at['a6']} more than the token weight.",
        "b": f"**When does the token weight suffice?** For entropy it does: it ends at {entropy(FIXED, TOKEN)}. In "
        f"reward it falls short of the true gradient by {at['b1']} at T = {LONG}, which is {at['b5']} more than at T = "
        f"{drift.SHORT} and {at['b3']} more than under the sharper engine. The prefix weight earns {at['b4']} more "
        f"than the token weight.",
    }
    return [f"- ({letter}) {words} *{told(drift.PREDICTIONS, study, letter)}.*" for letter, words in answers.items()]


def of_kinds() -> list[str]:
    """(k): the rest of (a)."""
    study = kinds.Kinds(kinds.kept())
    at = found(kinds.PREDICTIONS, study)
    why = (
        " So the baseline turns the engine's error into a force in contexts that never pay."
        if at["k10"].low > 0
        else ""
    )
    fresh = number(float(study(kinds.FRESH, NONE, "entropy_lost").mean()))
    words = (
        f"**Other kinds of error, and no baseline?** Without a weight, an error along one direction costs {at['k1']} "
        f"and one in the model's weights {at['k3']}; centring recovers {at['k2']} and {at['k4']}. Redrawn in every "
        f"pass, the fixed error costs {at['k5']} less ({at['k5'].num} problems), though entropy in contexts that never "
        f"pay ends at {fresh}; rounding to INT4 costs {at['k6']} less. Under top-p, entropy ends {at['k8']} higher "
        f"with the token weight than with the score centred, and centring costs {at['k9']} of reward. Under the fixed "
        f"error, no weight earns {at['k10']} more without a baseline than with it, and the token weight then adds "
        f"{at['k11']} less.{why}"
    )
    return [f"- (k) {words} *{told(kinds.PREDICTIONS, study, 'k')}.*"]


def of_remedies() -> list[str]:
    """(c) to (g)."""
    study = Remedies(remedies.kept())
    at = found(remedies.PREDICTIONS, study)
    (bounds,) = (one.intervals(study) for one in remedies.PREDICTIONS if one.name == "g3")
    modes = (NATURAL, R2, R3, PR2)
    ends = ", ".join(f"{mode} {mean(study.replayed(mode), f'end {mode}')}" for mode in modes)
    biases = ", ".join(
        f"{mode} {mean(study.replayed(mode, name='first_bias'), f'bias {mode}')}" for mode in modes
    )  # fmt: skip
    harm = interval(study.harm("remedies", NONE).dropna().to_numpy(), "remedies", "answers")
    ranks = remedies.ranks(study)
    telling = [name for name, one in ranks.items() if one.leaves_out_0]
    low, high = (number(pick(one.mean for one in ranks.values())) for pick in (min, max))
    answers = {
        "c": f"**Off-policy, by bias alone?** Under an exact engine at N = 16 no weight costs {at['c1']}, "
        f"{at['c2']} more than at N = 4. The clip recovers {at['c3']} of it and the mask another {at['c4']}. Under the "
        f"fixed error the mask is ahead of the clip by {at['c5']}, and the token weight alone by {at['c6']}.",
        "d": f"**R2, R3 or Pr2: whose bias is which?** {at['d1'].num} problems, {LARGE.replace(', scale', '')}, N = 8. "
        f"Bias at step 0: {biases}. Reward at the end: {ends}. No replay minus R2: {at['d1']}; no replay minus R3: "
        f"{at['d3']}; Pr2 minus R2: {at['d4']}. From noise 0.5 to 2 R3's loss grows by {at['d5']}; from N = 2 to 8 "
        f"R2's loss grows by {at['d6']} ({at['d6'].num} problems).",
        "e": f"**Which number at step 0 predicts the loss?** Of five ({', '.join(ranks)}) "
        f"{', '.join(telling) if telling else 'none'} does so demonstrably: their rank correlations with the harm of "
        f"no weight ({harm}) are {low} to {high} over {at['e1'].num} problems. For bias it is {at['e1']}.",
        "f": f"**Bias or variance at large N?** At N = 16 the noise of 8 responses adds {at['f1']} to the clip's harm "
        f"under an exact engine, which is {at['f2']} more than the fixed error adds without noise ({at['f1'].num} "
        f"problems). A tenth of that harm exceeds the harm of the noise of 512 by {at['f3']}. {at_the_border()}",
        "g": f"**Does a bound predict the order?** The rank correlation of a weight's bound with its harm is "
        f"{at['g1']} for the token weight, {at['g2']} for the prefix weight. The prefix weight's bound is the smaller "
        f"one in all {at['g1'].num} problems, by at least {number(bounds[0].mean)}; its harm exceeds the token "
        f"weight's by {bounds[1]}.",
    }
    return [f"- ({letter}) {words} *{told(remedies.PREDICTIONS, study, letter)}.*" for letter, words in answers.items()]


BIAS_OR_VARIANCE = 61
"""The claim of the ledger that tests (f) on sampled runs."""


def at_the_border() -> str:
    """(f) for sampled runs of the sandbox's MoE at the border: the counts of that claim and its verdict."""
    (one,) = (found for found in ledger.found() if found.claim.number == BIAS_OR_VARIANCE and found.decides)

    def fallen(wanted: Sampled, side: int) -> str:
        (values,) = (outcome.values for outcome in one.outcomes if outcome.prediction is wanted)
        return f"{sum(int(pair[side]) for pair in values)} of {len(values)}"

    large, against, small = one.claim.predictions
    verdict = f"claim {BIAS_OR_VARIANCE}, {one.word}" if one.is_complete else f"claim {BIAS_OR_VARIANCE}, runs missing"
    return (
        f"In sampled runs of the sandbox's MoE at its border, N = 8, {fallen(large, 0)} collapse under router noise "
        f"0.5 with 256 responses per update; under an exact engine {fallen(against, 1)} with 64, and "
        f"{fallen(small, 0)} with 16 ({verdict})."
    )


def summary() -> str:
    """The studies' main findings, for the page's first screen."""
    study, others, replay = drift.Study(drift.kept()), kinds.Kinds(kinds.kept()), Remedies(remedies.kept())
    harm = interval(study.harm(FIXED, NONE), "drift", "harm")
    back = float((study(FIXED, CENTRED, "reward") - study(FIXED, NONE, "reward")).mean()) / harm.mean
    entropy = {
        name: number(float(study(error, objective, "entropy").mean()))
        for name, error, objective in (("fixed", FIXED, NONE), ("sharper", SHARPER, NONE), ("true", FIXED, SEQUENCE))
    }
    best = number(float(study.frame["optimum"].max()))
    bare, weighed = (number(float(others(error, one).mean())) for error, one in ((kinds.BARE, NONE), (FIXED, TOKEN)))
    at = found(remedies.PREDICTIONS, replay)
    return (
        f"**A persistent engine error (KL 0.18 nats per token), left uncorrected, costs {harm} of a reward of at most "
        f"{best}; centring the score recovers {back:.0%} of that loss.**\n"
        f"Entropy then ends at {entropy['fixed']}, compared with {entropy['true']} under the true gradient; without a "
        f"weight under an engine that is too sharp it ends at {entropy['sharper']}.\n"
        f"The harm needs a baseline: without one, no weight ends at a reward of {bare}, compared with {weighed} for "
        f"the token weight with a baseline.\n"
        f"Where routers err, R2 ends below no replay by {at['d1']}; for R3 the difference is {at['d3']}\n"
        "([100 problems each](exact-training-tables.md); the predictions were written first).\n"
    )


def block() -> str:
    """The text between the page's marks: a bullet per question, with numbers and the verdicts of its predictions."""
    head = (
        "Predictions were committed before the runs ([decision 10](decisions/0010-drift-study.md), "
        "[12](decisions/0012-remedies-study.md)).\nBrackets are 95% intervals over problems. The fixed error is "
        "constant, at KL 0.18 nats per token. Harm is the reward of the true\ngradient's run minus a run's own; the "
        "largest reward is 0.333, and 0.5 in (d).\n\n"
        "*No weight*, *token*, *prefix* and *sequence weight* are REINFORCE with the weight 1, pi/mu of the token, of "
        "the prefix\nup to it, and of the whole response. *Centring the score* subtracts each token's expected score "
        "under mu, without a weight.\n*Clip* is Dr. GRPO, whose ratio pi/old is clipped; *mask* is MiniRL. N is the "
        "number of updates per rollout.\n\n"
    )
    return head + "\n".join([*of_drift(), *of_remedies(), *of_kinds()]) + "\n"


if __name__ == "__main__":
    SUMMARY.write(summary())
    ANSWERS.write(block())
