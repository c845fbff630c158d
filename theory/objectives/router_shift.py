"""The router-shift ratio: a token counts less where pi's routers have left the experts that old's had activated.

    Delta_t = (1/L) sum_l (1/K) sum_k abs(log p_pi(e_lk) - log p_old(e_lk)),    gamma_t = sg[max(exp(-Delta_t), floor)],

over the L MoE layers of the row that predicts the token and the K experts e_lk that old's pass used there, p a router's
score of an expert. Each token's pi/old is multiplied by gamma before any clip and any mean over the response, in the
same way for GRPO, GSPO and GMPO; RSPO is GMPO with it.

Source: RSPO (arXiv 2510.23027v2) Eq. 5 to 9 and 11, by its abstract and public implementations in verl that cite these
equations, where the floor is 0.8; the paper's own text was not available. Differs from source: (1) p of a sigmoid
router is its sigmoid, where those implementations refuse all but softmax; (2) no probability is clamped; (3) the
experts are those that old's pass used, replayed and predicted ones included. Version 1 of the paper multiplied after
the clip.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from theory.objectives.factors import wide


def log_router_ratio(
    router_shift_BT: Float[Tensor, "B T"], floor: float, is_response_BT: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log gamma in nats, in [log floor, 0], a constant; 0 off the mask. `router_shift_BT` is Delta, at least 0."""
    shift_BT = torch.where(is_response_BT, wide(router_shift_BT.detach()), 0.0)
    return (-shift_BT).clamp(min=math.log(floor))
