"""The truncated prefix weight does no worse in training than the token weight."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import FINAL_ACCURACY, SURVIVAL

PREFIX = (("algorithm.objective.correction", "{name: prefix_tis, numerator: pi, cap: 5.0}"),)

CLAIM = Claim(
    number=33,
    name="the_prefix_weight_in_training",
    sentence="The truncated prefix weight does no worse in training than the token weight.",
    source="here; the weight of theory/exact/decomposition.py, MinPRO (arXiv 2601.22718)",
    predictions=(
        Prediction(
            "on-policy, the token weight ends no higher",
            arm("minirl"),
            arm("minirl", name="prefix", changes=PREFIX),
            FINAL_ACCURACY,
            "at_most",
            0.02,
        ),
        Prediction(
            "on-policy, it lasts no longer",
            arm("minirl"),
            arm("minirl", name="prefix", changes=PREFIX),
            SURVIVAL,
            "at_most",
            0.05,
        ),
    ),
)
