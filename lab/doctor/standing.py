"""The standing of a trace among published figures (published.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lab.doctor import gap
from lab.doctor.evidence import disagreement
from lab.doctor.published import (
    BF16,
    CHI2,
    EXTREME,
    K1,
    K3,
    LOGP_GAP,
    PEARSON,
    PROB_GAP,
    REPORTS,
    ROUTERS,
    Report,
)
from lab.doctor.view import View
from lab.report.style import number
from lab.traces import Trace
from theory.divergences import chi2_token, k1_kl_mu_old

FEW = 2
"""Fewest values of a group that make a range."""


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure: its title, its formula, and the function of its value, which returns None without data."""

    title: str
    formula: str
    of: Callable[[View], float | None]


def _chi2(view: View) -> float:
    # One row: the sampled tokens are packed, and the function takes a batch.
    every_1n = torch.ones(1, len(view), dtype=torch.bool)
    return chi2_token(view.old_n[None], view.mu_n[None], every_1n).item()


def _pearson(view: View) -> float | None:
    probs_2n = torch.stack([view.mu_n, view.old_n]).exp()
    # The standard deviation of a single token is nan, and so would its correlation be.
    if len(view) < 2 or bool((probs_2n.std(1) == 0).any()):
        return None
    return torch.corrcoef(probs_2n)[0, 1].item()


MEASURES: dict[str, PublishedFigure] = {
    K3: PublishedFigure("k3 KL(mu, old)", "mean of rho - 1 - log rho, nats per token", gap.k3_kl),
    K1: PublishedFigure(
        "k1 KL(mu, old)", "mean of -log rho, nats per token",
        lambda view: k1_kl_mu_old(view.old_n, view.mu_n).mean().item(),
    ),
    CHI2: PublishedFigure("chi2 of tokens", "mean of rho^2 - 1", _chi2),
    EXTREME: PublishedFigure("F(2)", "share of tokens with max(rho, 1/rho) > 2", gap.extreme),
    PROB_GAP: PublishedFigure(
        "mean probability difference", "mean of the magnitude of old - mu",
        lambda view: (view.old_n.exp() - view.mu_n.exp()).abs().mean().item(),
    ),
    LOGP_GAP: PublishedFigure(
        "mean log-probability difference", "mean of the magnitude of log rho",
        lambda view: view.d_n.abs().mean().item(),
    ),
    PEARSON: PublishedFigure("Pearson correlation of probabilities", "of old and mu over tokens", _pearson),
    ROUTERS: PublishedFigure("routers that differ", "share of (row, layer) with other experts", disagreement),
}  # fmt: skip
"""Every published figure, rho = old/mu of a token sampled from mu, in the order of the page."""


def _is_plain(report: Report) -> bool:
    return report.formats == BF16 and not report.replay


GROUPS: dict[str, Callable[[Report], bool]] = {
    "bf16 against bf16 at 30B": lambda report: _is_plain(report) and report.size == 30,
    "bf16 against bf16": _is_plain,
    "bf16 against bf16 with replayed routes": lambda report: report.formats == BF16 and report.replay,
    "FP8 or MXFP8": lambda report: any("fp8" in form for form in report.formats),
}
"""The groups of reports that a trace is compared with; reports of a fault are in none."""


def figures_of(trace: Trace) -> dict[str, float]:
    """Each published figure that the trace has data for; empty where a log-probability is not finite."""
    view = View.of(trace)
    if not bool((view.mu_n.isfinite() & view.old_n.isfinite()).all()):
        return {}
    values = {name: measure.of(view) for name, measure in MEASURES.items()}
    return {name: value for name, value in values.items() if value is not None}


def reported(name: str, group: str) -> list[float]:
    """The published values of a figure in a group, in ascending order."""
    kept = [report for report in REPORTS if GROUPS[group](report) and not report.fault]
    return sorted(value for report in kept for value in report.figures.get(name, ()))


def place(name: str, value: float, group: str) -> str | None:
    """The value's place in the group, in words; None with fewer than FEW published values."""
    known = reported(name, group)
    if len(known) < FEW:
        return None
    span = f"{number(known[0])} to {number(known[-1])}, {len(known)} figures"
    if value > known[-1]:
        return f"above every figure reported for {group} ({span})"
    if value < known[0]:
        return f"below every figure reported for {group} ({span})"
    return f"within the figures reported for {group} ({span})"


def lines(figures: Mapping[str, float]) -> list[str]:
    """A line per figure of the trace: its value, and its place in each group that has enough published values."""
    out = []
    for name, value in figures.items():
        places = [words for group in GROUPS if (words := place(name, value, group)) is not None]
        if places:
            out.append(f"{MEASURES[name].title} {number(value)} is " + "; ".join(places) + ".")
    return out
