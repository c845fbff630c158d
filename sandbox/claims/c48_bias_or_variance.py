"""Bias or variance: either alone ends training at the border.

A bias does not depend on the number B of responses per update; the gradient's noise falls as 1/sqrt(B). Tried before
the deciding runs: with seeds 20 to 22 an exact engine's runs collapsed at 16 responses per update, and with 20 and 21
those under router noise collapsed at 256. Exact expected updates answer the other half: docs/exact-training.md, (f).
"""

from __future__ import annotations

from sandbox.claims.border_arms import BorderClaim, at, most_collapse, of_batch
from sandbox.ledger.claim import Prediction
from sandbox.ledger.course import COLLAPSED

CLAIM = BorderClaim(
    number=48,
    name="bias_or_variance",
    sentence=(
        "At N = 8 the engine gap ends training by its bias, with four times the responses per update too; with a "
        "quarter of them an exact engine's training ends by variance."
    ),
    source="here; the gap of MiniRL (arXiv 2512.01374) Eq. 5",
    predictions=(
        most_collapse("router noise 0.5, 256 responses per update", of_batch(at("r0.5", "none", 8), 256), planned=0.45),
        Prediction(
            words="they collapse more often than runs of an exact engine with 64, by a quarter of the runs",
            treatment=of_batch(at("r0.5", "none", 8), 256),
            control=at("exact", "none", 8),
            measure=COLLAPSED,
            expected="more",
            margin=0.25,
            planned=0.9,
        ),
        most_collapse("exact engine, 16 responses per update", of_batch(at("exact", "none", 8), 16), planned=0.45),
    ),
    # The number for a power of 80% (docs/decisions/0008).
    num_seeds=26,
    remarks={
        "border": "The bias has in it what GRPO's clip leaves open. With 64 responses and a dual clip most runs do not "
        "collapse (claim 63), and larger batches do not average out single tokens whose ratio has no bound."
    },
)
