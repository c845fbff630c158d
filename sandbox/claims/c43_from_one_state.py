"""From one state: the effect of an arm's engine and remedy on the next 64 updates, and on the gradient.

Runs of different arms drift to different states. Here every arm continues from the same ones (see `ledger/branch.py`),
so that the two sides of a pair differ only in their arm.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Arm, Prediction
from sandbox.ledger.measures import probe

_EVALUATION = (("evaluation.num_samples", "16"), ("evaluation.max_prompts", "64"))
"""1,024 held-out responses before and after: a standard error of 0.013 at an accuracy of 0.3 if all are independent."""

_SHORT = (("num_steps", "64"), *((f"{block}.every", "64") for block in ("evaluation", "traces", "checkpoint")))


def _exact() -> Arm:
    run = at("exact", "none", 4)
    return replace(run, name=f"{run.name}-states", changes=run.changes + _EVALUATION)


def branch(remedy: str, n: int) -> Arm:
    """64 updates of GRPO at the border with a remedy, from states of the run with an exact engine and N = 4."""
    one = at("r0.5", remedy, n)
    changes = one.changes + _EVALUATION + _SHORT
    return replace(one, name=f"{one.name}-branch", changes=changes, made_by="branch", start=_exact())


AFTER = probe("accuracy_after", "held-out accuracy of pi after 64 updates from a state", "accuracy")
COSINE = probe("cosine", "cosine of the gradient at a state with the exact policy gradient, noise corrected for", "1")
VARIANCE = probe(
    "variance", "variance of one mini-batch's gradient, over the squared length of its mean along the exact one", "1"
)

CLAIM = BorderClaim(
    number=43,
    name="from_one_state",
    sentence="From one and the same state, R3 and the weight help within 64 updates at N = 8, and R3 the gradient.",
    source="here; it asks of single states what claims 37 and 38 ask of runs",
    predictions=(
        Prediction(
            words="N = 8: 64 updates without a remedy end at a lower accuracy than with R3, by 0.02",
            treatment=branch("none", 8),
            control=branch("R3", 8),
            measure=AFTER,
            expected="less",
            margin=0.02,
        ),
        Prediction(
            words="N = 8: truncated importance sampling ends at a higher accuracy than none, by 0.01",
            treatment=branch("tis", 8),
            control=branch("none", 8),
            measure=AFTER,
            expected="more",
            margin=0.01,
        ),
        Prediction(
            words="N = 1: truncated importance sampling is above none by at most 0.02",
            treatment=branch("tis", 1),
            control=branch("none", 1),
            measure=AFTER,
            expected="at_most",
            margin=0.02,
        ),
        Prediction(
            words="the gradient under R3 has a higher cosine with the exact one than without a remedy, by 0.02",
            treatment=branch("R3", 8),
            control=branch("none", 8),
            measure=COSINE,
            expected="more",
            margin=0.02,
        ),
        Prediction(
            words="the token-weighted gradient has a variance larger by a factor of 1.1 than the unweighted one",
            treatment=branch("tis", 8),
            control=branch("none", 8),
            measure=VARIANCE,
            expected="more",
            margin=1.1,
            scale="ratio",
        ),
    ),
    num_seeds=20,
    also=tuple(branch(remedy, 8) for remedy in ("R2", "tis-R3", "Pr2", "Pr3")),
    shown=("rollout_corr/k3_kl", "staleness/k3_kl", "actor/entropy"),
)
