"""The tables of the objectives' laws: for each implementation, its formula written once more, by hand, on plain lists.

A row stands here for every registered name; `test_objective_laws.py` and `test_trust_regions.py` run every law over
every row, and the first fails where a name has none. Nothing here calls the code it describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.theory.objective_batches import (
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
    ratio_stops,
    sqrt_stops,
    stopped_whole,
    tv_far,
    unsigned_stops,
)  # fmt: skip
from theory.objectives import PRESETS, Objective, correction, preset
from theory.objectives import trust_regions as tr
from theory.objectives.presets.ctpo import SqrtClip
from theory.objectives.presets.deepseek import SequenceMask
from theory.objectives.presets.dual_clip import DualClip
from theory.objectives.presets.gmpo import GeometricClip
from theory.objectives.presets.sapo import SoftGate
from theory.objectives.presets.vespo import GammaKernel

# ---- ratios ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RatioRow:
    """`by_hand` on the log-ratios of one response; `jacobian`[t][u] is d ratio_t / d log pi_u."""

    by_hand: Callable[[list[float]], list[float]]
    jacobian: Callable[[list[float]], list[list[float]]]


def _diagonal(x: list[float]) -> list[list[float]]:
    return [[a if t == u else 0.0 for u in range(len(x))] for t, a in enumerate(x)]


def _same(value: float, n: int) -> list[float]:
    return [value] * n


def _geometric(x: list[float]) -> float:
    return math.exp(sum(x) / len(x))


RATIO_ROWS = {
    "none": RatioRow(lambda x: _same(1.0, len(x)), lambda x: _diagonal(_same(0.0, len(x)))),
    "token": RatioRow(lambda x: [math.exp(a) for a in x], lambda x: _diagonal([math.exp(a) for a in x])),
    "sequence_geometric": RatioRow(
        lambda x: _same(_geometric(x), len(x)), lambda x: [_same(_geometric(x) / len(x), len(x)) for _ in x]
    ),
    "sequence_geometric_token": RatioRow(
        lambda x: _same(_geometric(x), len(x)), lambda x: _diagonal(_same(_geometric(x), len(x)))
    ),
    "sequence_product": RatioRow(
        lambda x: _same(math.exp(sum(x)), len(x)), lambda x: [_same(math.exp(sum(x)), len(x)) for _ in x]
    ),
    "prefix_product_token": RatioRow(
        lambda x: [math.exp(sum(x[: t + 1])) for t in range(len(x))],
        lambda x: _diagonal([math.exp(sum(x[: t + 1])) for t in range(len(x))]),
    ),
}

# ---- corrections -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorrectionRow:
    """`weights` from the ratios of one response and the parameters, `keeps` from its ratios old/mu.

    `tight` are parameters that bind on some tokens of a batch with moderate gaps, and not on others; `free` ones that
    bind nowhere.
    """

    weights: Callable[..., list[float]]
    keeps: Callable[..., bool] = lambda rho, **_: True
    tight: dict[str, float] | None = None
    free: dict[str, float] | None = None


def _prefix_products(rho: list[float]) -> list[float]:
    return [math.prod(rho[: t + 1]) for t in range(len(rho))]


def minpro(rho: list[float], cap: float) -> list[float]:
    return [min(r * min(rho[:t], default=1.0), cap) for t, r in enumerate(rho)]


def ones(rho: list[float], **_: float) -> list[float]:
    return [1.0] * len(rho)


_FREE = {"cap": math.inf}
_TIGHT = {"cap": 1.1}
CORRECTION_ROWS = {
    "none": CorrectionRow(ones),
    "token_is": CorrectionRow(lambda rho: rho),
    "token_tis": CorrectionRow(lambda rho, cap: [min(x, cap) for x in rho], tight=_TIGHT, free=_FREE),
    "prefix_tis": CorrectionRow(
        lambda rho, cap: [min(x, cap) for x in _prefix_products(rho)], tight=_TIGHT, free=_FREE
    ),
    "minpro": CorrectionRow(minpro, tight=_TIGHT, free=_FREE),
    "seq_tis": CorrectionRow(
        lambda rho, cap: [min(math.prod(rho), cap)] * len(rho), tight=_TIGHT, free=_FREE
    ),
    "icepop": CorrectionRow(
        lambda rho, lo, hi: [x if lo <= x <= hi else 0.0 for x in rho],
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "seq_mis": CorrectionRow(
        lambda rho, lo, hi: [math.prod(rho)] * len(rho), lambda rho, lo, hi: lo <= math.prod(rho) <= hi,
        tight={"lo": 0.8, "hi": 1.2}, free={"lo": 0.0, "hi": math.inf},
    ),
    "geo_rs": CorrectionRow(
        ones, lambda rho, lo, hi: lo <= math.prod(rho) ** (1 / len(rho)) <= hi,
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "k3_rs": CorrectionRow(
        ones, lambda rho, max_k3: sum(x - 1 - math.log(x) for x in rho) / len(rho) <= max_k3,
        tight={"max_k3": 0.01}, free={"max_k3": math.inf},
    ),
    "token_clip": CorrectionRow(
        lambda rho, lo, hi: [min(max(x, lo), hi) for x in rho],
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "seq_clip": CorrectionRow(
        lambda rho, lo, hi: [min(max(math.prod(rho), lo), hi)] * len(rho),
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "seq_max_k2": CorrectionRow(
        ones, lambda rho, max_k2: all(math.log(x) ** 2 / 2 <= max_k2 for x in rho),
        tight={"max_k2": 0.02}, free={"max_k2": math.inf},
    ),
    "seq_max_k3": CorrectionRow(
        ones, lambda rho, max_k3: all(x - 1 - math.log(x) <= max_k3 for x in rho),
        tight={"max_k3": 0.02}, free={"max_k3": math.inf},
    ),
    "token_k1": CorrectionRow(
        lambda rho, lo, hi: [float(lo <= x <= hi) for x in rho],
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "token_k2": CorrectionRow(
        lambda rho, max_k2: [float(math.log(x) ** 2 / 2 <= max_k2) for x in rho],
        tight={"max_k2": 0.01}, free={"max_k2": math.inf},
    ),
    "token_k3": CorrectionRow(
        lambda rho, max_k3: [float(x - 1 - math.log(x) <= max_k3) for x in rho],
        tight={"max_k3": 0.01}, free={"max_k3": math.inf},
    ),
}  # fmt: skip


def fits(preset_name: str, correction_name: str) -> bool:
    """Whether the preset takes the correction: a region that weighs by pi/mu itself has no weight beside it."""
    return PRESETS[preset_name].trust_region.weight_ratio != "none" or not correction(correction_name).weighted


def tuned(preset_name: str, correction_name: str | None) -> Objective:
    """The preset under the named correction of the engine gap, with the row's tight parameters; None is its own."""
    if correction_name is None:
        return preset(preset_name)
    return preset(preset_name, correction=correction(correction_name, **(CORRECTION_ROWS[correction_name].tight or {})))


