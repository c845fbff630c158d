"""What harms is the size of the engine gap, not that it comes from routers: controls matched in KL before training."""

from __future__ import annotations

from sandbox.claims.border_arms import FIRST_SEED, at
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.course import AREA

CLAIM = Claim(
    number=41,
    name="any_gap_of_that_size_harms",
    sentence="At N = 8 an engine gap of equal KL harms alike, whether routers, logits or weights make it.",
    source="here; against R3 (arXiv 2510.11370) sec. 3, which blames the routers",
    home="border",
    predictions=(
        Prediction(
            words="noise on the logits with the KL of router noise 0.5 costs more than 0.1 against an exact engine",
            treatment=at("exact", "none", 8),
            control=at("logits1.6", "none", 8),
            measure=AREA,
            expected="more",
            margin=0.1,
        ),
        Prediction(
            words="at the KL of router noise 0.3, noise on the logits leaves an accuracy within 0.05 of it",
            treatment=at("logits1.1", "none", 8),
            control=at("r0.3", "none", 8),
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
        Prediction(
            words="at the KL of router noise 0.3, INT4 weights (never redrawn) leave one within 0.05 of it",
            treatment=at("int4", "none", 8),
            control=at("r0.3", "none", 8),
            measure=AREA,
            expected="same",
            margin=0.05,
        ),
    ),
    num_seeds=8,
    first_seed=FIRST_SEED,
    regimes=("border",),
    shown=("eval/accuracy", "rollout_corr/k3_kl", "actor/entropy"),
    also=(at("logits1.6", "tis", 8), at("logits1.6", "R3", 8), at("int4", "tis", 8), at("int4", "R3", 8)),
)
