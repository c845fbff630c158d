"""The table of the presets' laws: each preset's gradient and bounds written once more, by hand, on plain lists."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.theory.laws_objectives import CORRECTION_ROWS, minpro, no_stops, ones
from tests.theory.objective_batches import (
    Batch,
    Response,
    Stops,
    bounded_weight,
    cppo_far,
    divergence_stops,
    dual_stops,
    gated,
    geometric_slope,
    geometric_stops,
    kernelled,
    kl_far,
    masking_stops,
    prefix_ratios,
    ratio_stops,
    ratios,
    sqrt_stops,
    stopped_whole,
    tokens_of,
    tv_far,
    unsigned_stops,
)  # fmt: skip


@dataclass(frozen=True)
class PresetRow:
    """`slope` is d sum of terms / d log pi of one response; `weights` is the preset's own correction on numerator/mu.

    `stops` are its bounds, `eps` the papers' widths. `scored`, `divergence` as in `RegionRow`; `ratio` is False where
    there is none, `sequence` True where it is a response's. `symmetric` are the numbers under which both signs of A
    have one rule, and `replayed` says that the ratio's value is not what its gradient is of: that of a whole prefix,
    with the token's own pi alone. `second` makes the second derivative of one response's terms from their gradient,
    token by token. `shows_widths`: formulas print eps, not the bound 1 + eps.
    """

    advantage: str
    aggregation: str
    slope: Callable[[Response], list[float]]
    stops: Stops | None = None
    eps: tuple[float, float] | None = None
    numerator: str = "old"
    weights: Callable[[list[float]], list[float]] = ones
    ratio: bool = True
    scored: bool = True
    divergence: bool = False
    sequence: bool = False
    symmetric: dict[str, float] | None = None
    replayed: bool = False
    second: Callable[[Tensor], Tensor] | None = None
    """None: that of a constant times a score (0), a token's ratio or a response's, whichever the row says."""
    shows_widths: bool = False

    def hessian(self, gradient_T: Tensor) -> Tensor:
        """The second derivative of the sum of a response's terms, (T, T)."""
        of_ratio = _of_a_response if self.sequence else _of_a_token
        return (self.second or (no_second if self.scored else of_ratio))(gradient_T)


def no_second(gradient_T: Tensor) -> Tensor:
    """The slope is a constant of pi, which nothing differentiates again."""
    return torch.zeros(len(gradient_T), len(gradient_T), dtype=gradient_T.dtype)


def _of_a_token(gradient_T: Tensor) -> Tensor:
    """d/dlog pi of w r A is w r A again: the gradient on the diagonal."""
    return gradient_T.diag()


def _of_a_response(gradient_T: Tensor) -> Tensor:
    """s A on each token: the derivative by each of its tokens is the gradient over |y|."""
    return (gradient_T[:, None] / len(gradient_T)).expand(-1, len(gradient_T))


def _of_unstopped_tokens(gradient_T: Tensor) -> Tensor:
    """GMPO: s A / |y| on unstopped tokens, and its derivative by each of them the same over |y|."""
    return gradient_T[:, None] * (gradient_T != 0) / len(gradient_T)


def _gspo_stops(x: Response) -> list[tuple[bool, bool]]:
    return [(x.A > 0 and x.s > 1 + 4e-4, x.A < 0 and x.s < 1 - 3e-4)] * len(x.pi)


def _gspo(x: Response) -> list[float]:
    """Every term of the response carries s, and ds/dlog pi_t = s/|y|: the mean weight times s A on each token."""
    return [0.0 if any(_gspo_stops(x)[0]) else math.fsum(x.w) / len(x.w) * x.s * x.A] * len(x.pi)


def _stopping(
    advantage: str, aggregation: str, bounds: Callable[[float, float], Stops], eps: tuple[float, float], **traits: Any
) -> PresetRow:
    return PresetRow(advantage, aggregation, stopped_whole(bounds(*eps)), bounds(*eps), eps, **traits)


def _diverging(advantage: str, aggregation: str, far: Callable[[Response, float], list[bool]], eps: float) -> PresetRow:
    def bounds(low: float, high: float) -> Stops:
        return divergence_stops(far, low, high)

    whole = {"numerator": "pi", "weights": lambda gap: gap, "divergence": True, "shows_widths": True}
    return _stopping(advantage, aggregation, bounds, (eps, eps), **whole)


_CTPO = sqrt_stops(0.025, 0.05, 0.05, prefix=True)


def _ctpo(x: Response) -> list[float]:
    stops = zip(x.w, prefix_ratios(x), _CTPO(x), strict=True)
    return [0.0 if high or low else w * c * x.A for w, c, (high, low) in stops]


