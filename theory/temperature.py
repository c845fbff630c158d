"""The sampling temperature T: every engine's policy is the softmax of logits / T.

MiniRL (arXiv 2512.01374) Eq. 5 has one policy that samples and is differentiated. Drawn at T and differentiated at 1,
tokens come from mu_T while the score function is grad log pi_1, whose mean under mu_T is not 0: the gradient is biased.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def tempered(logits: Float[Tensor, "*rows V"], temperature: float) -> Float[Tensor, "*rows V"]:
    """logits / T, whose softmax is the policy at temperature T > 0, in float32 at least; at T = 1 the same tensor."""
    if temperature == 1:
        return logits
    # vLLM's sampler divides in float32, too: a quotient rounded to 16 bits would be that of another policy.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
