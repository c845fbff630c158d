"""Bounds as pairs of numbers: `BOUNDS` lists every inequality of the project by name.

Each function returns a `Bound` with lhs <= rhs. Its docstring has the statement, the proof, and where it is tight or
loose.
"""

from __future__ import annotations

from collections.abc import Callable

from theory.bounds import conditional, corrections, gradient, routing, steps, topk, weights
from theory.bounds.bound import Bound

_FUNCTIONS: tuple[Callable[..., Bound], ...] = (
    routing.pinsker,
    routing.product_tv,
    routing.product_tv_coupling,
    routing.route_gradient,
    routing.route_gradient_diameter,
    routing.soft_route,
    routing.soft_route_averaged,
    routing.k_slot_route,
    routing.replay_bias,
    routing.replay_bias_mean,
    topk.topk_regret,
    topk.topk_regret_exchanged,
    topk.topk_margin_max_norm,
    topk.topk_margin_tv,
    topk.topk_margin_kl,
    topk.topk_margin_exact,
    topk.route_flips,
    steps.step_weights,
    steps.step_pinsker,
    steps.step_bretagnolle_huber,
    steps.step_cauchy_schwarz,
    steps.step_split,
    gradient.gap_triangle,
    gradient.gap_tv,
    gradient.gap_pinsker,
    gradient.gap_centred,
    gradient.gap_centred_kl,
    gradient.gap_cauchy_schwarz,
    gradient.gap_fisher,
    gradient.gap_split,
    conditional.gap_conditional,
    conditional.gap_conditional_kl,
    conditional.gap_conditional_fisher,
    conditional.gap_prefix,
    corrections.token_tis_bias,
    corrections.token_tis_bias_chi2,
    corrections.prefix_tis_bias,
    corrections.prefix_tis_bias_chi2,
    corrections.seq_tis_bias,
    corrections.seq_tis_bias_chi2,
    corrections.icepop_bias,
    corrections.icepop_bias_chi2,
    corrections.min_clip_bias,
    corrections.minirl_mask_bias,
    corrections.token_tis_variance,
    corrections.prefix_tis_variance,
    corrections.seq_tis_variance,
    weights.weight_variance,
    weights.weight_variance_kl,
    weights.effective_sample_size,
)

BOUNDS: dict[str, Callable[..., Bound]] = {function.__name__: function for function in _FUNCTIONS}
"""Every bound by name; a function's `Bound.name` is its name here."""

__all__ = ["BOUNDS", "Bound"]
