"""Numbers of a run that are not among its metrics, read from its last trace when it ends."""

from __future__ import annotations

import math

import torch

from lab.records import RunFolder
from lab.report.tokens import differences_of
from lab.traces import Trace


def token_share_of_routing(folder: RunFolder) -> float:
    """The share of the variance of the routing difference d that a token's type explains, in [0, 1] (eta squared).

    eta^2 = sum_v n_v (mean d of type v - mean d)^2 / sum_s (d_s - mean d)^2, d of R3 (arXiv 2510.11370) App. H; about
    (types - 1) / tokens if types do not matter. nan without experts of both engines, or if d is constant.
    """
    trace = _last(folder)
    found = None if trace is None else differences_of(trace)
    if found is None:
        return math.nan
    tokens, differences = found[0].long(), found[1].double()
    total = ((differences - differences.mean()) ** 2).sum()
    if total == 0:
        return math.nan
    # Types that do not occur count 1: a mean of 0 / 1, which no token reads, where 0 / 0 would be nan.
    counts = torch.bincount(tokens).clamp(min=1).double()
    means = torch.bincount(tokens, weights=differences) / counts
    return float(((means[tokens] - differences.mean()) ** 2).sum() / total)


def _last(folder: RunFolder) -> Trace | None:
    paths = folder.traces()
    return Trace.load(paths[-1]) if paths else None


def probes_of(folder: RunFolder) -> dict[str, float]:
    """All probes of a finished run, by name."""
    return {"token_share_of_routing": token_share_of_routing(folder)}
