"""Values of a trace's columns that no engine can have: positive log-probabilities, entropies below 0 or infinite.

NaN and -inf pass: a log-probability that is missing or 0 is a fault that the doctor names.
"""

from __future__ import annotations

import math

from jaxtyping import Bool, Float
from torch import Tensor

LOG_PROBABILITIES = ("logp_mu", "logp_old", "logp_pi", "top_logp_mu", "top_logp_old")
ROUNDING = 1e-2
"""Rounding can lift the log-probability of a sure token slightly above 0, and take its entropy as far below."""


def impossible(name: str, values: Float[Tensor, "T ..."], is_response_T: Bool[Tensor, " T"]) -> tuple[int, str] | None:
    """The first of the T tokens with such a value in the column of that name, and a sentence; None if there is none.

    Entropies are those of sampled tokens: elsewhere frameworks fill them with what they like.
    """
    if name in LOG_PROBABILITIES:
        is_bad, wanted = values > ROUNDING, f"log-probabilities (at most 0{_other(values)})"
    elif name == "entropy_old":
        is_bad = ((values < -ROUNDING) | (values == math.inf)) & is_response_T
        wanted = "finite entropies (at least 0)"
    else:
        return None
    if not bool(is_bad.any()):
        return None
    first = is_bad.nonzero()[0]
    return int(first[0]), f"{name}: expected {wanted}, got {float(values[tuple(first)]):.3g}"


def _other(values: Float[Tensor, "T ..."]) -> str:
    """Words for a column without any value below 0: probabilities, or log-probabilities of the other sign."""
    finite = values[values.isfinite()]
    if finite.numel() < 2 or bool((finite < 0).any()):
        return ""
    return "; these may be probabilities" if bool((finite <= 1).all()) else "; these may have the other sign"
