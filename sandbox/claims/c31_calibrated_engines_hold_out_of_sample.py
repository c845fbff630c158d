"""Sandbox engines calibrated on a real vLLM trace have the same discrepancy on another model."""

from __future__ import annotations

from sandbox.ledger.claim import Arm, Claim, Prediction
from sandbox.ledger.measures import probe

FITTED = Arm("fitted-fp8-weights", made_by="engine_fit")
WORDS = "of the engine fitted to one model's traces over that of vLLM, on another model"

CLAIM = Claim(
    number=31,
    name="calibrated_engines_hold_out_of_sample",
    sentence="Sandbox engines calibrated on a real vLLM trace have the same discrepancy on a model they have not seen.",
    source="here; the ladder of R3 (arXiv 2510.11370) sec. 3",
    home="vllm",
    # F(1.25) needs the most: five exploratory seeds have a mean log ratio of -0.19 and an SD of 0.20. 94% power at a
    # 22nd of 5%, two-sided, for the three predictions together.
    fresh_seeds=24,
    predictions=tuple(
        Prediction(
            words=f"{figure} is vLLM's within a factor of {margin:g}",
            treatment=FITTED,
            control=1.0,
            measure=probe(figure, f"{figure} {WORDS}", "1"),
            expected="same",
            margin=margin,
            scale="ratio",
        )
        for figure, margin in (("k3 KL", 2.0), ("F(1.25)", 1.5), ("routers that differ", 1.5))
    ),
    regimes=("vllm",),
    shown=(),
)