# ---- trust regions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegionRow:
    """A region with tight bounds and one with none, its bounds by hand, and d term / d log pi on a token ratio.

    `scored`: the value is weight times log pi, so that all of the weight is stopped. `signed`: A decides which bound
    can bind. `divergence`: bounds are on probabilities, not on ratios. `bounded` where there are bounds at all,
    `binds` which of the two can bind, above and below; `whole` where a token's term depends on its whole response even
    without them.
    """

    tight: Any
    free: Any
    stops: Stops
    slope: Callable[[Response], list[float]]
    scored: bool = True
    signed: bool = True
    divergence: bool = False
    bounded: bool = True
    binds: tuple[bool, bool] = (True, True)
    whole: bool = False


def no_stops(x: Response) -> list[tuple[bool, bool]]:
    """No token is stopped."""
    return [(False, False)] * len(x.pi)


_TV = divergence_stops(tv_far, 0.03, 0.05)
_KL = divergence_stops(kl_far, 0.005, 0.01)
_CPPO = divergence_stops(cppo_far(0.03, 0.5), 0.04, 0.06)
_RATIO = ratio_stops(0.1, 0.2)
_DUAL = dual_stops(0.1, 0.2, 1.4)
_SQRT, _MASKING = sqrt_stops(0.05, 0.1, 0.15, prefix=False), masking_stops(0.1, 0.2, 0.1)
REGION_ROWS = {
    "none": RegionRow(tr.NoRegion(), tr.NoRegion(), no_stops, stopped_whole(no_stops), bounded=False),
    "minirl_mask": RegionRow(tr.MiniRLMask(0.1, 0.2), tr.MiniRLMask(1.0, math.inf), _RATIO, stopped_whole(_RATIO)),
    "min_clip": RegionRow(tr.MinClip(0.1, 0.2), tr.MinClip(1.0, math.inf), _RATIO, stopped_whole(_RATIO), scored=False),
    "dual_clip": RegionRow(
        DualClip(0.1, 0.2, 1.4), DualClip(1.0, math.inf, math.inf), _DUAL, stopped_whole(_DUAL),
        scored=False, signed=False,
    ),
    "weight_clip": RegionRow(
        tr.WeightClip(0.1, 0.2), tr.WeightClip(1.0, math.inf), unsigned_stops(0.1, 0.2), bounded_weight(0.1, 0.2),
        signed=False,
    ),
    "dppo_tv": RegionRow(
        tr.BinaryTV(0.03, 0.05), tr.BinaryTV(math.inf, math.inf), _TV, stopped_whole(_TV), divergence=True
    ),
    "dppo_kl": RegionRow(
        tr.BinaryKL(0.005, 0.01), tr.BinaryKL(math.inf, math.inf), _KL, stopped_whole(_KL), divergence=True
    ),
    "cppo": RegionRow(
        tr.CPPO(0.04, 0.06, delta_b=0.03, w_min=0.5), tr.CPPO(math.inf, math.inf), _CPPO, stopped_whole(_CPPO),
        divergence=True,
    ),
    "sequence_mask": RegionRow(
        SequenceMask(0.1, 0.2, 0.1), SequenceMask(1.0, math.inf, math.inf), _MASKING, stopped_whole(_MASKING),
        scored=False, signed=False,
    ),
    "sqrt_clip": RegionRow(
        SqrtClip(0.05, 0.1, 0.15), SqrtClip(math.inf, math.inf, math.inf), _SQRT, stopped_whole(_SQRT),
        scored=False, signed=False,
    ),
    "geometric_clip": RegionRow(
        GeometricClip(0.1, 0.2), GeometricClip(math.inf, math.inf), geometric_stops(0.1, 0.2),
        geometric_slope(0.1, 0.2), scored=False, whole=True,
    ),
    "soft_gate": RegionRow(
        SoftGate(1.0, 1.5), SoftGate(1e-9, 1e-9), no_stops, gated(1.0, 1.5), scored=False, bounded=False
    ),
    "gamma_kernel": RegionRow(
        GammaKernel(2.0, 3.0, 3.0, 2.0), GammaKernel(), no_stops, kernelled(2.0, 3.0, 3.0, 2.0),
        bounded=False, whole=True,
    ),
}  # fmt: skip

# ---- aggregations ----------------------------------------------------------------------------------------------------

AGGREGATION_ROWS: dict[str, Callable[[list[list[float]]], float]] = {
    "token_sum": lambda rows: sum(x for row in rows for x in row) / len(rows),
    "length_norm": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "token_mean": lambda rows: sum(x for row in rows for x in row) / sum(len(row) for row in rows),
}
"""The aggregate of the kept responses, each a list of its own terms."""
