"""Along real training a router's shift stays within the bound of Pr2 Prop. B.1, in every layer."""

from __future__ import annotations

import math

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Measure, Prediction, Row


def _tightness(row: Row) -> float:
    pairs = zip(row["series"].get("routing/route_tv", []), row["series"].get("routing/route_kl", []), strict=True)
    ratios = [tv / math.sqrt(kl / 2) for tv, kl in pairs if tv is not None and kl is not None and kl > 0]
    return max(ratios) if ratios else math.nan


TIGHTNESS = Measure(
    "tv / bound", "largest window mean of TV(live, cached router) over sqrt(KL / 2), a row and layer", "1", _tightness
)

CLAIM = Claim(
    number=28,
    name="the_route_bound_holds",
    sentence="The bound of Prop. B.1 on a router's shift holds along training, and is tight within a factor of two.",
    source="Pr2 (arXiv 2606.00395) Prop. B.1",
    home="paper",
    fresh_seeds=22,
    predictions=(
        Prediction(
            words="Pr2, N = 8: in every window TV is within the bound",
            treatment=arm("grpo", "Pr2", 8),
            control=1.0,
            measure=TIGHTNESS,
            expected="at_most",
        ),
        Prediction(
            words="Pr2, N = 8: it is above half the bound",
            treatment=arm("grpo", "Pr2", 8),
            control=0.5,
            measure=TIGHTNESS,
            expected="more",
        ),
        Prediction(
            words="R2, N = 8: in every window TV is within the bound",
            treatment=arm("grpo", "R2", 8),
            control=1.0,
            measure=TIGHTNESS,
            expected="at_most",
        ),
    ),
    shown=("routing/route_tv", "routing/route_kl", "routing/staleness_tv"),
    remarks=dict.fromkeys(
        ("paper", "stress", "hot"),
        "That it holds is a theorem (Pinsker, then Jensen): what is tried is that both numbers are measured right. "
        "Tightness is that of the tightest window.",
    ),
)
