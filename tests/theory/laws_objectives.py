"""The tables of the objectives' laws: for each implementation, its formula written once more, by hand, on plain lists.

A row stands here for every registered name; `test_objective_laws.py` runs every law over every row, and fails where a
name has none. Nothing here calls the code it describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from theory.objectives import Objective, correction, preset
from theory.objectives import trust_regions as tr
from theory.objectives.presets.ctpo import SqrtClip
from theory.objectives.presets.deepseek import SequenceMask
from theory.objectives.presets.dual_clip import DualClip
from theory.objectives.presets.gmpo import GeometricClip
from theory.objectives.presets.sapo import SoftGate
from theory.objectives.presets.vespo import GammaKernel

# ---- advantages ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdvantageRow:
    """`by_hand` on the rewards of one group; `degree` is the power of a common factor that the advantage keeps."""

    by_hand: Callable[[list[float]], list[float]]
    degree: int
    smallest_group: int


def _mean(x: list[float]) -> float:
    return math.fsum(x) / len(x)


def _group_norm(rewards: list[float]) -> list[float]:
    centred = [r - _mean(rewards) for r in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) if max(rewards) > min(rewards) else 0.0 for c in centred]


ADVANTAGE_ROWS = {
    "group_mean": AdvantageRow(lambda R: [r - _mean(R) for r in R], degree=1, smallest_group=1),
    "group_norm": AdvantageRow(_group_norm, degree=0, smallest_group=2),
    "leave_one_out": AdvantageRow(
        lambda R: [r - _mean(R[:i] + R[i + 1 :]) for i, r in enumerate(R)], degree=1, smallest_group=2
    ),
}


def _opo(rewards: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    rows = zip(rewards, lengths, strict=True)
    base = [math.fsum(r * n for r, n in zip(R, N, strict=True)) / sum(N) for R, N in rows]
    return [[r - b for r in R] for R, b in zip(rewards, base, strict=True)]


def _whiten(rewards: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    tokens = [r for R, N in zip(rewards, lengths, strict=True) for r, n in zip(R, N, strict=True) for _ in range(n)]
    mean = _mean(tokens)
    variance = math.fsum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)
    return [[(r - mean) / math.sqrt(variance + 1e-8) for r in R] for R in rewards]


LENGTH_ADVANTAGE_ROWS: dict[str, Callable[[list[list[float]], list[list[int]]], list[list[float]]]] = {
    "opo": _opo,
    "reinforce_pp": _whiten,
    "reinforce_pp_baseline": lambda R, N: _whiten([[r - _mean(row) for r in row] for row in R], N),
}
"""The advantages that see lengths, on the rewards and lengths of the whole batch."""


def optimal_token_by_hand(rewards: list[float], tokens: list[list[tuple[float, float]]]) -> list[list[float]]:
    """Of one group: responses of (old(y), sum_v old(v)^2) a sampled token; each token's reward less its baseline."""
    W = [[math.fsum(1 - 2 * p + q for p, q in row[: t + 1]) for t in range(len(row))] for row in tokens]
    found: list[list[float]] = []
    for own, R in zip(tokens, rewards, strict=True):
        found.append([])
        for t in range(len(own)):
            there = [(w[t], r) for w, r in zip(W, rewards, strict=True) if len(w) > t]
            found[-1].append(R - math.fsum(w * r for w, r in there) / math.fsum(w for w, _ in there))
    return found


