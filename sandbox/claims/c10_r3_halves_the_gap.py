"""R3 halves the engine gap's KL and cuts F(2) tenfold, for several shapes of Mixture of Experts."""

from __future__ import annotations

from sandbox.claims.arms import short
from sandbox.ledger.claim import Arm, Claim, Prediction
from sandbox.ledger.measures import EXTREME, KL

SHAPES = {
    "wide": (),
    "sigmoid": (("model.gate", "deepseek_v3"),),
    "few": (("model.gate", "mixtral"), ("model.num_experts", "4"), ("model.expert_size", "64")),
    "shared": (("model.gate", "deepseek_v2"), ("model.shared_expert_size", "32")),
}
"""As in R3 Table 4: many experts with softmax (Qwen3), sigmoid (Moonlight), few (Mixtral), shared (DeepSeek-V2)."""


def of_shape(name: str, replay: str = "none") -> Arm:
    """The first 40 updates of a shape under the replay mode."""
    return short("minirl", replay, name=name, changes=SHAPES[name])


CLAIM = Claim(
    number=10,
    name="r3_halves_the_gap",
    sentence="R3 halves the engine gap's KL and cuts F(2) tenfold, for several shapes of Mixture of Experts.",
    source="R3 (arXiv 2510.11370) App. B, Table 4",
    home="paper",
    fresh_seeds=34,
    num_seeds=12,
    predictions=(
        Prediction(
            words="16 experts, softmax: KL at most two thirds",
            treatment=of_shape("wide", "R3"),
            control=of_shape("wide"),
            measure=KL,
            expected="less",
            margin=1.5,
            scale="ratio",
        ),
        Prediction(
            words="16 experts, softmax: F(2) at most a third",
            treatment=of_shape("wide", "R3"),
            control=of_shape("wide"),
            measure=EXTREME,
            expected="less",
            margin=3.0,
            scale="ratio_of_means",
        ),
        *(
            Prediction(
                words=f"{words}: KL at most two thirds",
                treatment=of_shape(shape, "R3"),
                control=of_shape(shape),
                measure=KL,
                expected="less",
                margin=1.5,
                scale="ratio",
            )
            for words, shape in (
                ("16 experts, sigmoid", "sigmoid"),
                ("4 experts, softmax over the chosen", "few"),
                ("with a shared expert", "shared"),
            )
        ),
    ),
    remarks={"paper": "The predictions ask for less: two thirds of the KL, and a third of F(2), for one shape."},
)