_WIDE_OPEN = {"eps_low": math.inf, "eps_high": math.inf}
_CAP5 = {"numerator": "pi", "weights": lambda gap: [min(x, 5.0) for x in gap]}
_SCORE = stopped_whole(no_stops)
PRESET_ROWS = {
    "minirl": _stopping("group_mean", "token_sum", ratio_stops, (0.2, 0.27), **_CAP5),
    "minirl_lengthnorm": _stopping("group_mean", "length_norm", ratio_stops, (0.2, 0.27), **_CAP5),
    "minirl_no_is": _stopping("group_mean", "token_sum", ratio_stops, (0.2, 0.27)),
    "reinforce": PresetRow("group_mean", "token_sum", _SCORE, ratio=False),
    "ppo": _stopping("group_mean", "token_sum", ratio_stops, (0.2, 0.2), scored=False),
    "grpo": _stopping("group_norm", "length_norm", ratio_stops, (0.2, 0.2), scored=False),
    "grpo_dapo": _stopping("group_norm", "token_mean", ratio_stops, (0.2, 0.27), scored=False),
    "dr_grpo": _stopping("group_mean", "token_sum", ratio_stops, (0.2, 0.2), scored=False),
    "cispo": PresetRow("group_norm", "token_mean", bounded_weight(1.0, 4.0), unsigned_stops(1.0, 4.0), (1.0, 4.0)),
    "gspo": PresetRow("group_norm", "length_norm", _gspo, _gspo_stops, (3e-4, 4e-4), scored=False, sequence=True),
    "minpro": PresetRow("group_norm", "token_mean", _SCORE, numerator="pi", weights=lambda gap: minpro(gap, 5.0)),
    "dppo_tv": _diverging("group_mean", "token_sum", tv_far, 0.15),
    "dppo_kl": _diverging("group_mean", "token_sum", kl_far, 0.05),
    "cppo": _diverging("group_norm", "token_mean", cppo_far(0.015, 0.8), 0.15),
    "ppo_dual_clip": _stopping(
        "group_mean", "token_sum", lambda low, high: dual_stops(low, high, 3.0), (0.2, 0.2), scored=False
    ),
    "grpo_dual_clip": _stopping(
        "group_norm", "length_norm", lambda low, high: dual_stops(low, high, 3.0), (0.2, 0.2), scored=False
    ),
    "luspo": PresetRow("group_norm", "token_sum", _gspo, _gspo_stops, (3e-4, 4e-4), scored=False, sequence=True),
    "sapo": PresetRow(
        "group_norm", "length_norm", gated(1.0, 1.05), scored=False, second=no_second, symmetric={"tau_neg": 1.0}
    ),
    "gmpo": PresetRow(
        "group_norm",
        "length_norm",
        geometric_slope(0.4, 0.4),
        geometric_stops(0.4, 0.4),
        (0.4, 0.4),
        scored=False,
        second=_of_unstopped_tokens,
        shows_widths=True,
        symmetric=_WIDE_OPEN,
    ),
    "vespo": PresetRow(
        "group_norm", "token_mean", kernelled(2.0, 3.0, 3.0, 2.0), symmetric={"k_neg": 2.0, "lambda_neg": 3.0}
    ),
    "ctpo": PresetRow(
        "group_norm",
        "token_mean",
        _ctpo,
        _CTPO,
        (0.025, 0.05),
        scored=False,
        replayed=True,
        shows_widths=True,
        symmetric=_WIDE_OPEN | {"eps_c": math.inf},
    ),
    "deepseek_v32": _stopping(
        "group_mean",
        "length_norm",
        lambda low, high: masking_stops(low, high, 0.5),
        (0.2, 0.2),
        scored=False,
        symmetric={"eps_low": 1.0, "eps_high": math.inf, "delta": math.inf},
    ),
}


EVERY: list[tuple[str, str | None]] = [
    *((name, None) for name in PRESET_ROWS),
    *(("minirl", name) for name in CORRECTION_ROWS),
    *((preset_name, name) for preset_name in ("gspo", "cppo") for name in ("seq_mis", "minpro")),
]
"""Each preset with its own correction, each correction under one preset, and the sequence-wide ones together."""


def gradient_by_hand(
    row: PresetRow,
    batch: Batch,
    weights: Callable[[list[float]], list[float]],
    keeps: Callable[[list[float]], bool] = lambda rho: True,
    numerator: str = "old",
) -> Tensor:
    """The gradient assembled on lists: each token's slope over the aggregation's denominator, 0 elsewhere."""
    grad, lengths = torch.zeros_like(batch.pi), []
    for b in range(len(batch.pi)):
        pi, old, mu = tokens_of(batch, b)
        if not pi or not keeps(ratios(old, mu)):
            continue
        w = weights(ratios(pi if numerator == "pi" else old, mu))
        r = ratios(pi, old) if row.ratio and numerator == "old" else [1.0] * len(pi)
        whole = [a * x for a, x in zip(w, r, strict=True)]
        slope = row.slope(Response(pi, old, mu, batch.advantages[b].item(), w, whole))
        scale = 1 / len(pi) if row.aggregation == "length_norm" else 1.0
        grad[b, batch.mask[b]] = scale * torch.tensor(slope, dtype=grad.dtype)
        lengths.append(len(pi))
    denominator = sum(lengths) if row.aggregation == "token_mean" else len(lengths)
    return grad / denominator if lengths else grad
