"""The truncated prefix weight does no worse in training than the token weight."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA
from sandbox.ledger.exact import Link

PREFIX = (("algorithm.objective.correction", "{name: prefix_tis, numerator: pi, cap: 5.0}"),)

CLAIM = Claim(
    number=33,
    name="the_prefix_weight_in_training",
    sentence="The truncated prefix weight does no worse in training than the token weight.",
    source="here; the weight of theory/exact/decomposition.py, MinPRO (arXiv 2601.22718)",
    home="border",
    fresh_seeds=40,
    exact=(Link("b4", "The same two weights, untruncated."),),
    remarks={
        "border": "It could hardly fail: at N = 1 and this gap the token weight's own accuracy lies below the margin. "
        "It says nothing about a setting in which the token weight trains."
    },
    predictions=(
        Prediction(
            words="on-policy, the token weight ends no higher",
            treatment=arm("minirl"),
            control=arm("minirl", name="prefix", changes=PREFIX),
            measure=AREA,
            expected="at_most",
            margin=0.1,
        ),
    ),
)
