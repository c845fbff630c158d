"""R3 costs at most 3.45% of a step, and no more where responses have several turns."""

from __future__ import annotations

from sandbox.claims.arms import arm
from sandbox.ledger.claim import Arm, Claim, Prediction
from sandbox.ledger.measures import STEP_SECONDS

TURNS = (
    ("task", "{kind: calculator, min_operations: 1, max_operations: 3, max_digits: 2, num_held_out: 64}"),
    ("cold_start.teacher", "null"),
    ("algorithm.sampling", "{max_tokens: 72, max_turns: 5, temperature: 1.0}"),
    ("engine.prefix_cache", "true"),
    ("num_steps", "40"),
)
"""The calculator task over a prefix cache that keeps routes beside keys and values (R3 sec. 4.2)."""


def in_turns(replay: str) -> Arm:
    """The first 40 updates of GRPO on responses of several turns."""
    return arm("grpo", replay, name="turns", changes=TURNS)


CLAIM = Claim(
    number=18,
    name="r3_costs_little",
    sentence="R3 costs at most 3.45% of a step, and rollouts of several turns with cached routes are no slower.",
    source="R3 (arXiv 2510.11370) sec. 4.2, 5.3, App. D and F",
    home="paper",
    # No fresh seeds: by `--power` it needs more than the 40 that are within reach (docs/decisions/0007).
    predictions=(
        Prediction(
            words="a global step of GRPO + R3 takes at most 1.0345 times as long",
            treatment=arm("grpo", "R3"),
            control=arm("grpo"),
            measure=STEP_SECONDS,
            expected="at_most",
            margin=1.0345,
            scale="ratio",
        ),
        Prediction(
            words="in several turns over the prefix cache, it takes at most 1.0345 times as long",
            treatment=in_turns("R3"),
            control=in_turns("none"),
            measure=STEP_SECONDS,
            expected="at_most",
            margin=1.0345,
            scale="ratio",
        ),
    ),
)
