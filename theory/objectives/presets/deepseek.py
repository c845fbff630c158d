"""DeepSeek-V3.2's GRPO: a response that is worse than its group and too far from mu adds nothing.

    term = w M min(r A, clip(r) A),  M = 0 where A < 0 and (1/|y|) sum_t log(mu_t/pi_t) > delta, else 1.

A model learns most from its own mistakes; mistakes that pi would no longer make only mislead it. M is no rejection: a
masked response stays in every denominator. Source: DeepSeek-V3.2 (arXiv 2512.02556) Eq. 9 for M and its section on
GRPO for the advantage without a deviation, by TRL 1.16 (`get_off_policy_mask`, which cites the equation) and public
notes on the report. Differs from source: (1) there old is the inference engine's own record, so that r is pi/mu; here r
is pi/old, and `token_is` makes the weight pi/mu with a clip on pi/old; (2) the report prints neither delta nor the
bounds: 0.5 is the example of TRL's documentation, 0.2 is PPO's; (3) its KL penalty is `kl_estimator="k3_is"`, off here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.fields import About
from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import length_norm
from theory.objectives.corrections import NoCorrection
from theory.objectives.factors import Factor, log_ratio
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, MinClip, Tokens


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class SequenceMask(MinClip):
    """w M min(r A, clip(r) A), M = 0 on a response with A < 0 whose mean log(mu/pi) exceeds delta, nats per token.

    Gradient w M r A grad log pi, and 0 where a bound binds.
    """

    name: ClassVar[str] = "sequence_mask"
    is_tokenwise: ClassVar[bool] = False

    delta: Annotated[
        float, About("largest mean log(mu/pi) of a response with A < 0, nats", gt=0, source="arXiv 2512.02556 Eq. 9")
    ] = 0.5

    def masked(self, tokens: Tokens, advantages_B1: Float[Tensor, "B _T"]) -> Bool[Tensor, "B _T"]:
        """True for the responses that add nothing."""
        # Detached: M is decided by pi, and is no path for its gradient.
        gap_BT = log_ratio(tokens.logp_pi_BT.detach(), tokens.logp_mu_BT)
        length_B1 = tokens.is_response_BT.sum(1, keepdim=True).clamp(min=1)
        return (advantages_B1 < 0) & (-gap_BT.sum(1, keepdim=True) / length_B1 > self.delta)

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """PPO's bounds; the lower flag is up on all tokens of a masked response."""
        high_BT, low_BT = super().clipped(tokens, ratio_BT, advantages_B1)
        return high_BT, low_BT | self.masked(tokens, advantages_B1)

    def term(self, tokens: Tokens, log_ratio_BT: Tensor, weight: Factor, advantages_B1: Tensor) -> Tensor:
        """w M min(r A, clip(r) A)."""
        masked_B1 = self.masked(tokens, advantages_B1)
        # Both 0 and log 0, so that no product of logarithms brings the weight back.
        value_BT = torch.where(masked_B1, 0.0, weight.value_BT)
        weight = Factor(value_BT, torch.where(masked_B1, -torch.inf, weight.log_BT))
        return super().term(tokens, log_ratio_BT, weight, advantages_B1)

    def formula(self, ratio: str, weight: str) -> str:
        """The term, with the rule for M."""
        rule = f"M = 0 where A < 0 and (1/|y_i|) sum_t log(mu_t/pi_t) > {self.delta:g}"
        return f"M {super().formula(ratio, weight)} [{rule}]"


PRESETS = (
    Objective(
        "deepseek_v32", "group_mean", ratios.token, SequenceMask(0.2, 0.2), NoCorrection(), length_norm,
        title="DeepSeek-V3.2's GRPO",
    ),
)  # fmt: skip
