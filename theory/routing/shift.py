"""Router shift: the distance of pi's routers from old's, on the experts that old's pass used, token by token.

Letters beyond theory/contracts.py: n response tokens of all responses together, F rows.
Paper: RSPO (arXiv 2510.23027); theory/objectives/router_shift.py says how an objective uses it.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of


def router_shift(
    old: RouterFeatures,
    pi: RouterFeatures,
    row_BT: Int[Tensor, "B T"],
    exists_BT: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Delta_t, nats, at least 0: mean over layers and experts of abs(log p_pi - log p_old); 0 where no token exists.

    Both have log-scores of the same experts in the place of logits, on every row; token t of response b is predicted by
    its row `row_BT[b, t]`. Compared where pi's are. Raises ValueError without a layer.
    Source: RSPO (arXiv 2510.23027) Eq. 5 to 7.
    """
    if not pi.layer_numbers:
        raise ValueError("router shift: expected at least 1 layer with a router, got 0")
    # Places by pi's offsets: `compared` refuses features of old that have other rows there.
    where_n = (pi.offsets[:-1, None] + row_BT)[exists_BT]
    offsets = offsets_of(exists_BT.sum(1).tolist())
    shift_nL1 = pi.at(where_n, offsets).compared(old.at(where_n, offsets), _distance)
    # Over layers last: each may be in another process.
    shift_n = shift_nL1.mean((1, 2))
    # masked_scatter fills places in the order in which the mask took them above.
    return shift_n.new_zeros(exists_BT.shape).masked_scatter(exists_BT, shift_n)


def _distance(logp_pi_FLK: Float[Tensor, "F L K"], logp_old_FLK: Float[Tensor, "F L K"]) -> Float[Tensor, "F L 1"]:
    """Mean over experts of abs(log p_pi - log p_old)."""
    # The magnitude before the mean, so that experts that gain and lose do not cancel.
    return (logp_pi_FLK - logp_old_FLK).abs().mean(2, keepdim=True)
