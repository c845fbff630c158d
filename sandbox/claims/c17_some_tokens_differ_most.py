"""Routing differences concentrate on some types of tokens."""

from __future__ import annotations

from sandbox.claims.arms import SEEDS_OF_SMALL_SPREAD, arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import probe

SHARE = probe("token_share_of_routing", "share of the variance of d between token types", "1")

CLAIM = Claim(
    number=17,
    name="some_tokens_differ_most",
    sentence="Routing differences concentrate on some types of tokens.",
    source="R3 (arXiv 2510.11370) App. L, Table 11",
    home="paper",
    fresh_seeds=38,
    predictions=(
        Prediction(
            words="a token's type explains more than a twentieth of the variance of d",
            treatment=arm("minirl"),
            control=0.0,
            measure=SHARE,
            expected="more",
            margin=0.05,
        ),
    ),
    num_seeds=SEEDS_OF_SMALL_SPREAD,
)
