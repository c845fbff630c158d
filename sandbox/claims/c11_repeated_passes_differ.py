"""Two forward passes of one training engine over the same tokens differ.

R3 reports a KL of 8.4e-4 between them (Fig. 4), in bf16 on GPUs; the same size is predicted here, in fp32 on a CPU.
"""

from __future__ import annotations

from dataclasses import replace

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Claim, Prediction
from sandbox.ledger.measures import between

# At N = 2 the micro-batches of the old pass have other rows than those of the gradient pass: at equal weights, only the
# order of sums differs.
REPEATED = replace(arm("minirl", n=2, name="repeated", changes=(
    ("training.reduction_order", "{units: 8}"), ("training.micro_batch_size", "48"),
    ("algorithm.optimizer.learning_rate", "0.0"), ("num_steps", "40"),
)), own_cold_start=True)  # fmt: skip
FIRST_STALENESS = between("staleness/k3_kl", 0.0, 1.0, "k3 KL(old || pi) at a learning rate of 0", "nats/token")

CLAIM = Claim(
    number=11,
    name="repeated_passes_differ",
    sentence="Two forward passes of one training engine over the same tokens differ, by a KL of 8.4e-4.",
    source="R3 (arXiv 2510.11370) sec. 3.3",
    home="paper",
    fresh_seeds=5,
    num_seeds=12,
    predictions=(
        Prediction(
            words="where sums depend on the micro-batch, KL(old || pi) of the first mini-step alone is above 8.4e-4",
            treatment=REPEATED,
            control=0.0,
            measure=FIRST_STALENESS,
            expected="more",
            margin=8.4e-4,
        ),
    ),
)
