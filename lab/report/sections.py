"""The order of the report: the figures and tables under each heading. A new one is one function in a list."""

from __future__ import annotations

from dataclasses import dataclass

from lab.report.figures import FigureFunction, Lines
from lab.report.overview import REWARD_TITLE
from lab.report.pictures import (
    ROUTING_LEVELS,
    deviation_tails,
    extreme_curve,
    probability_scatter,
    ratio_parts,
)
from lab.report.runs import ACCURACY, EXTREME
from lab.report.timing import STEP, TableFunction, Throughput, interruptions, payloads, shares, time_parts
from lab.report.tokens import token_difference, token_map
from lab.verdict import ENTROPY, KL, REWARD
from theory.metrics import REGISTRY

LEARNING: tuple[FigureFunction, ...] = (Lines("accuracy", "Held-out accuracy", ACCURACY, style="points"),)
DISCREPANCY: tuple[FigureFunction, ...] = (
    Lines("k3-kl", "KL between rollout and training engine", KL, axis="log", style="noisy"),
    Lines("extreme-fraction", "Extreme tokens, F(2)", EXTREME, axis="log", style="noisy"),
    Lines("effective-sample-size", "Effective sample size", "rollout_corr/eff_sample_size", style="noisy"),
    Lines("truncated-fraction", "Tokens cut by the correction", "rollout_corr/truncated_fraction", style="noisy"),
    probability_scatter,
    extreme_curve,
)
OPTIMISATION: tuple[FigureFunction, ...] = (
    Lines("entropy", "Entropy of the policy", ENTROPY, style="noisy"),
    Lines("grad-norm", "Gradient norm", "actor/grad_norm", axis="log", style="noisy"),
    Lines("clip-high", "Tokens held at the upper bound", "actor/pg_clipfrac_high", style="noisy"),
    Lines("clip-low", "Tokens held at the lower bound", "actor/pg_clipfrac_low", style="noisy"),
    Lines("negative-ratio", "Largest ratio where A < 0", "actor/negative_ratio_max", axis="log", style="noisy"),
    ratio_parts,
    Lines("staleness-kl", "Policy staleness", "staleness/k3_kl", axis="log", style="noisy"),
    Lines("response-length", "Response length", "response_length/mean", style="noisy"),
    Lines("turns", "Turns of a response", "turns/mean", style="noisy"),
)
ROUTING: tuple[FigureFunction, ...] = (
    Lines("router-disagreement", "Routers that disagree", "routing/router_disagreement", style="noisy"),
    Lines("token-disagreement", "Tokens with a differing router", "routing/token_disagreement", style="noisy"),
    Lines("topk-agreement", "Top-k agreement of cached and present route", "routing/topk_agreement", style="noisy"),
    Lines("route-kl", "KL between cached and present route", "routing/route_kl", axis="log", style="noisy"),
    Lines("native-rows", "Rows without a record under replay", "routing/native_rows"),
    deviation_tails,
    *ROUTING_LEVELS,
    token_difference,
    token_map,
)
PREDICTOR: tuple[FigureFunction, ...] = (
    Lines("predictor-loss", "Predictor loss", "predictor/loss", axis="log", style="noisy"),
    Lines("predictor-norm", "Size of the predictor", "predictor/weight_norm"),
)
TIMING: tuple[FigureFunction, ...] = (
    Lines("step-time", "Time of a global step", STEP, style="noisy"),
    time_parts,
    Throughput("throughput", "Tokens per second", "progress/num_tokens", style="noisy"),
    shares,
)


@dataclass(frozen=True)
class ReportSection:
    """A heading, a question that the section answers, its figures and tables."""

    id: str
    title: str
    question: str
    figures: tuple[FigureFunction, ...]
    tables: tuple[TableFunction, ...] = ()


SECTIONS = (
    ReportSection(
        "learning", "Learning", "Does the policy improve, also on problems that it never trained on?", LEARNING
    ),
    ReportSection(
        "discrepancy",
        "Training-inference discrepancy",
        "How far is the engine that sampled the tokens (mu) from the one that scores them (old)?",
        DISCREPANCY,
    ),
    ReportSection(
        "optimisation", "Optimisation", "Do the updates stay small, and does the policy keep exploring?", OPTIMISATION
    ),
    ReportSection(
        "routing",
        "Routing",
        "Do both engines, and both ends of a step, use the same experts?",
        ROUTING,
    ),
    ReportSection("predictor", "Route predictor", "Does the predictor learn where the router is going?", PREDICTOR),
    ReportSection(
        "timing",
        "Timing",
        "How long does a global step take, where does the time go, how much data travels, and what was interrupted?",
        TIMING,
        (payloads, interruptions),
    ),
)


def metric_title(name: str) -> str:
    """The title under which the report draws this metric over the steps; KeyError where it does not."""
    figures = [figure for section in SECTIONS for figure in section.figures if isinstance(figure, Lines)]
    titles = {REWARD: REWARD_TITLE} | {figure.name: figure.title for figure in figures}
    return titles[name]


def metric_words(name: str) -> str:
    """The metric's title in the report, with its unit; KeyError where it draws none."""
    return f"{metric_title(name)} [{REGISTRY[name].unit}]"
