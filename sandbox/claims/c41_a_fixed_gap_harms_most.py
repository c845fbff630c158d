"""Of engine gaps of one KL before training, the one that is never redrawn harms most, and router noise more than noise
on the logits."""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA

CLAIM = BorderClaim(
    number=41,
    name="a_fixed_gap_harms_most",
    sentence="At N = 8 and equal KL before training, an error that is never redrawn harms more than router noise, and "
    "that more than noise on the logits.",
    source="here; against R3 (arXiv 2510.11370) sec. 3, which blames the routers",
    predictions=(
        Prediction(
            words="noise on the logits with the KL of router noise 0.5 costs more than 0.05 against an exact engine",
            treatment=at("exact", "none", 8),
            control=at("logits1.6", "none", 8),
            measure=AREA,
            expected="more",
            margin=0.05,
            planned=0.15,
        ),
        Prediction(
            words="at the KL of router noise 0.3, noise on the logits leaves a higher accuracy, by 0.01",
            treatment=at("logits1.1", "none", 8),
            control=at("r0.3", "none", 8),
            measure=AREA,
            expected="more",
            margin=0.01,
            planned=0.09,
        ),
        Prediction(
            words="at the KL of router noise 0.3, INT4 weights (never redrawn) leave a lower accuracy, by 0.02",
            treatment=at("int4", "none", 8),
            control=at("r0.3", "none", 8),
            measure=AREA,
            expected="less",
            margin=0.02,
            planned=-0.1,
        ),
    ),
    num_seeds=16,
    also=(at("logits1.6", "tis", 8), at("logits1.6", "R3", 8), at("int4", "tis", 8), at("int4", "R3", 8)),
    also_seeds=8,
    remarks={"border": "The KLs are nearly equal: on the deciding seeds that of INT4 is 1.2 times router noise 0.3's."},
)
