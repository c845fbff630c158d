"""PPO and GRPO with a second clip: where A < 0 a ratio above c adds a constant, however large it grows.

PPO's clip leaves that side open: an unlikely token that pi makes much likelier, in a response worse than its group, has
a term and a gradient without bound. Source: Ye et al. (arXiv 1912.09729), its dual-clip PPO, with c = 3.
Differs from source: (1) advantages are those of `ppo` and `grpo`: there is no critic here.
TRL's `delta` (INTELLECT-2's two-sided clip), min(min(r, delta) A, clip(r) A), is the same term with c = delta wherever
delta >= 1 + eps_high; verl calls c `clip_ratio_c`, and has it on by default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from theory.fields import About
from theory.names import listed
from theory.objectives import ratios
from theory.objectives.aggregations import length_norm, token_sum
from theory.objectives.corrections import NoCorrection
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import TRUST_REGIONS, MinClip, Tokens


@listed(TRUST_REGIONS)
@dataclass(frozen=True)
class DualClip(MinClip):
    """w max(min(r A, clip(r) A), c A) where A < 0, else PPO's w min(r A, clip(r) A).

    Gradient w r A grad log pi, and 0 where a bound binds: PPO's two, and r > c where A < 0.
    """

    name: ClassVar[str] = "dual_clip"

    clip_ratio_c: Annotated[float, About("largest ratio where A < 0", gt=1, source="arXiv 1912.09729")] = 3.0

    def clipped(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> tuple[Tensor, Tensor]:
        """PPO's bounds; the lower flag is also up where A < 0 and r > c."""
        high_BT, low_BT = super().clipped(tokens, ratio_BT, advantages_B1)
        return high_BT, low_BT | ((advantages_B1 < 0) & (ratio_BT > self.clip_ratio_c))

    def held(self, tokens: Tokens, ratio_BT: Tensor, advantages_B1: Tensor) -> Tensor:
        """The ratio at its bound: within [1 - eps_low, c] where A < 0."""
        # With A < 0 PPO's upper bound never binds: c alone holds the ratio from above.
        below_c_BT = ratio_BT.clamp(self.low, self.clip_ratio_c)
        return torch.where(advantages_B1 < 0, below_c_BT, super().held(tokens, ratio_BT, advantages_B1))

    def formula(self, ratio: str, weight: str) -> str:
        """The term."""
        bound = f"{self.clip_ratio_c:g} A"
        return f"{super().formula(ratio, weight)} [where A < 0: at least {' '.join(filter(None, (weight, bound)))}]"


PRESETS = (
    Objective(
        "ppo_dual_clip", "group_mean", ratios.token, DualClip(0.2, 0.2), NoCorrection(), token_sum,
        title="PPO with dual clip",
    ),
    Objective(
        "grpo_dual_clip", "group_norm", ratios.token, DualClip(0.2, 0.2), NoCorrection(), length_norm,
        title="GRPO with dual clip",
    ),
)  # fmt: skip