TOKEN_ADVANTAGE_ROWS = {"optimal_token": optimal_token_by_hand}
"""The advantages per token, on one group."""

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
    bind nowhere. `looks_ahead` where a token's weight depends on later tokens.
    """

    weights: Callable[..., list[float]]
    keeps: Callable[..., bool] = lambda rho, **_: True
    tight: dict[str, float] | None = None
    free: dict[str, float] | None = None
    looks_ahead: bool = False


def _prefix_products(rho: list[float]) -> list[float]:
    return [math.prod(rho[: t + 1]) for t in range(len(rho))]


def _minpro(rho: list[float], cap: float) -> list[float]:
    return [min(r * min(rho[:t], default=1.0), cap) for t, r in enumerate(rho)]


def _ones(rho: list[float], **_: float) -> list[float]:
    return [1.0] * len(rho)


_FREE = {"cap": math.inf}
_TIGHT = {"cap": 1.1}
CORRECTION_ROWS = {
    "none": CorrectionRow(_ones),
    "token_is": CorrectionRow(lambda rho: rho),
    "token_tis": CorrectionRow(lambda rho, cap: [min(x, cap) for x in rho], tight=_TIGHT, free=_FREE),
    "prefix_tis": CorrectionRow(
        lambda rho, cap: [min(x, cap) for x in _prefix_products(rho)], tight=_TIGHT, free=_FREE
    ),
    "minpro": CorrectionRow(_minpro, tight=_TIGHT, free=_FREE),
    "seq_tis": CorrectionRow(
        lambda rho, cap: [min(math.prod(rho), cap)] * len(rho), tight=_TIGHT, free=_FREE, looks_ahead=True
    ),
    "icepop": CorrectionRow(
        lambda rho, lo, hi: [x if lo <= x <= hi else 0.0 for x in rho],
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "seq_mis": CorrectionRow(
        lambda rho, lo, hi: [math.prod(rho)] * len(rho), lambda rho, lo, hi: lo <= math.prod(rho) <= hi,
        tight={"lo": 0.8, "hi": 1.2}, free={"lo": 0.0, "hi": math.inf}, looks_ahead=True,
    ),
    "geo_rs": CorrectionRow(
        _ones, lambda rho, lo, hi: lo <= math.prod(rho) ** (1 / len(rho)) <= hi,
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "k3_rs": CorrectionRow(
        _ones, lambda rho, max_k3: sum(x - 1 - math.log(x) for x in rho) / len(rho) <= max_k3,
        tight={"max_k3": 0.01}, free={"max_k3": math.inf},
    ),
    "token_clip": CorrectionRow(
        lambda rho, lo, hi: [min(max(x, lo), hi) for x in rho],
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf},
    ),
    "seq_clip": CorrectionRow(
        lambda rho, lo, hi: [min(max(math.prod(rho), lo), hi)] * len(rho),
        tight={"lo": 0.9, "hi": 1.1}, free={"lo": 0.0, "hi": math.inf}, looks_ahead=True,
    ),
    "seq_max_k2": CorrectionRow(
        _ones, lambda rho, max_k2: all(math.log(x) ** 2 / 2 <= max_k2 for x in rho),
        tight={"max_k2": 0.02}, free={"max_k2": math.inf},
    ),
    "seq_max_k3": CorrectionRow(
        _ones, lambda rho, max_k3: all(x - 1 - math.log(x) <= max_k3 for x in rho),
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
    `whole` where a token's term depends on its whole response even without them.
    """

    tight: Any
    free: Any
    stops: Stops
    slope: Callable[[Response], list[float]]
    scored: bool = True
    signed: bool = True
    divergence: bool = False
    bounded: bool = True
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

# ---- presets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PresetRow:
    """`slope` is d sum of terms / d log pi of one response; `weights` is the preset's own correction on numerator/mu.

    `stops` are its bounds, `eps` the papers' widths. `scored`, `divergence` as in `RegionRow`; `ratio` is False where
    there is none, `sequence` True where it is a response's. `symmetric` are the numbers under which both signs of A
    have one rule, `curved` says that the value is no constant times a ratio, and `replayed` that the ratio's value is
    not what its gradient is of: that of a whole prefix, with the token's own pi alone.
    """

    advantage: str
    aggregation: str
    slope: Callable[[Response], list[float]]
    stops: Stops | None = None
    eps: tuple[float, float] | None = None
    numerator: str = "old"
    weights: Callable[[list[float]], list[float]] = _ones
    ratio: bool = True
    scored: bool = True
    divergence: bool = False
    sequence: bool = False
    symmetric: dict[str, float] | None = None
    curved: bool = False
    replayed: bool = False


def _gspo_stops(x: Response) -> list[tuple[bool, bool]]:
    return [(x.A > 0 and x.s > 1 + 4e-4, x.A < 0 and x.s < 1 - 3e-4)] * len(x.pi)


def _gspo(x: Response) -> list[float]:
    """Every term of the response carries s, and ds/dlog pi_t = s/|y|: the mean weight times s A on each token."""
    return [0.0 if any(_gspo_stops(x)[0]) else _mean(x.w) * x.s * x.A] * len(x.pi)


def _stopping(
    advantage: str, aggregation: str, bounds: Callable[[float, float], Stops], eps: tuple[float, float], **traits: Any
) -> PresetRow:
    return PresetRow(advantage, aggregation, stopped_whole(bounds(*eps)), bounds(*eps), eps, **traits)


def _diverging(advantage: str, aggregation: str, far: Callable[[Response, float], list[bool]], eps: float) -> PresetRow:
    def bounds(low: float, high: float) -> Stops:
        return divergence_stops(far, low, high)

    whole = {"numerator": "pi", "weights": lambda gap: gap, "divergence": True}
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
    "minpro": PresetRow("group_norm", "token_mean", _SCORE, numerator="pi", weights=lambda gap: _minpro(gap, 5.0)),
    "dppo_tv": _diverging("group_mean", "token_sum", tv_far, 0.15),
    "dppo_kl": _diverging("group_mean", "token_sum", kl_far, 0.05),
    "cppo": _diverging("group_norm", "token_mean", cppo_far(0.015, 0.8), 0.15),
    "ppo_dual_clip": _stopping(
        "group_mean", "token_sum", lambda low, high: dual_stops(low, high, 3.0), (0.2, 0.2), scored=False
    ),
    "luspo": PresetRow("group_norm", "token_sum", _gspo, _gspo_stops, (3e-4, 4e-4), scored=False, sequence=True),
    "sapo": PresetRow(
        "group_norm", "length_norm", gated(1.0, 1.05), scored=False, curved=True, symmetric={"tau_neg": 1.0}
    ),
    "gmpo": PresetRow(
        "group_norm",
        "length_norm",
        geometric_slope(0.4, 0.4),
        geometric_stops(0.4, 0.4),
        (0.4, 0.4),
        scored=False,
        curved=True,
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
