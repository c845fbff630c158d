"""On-policy, training without the weight of the engine gap collapses, with a sharp drop in entropy."""

from __future__ import annotations

from sandbox.claims.arms import AND_NOISY, COLLAPSES_AND_NOISY, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import COLLAPSED
from sandbox.ledger.exact import Link
from sandbox.ledger.measures import FINAL_ENTROPY

CLAIM = Claim(
    number=3,
    name="no_weight_collapses",
    sentence="On-policy, training without the weight of the engine gap collapses, with a sharp drop in entropy.",
    source="MiniRL (arXiv 2512.01374) sec. 4.3, Fig. 1",
    home="border",
    fresh_seeds=36,
    exact=(
        Link("a3", "What the claim says of reward, in expectation."),
        Link("w4", "What it says of entropy."),
    ),
    predictions=(
        Prediction(
            words="collapses more often, by a quarter of the runs",
            treatment=arm("minirl_no_is"),
            control=arm("minirl"),
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
        ),
        Prediction(
            words="ends with less entropy",
            treatment=arm("minirl_no_is"),
            control=arm("minirl"),
            measure=FINAL_ENTROPY,
            expected="less",
            margin=1.0,
            scale="ratio",
        ),
    ),
    seeds_in=COLLAPSES_AND_NOISY,
    regimes=AND_NOISY,
    remarks={
        "hot": "Seeds 0 to 4 were seen before 14 were asked for. Tried: a KL from 1.9e-3 to 2.6e-2 nats per token, "
        "rates of 1e-3 and 2e-3. Likely reason: 400 updates on 21 tokens per response are too few for the "
        "bias of the missing weight to add up.",
        "noisy": "One run of minirl-N1 and of minirl_no_is-N1 was seen, with other errors, as the regime was "
        "chosen. Likely reason: the bias of the missing weight is small beside the noise of 64 rewards "
        "that err; what falls, falls by that noise.",
    },
)
