"""Router shift: the distance of pi's routers from old's, on the experts that old's pass used, token by token.

Letters beyond theory/contracts.py: R rows of all responses together.
Paper: RSPO (arXiv 2510.23027); theory/objectives/router_shift.py says how an objective uses it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def router_shift(
    logp_old_RLK: Float[Tensor, "R L K"],
    logp_pi_RLK: Float[Tensor, "R L K"],
    offsets: Int[Tensor, " B_plus_1"],
    row_BT: Int[Tensor, "B T"],
    exists_BT: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Delta_t, nats, at least 0: mean over layers and experts of abs(log p_pi - log p_old); 0 where no token exists.

    The log-scores are of the same experts; token t of response b is predicted by its row `row_BT[b, t]`, the packed
    row offsets[b] + row_BT[b, t]. Raises ValueError without a layer.
    Source: RSPO (arXiv 2510.23027) Eq. 5 to 7.
    """
    if logp_old_RLK.shape[1] == 0:
        raise ValueError("router shift: expected at least 1 layer with a router, got 0")
    # The magnitude before the mean, so that experts that gain and lose do not cancel.
    shift_R = (logp_pi_RLK - logp_old_RLK).abs().mean((1, 2))
    # Padding reads row 0, and is masked out again.
    packed_BT = torch.where(exists_BT, offsets[:-1, None].to(row_BT.device) + row_BT, 0)
    return torch.where(exists_BT, shift_R[packed_BT], 0.0)


__all__ = ["router_shift"]
