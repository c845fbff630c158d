"""A Mixture-of-Experts model has a larger engine gap than its dense twin."""

from __future__ import annotations

from sandbox.claims.arms import DENSE, short
from sandbox.claims.c10_r3_halves_the_gap import of_shape
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import EXTREME, KL

DENSE_TWIN = short("minirl", name="dense", changes=DENSE)

CLAIM = Claim(
    number=9,
    name="moe_gap_exceeds_dense",
    sentence="A Mixture-of-Experts model has a larger engine gap than its dense twin.",
    source="R3 (arXiv 2510.11370) sec. 3.1, Fig. 2",
    home="paper",
    fresh_seeds=21,
    num_seeds=12,
    predictions=(
        Prediction(
            words="k3 KL(mu || old) over the first 40 updates is higher by half at least (2.4 times in the paper)",
            treatment=of_shape("wide"),
            control=DENSE_TWIN,
            measure=KL,
            expected="more",
            margin=1.5,
            scale="ratio",
        ),
        Prediction(
            words="F(2) over the first 40 updates is higher by 3 times at least (ten in the paper)",
            treatment=of_shape("wide"),
            control=DENSE_TWIN,
            measure=EXTREME,
            expected="more",
            margin=3.0,
            scale="ratio_of_means",
        ),
    ),
    remarks={
        "stress": "Likely reason: FP8 and the rounded cache give the dense twin a heavy tail of its own (F(2) 7e-3; "
        "8e-6 in `paper`), beside which flipped routers add less.",
    },
)
