"""A remedy moves the border and does not remove it: at twice the router noise every one of them collapses."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = BorderClaim(
    number=44,
    name="beyond_the_border_nothing_holds",
    sentence="At N = 8 and twice the router noise of the border (KL 1.0; 0.2 under R3) every remedy collapses.",
    source="here; against R3 (arXiv 2510.11370) sec. 5.2, where R3 keeps every run from collapsing",
    predictions=tuple(
        Prediction(
            words=f"router noise 1.0, N = 8: {words} collapses in more than half of the runs",
            treatment=at("r1.0", remedy, 8, preset),
            control=0.5,
            measure=COLLAPSED,
            expected="more",
        )
        for words, remedy, preset in (
            ("R3", "R3", "grpo"),
            ("truncated importance sampling", "tis", "grpo"),
            ("truncated importance sampling with R3", "tis-R3", "grpo"),
            ("GSPO", "none", "gspo"),
        )
    ),
    num_seeds=12,
    remarks={"border": "Tried were R3, Token-TIS, both together, and GSPO: not R2, Pr2, Pr3 or a dual clip."},
)
