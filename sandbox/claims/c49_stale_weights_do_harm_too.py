"""An engine gap without any numerics: weights that are one rollout old end training too, and replay is no help.

Does routing end training at the border, or any gap? An exact engine with older weights routes as they did. With seeds
20 and 21, tried before the claim was written, runs collapsed without a remedy and with R3, and one of two with TIS.
"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, most_collapse
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import AREA

CLAIM = BorderClaim(
    number=49,
    name="stale_weights_do_harm_too",
    sentence=(
        "At N = 8 an exact engine whose weights are one rollout old ends GRPO's training, R3 does not prevent it, and "
        "the token weight raises accuracy."
    ),
    source="here; policy staleness as in MiniRL (arXiv 2512.01374) sec. 2.4",
    predictions=(
        most_collapse("weights one rollout old, no remedy", at("stale", "none", 8), planned=0.45),
        most_collapse("weights one rollout old, R3", at("stale", "R3", 8), planned=0.45),
        Prediction(
            words="weights one rollout old: truncated importance sampling raises accuracy by 0.02",
            treatment=at("stale", "tis", 8),
            control=at("stale", "none", 8),
            measure=AREA,
            expected="more",
            margin=0.02,
            planned=0.1,
        ),
    ),
    # The number for a power of 80% (docs/decisions/0008).
    num_seeds=31,
)
