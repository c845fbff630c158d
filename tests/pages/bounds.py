"""The tightness of the bounds of the first-order gap on random policies: the tables of docs/bounds.md.

`python -m tests.pages.bounds` prints them; test_bounds.py computes rows of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import isnan
from statistics import median

import torch
from torch import Tensor

from lab.markdown import markdown_table
from tests.theory.bound_problems import draw_policy
from theory.bounds import BOUNDS, Bound
from theory.bounds.conditional import prefix_gap
from theory.bounds.gradient import gap
from theory.exact.levels import REWARDS, disturbed, logit_noise, scale_at, token_kl
from theory.exact.problem import Problem, true_gradient
from theory.exact.tree import PrefixTree
from theory.streams import stream

NUM_POLICIES = 200
NUM_TOKENS = 3

GAPS = (
    "gap_pinsker",
    "gap_tv",
    "gap_centred_kl",
    "gap_centred",
    "gap_triangle",
    "gap_cauchy_schwarz",
    "gap_conditional_kl",
    "gap_conditional",
    "gap_fisher",
    "gap_conditional_fisher",
)
CAP = 1.5
CUTS = ("token_tis_bias", "prefix_tis_bias", "seq_tis_bias")


def problem_at(index: int, kind: str, T: int, level: float, reward: str) -> Problem:
    """A random policy, and a mu at KL(pi || mu) = `level` nats per token from it, by noise on every node's logits."""
    generator = stream(index, "bounds page", kind, str(T), reward)
    tree = PrefixTree(NUM_TOKENS, T)
    target = draw_policy(kind, tree, generator, 1.0)
    logp, noise = target.logp(), logit_noise(tree, generator)
    reward_Y = REWARDS[reward](tree, generator)
    scale = scale_at(lambda s: token_kl(tree, logp, disturbed(logp, noise, s)), level)
    mu = disturbed(logp, noise, scale)
    return Problem(target, mu, mu, reward_Y)


def medians(
    columns: Sequence[Callable[[Problem], float]],
    kind: str,
    T: int,
    level: float,
    reward: str,
    num_policies: int = NUM_POLICIES,
) -> list[float]:
    """The median of each column over the first policies whose reward is not constant over responses."""
    rows = []
    for index in count():
        problem = problem_at(index, kind, T, level, reward)
        if problem.reward_Y.max() > problem.reward_Y.min():
            rows.append([column(problem) for column in columns])
        if len(rows) == num_policies:
            break
    # Where a reward has no gap at all, a bound may be 0, too, and their ratio NaN, which `median` would sort anywhere.
    return [median(value for value in values if not isnan(value)) for values in zip(*rows, strict=True)]


def ratio(name: str, *numbers: float) -> Callable[[Problem], float]:
    """lhs / rhs of that bound."""
    return lambda problem: float(BOUNDS[name](problem, *numbers).ratio)


def relative(gradient: Callable[[Problem], Tensor]) -> Callable[[Problem], float]:
    """A gap's norm over that of the true gradient."""
    return lambda problem: float(gradient(problem).norm() / true_gradient(problem).norm())


def weight_bias(name: str, cap: float) -> Callable[[Problem], float]:
    """The bias that a cap adds, over the norm of the true gradient."""

    def measured(problem: Problem) -> float:
        bound: Bound = BOUNDS[name](problem, cap)
        return float(bound.lhs / true_gradient(problem).norm())

    return measured


GAP_COLUMNS = (relative(gap), relative(prefix_gap), *(ratio(name) for name in GAPS))
GAP_NAMES = ("gap / truth", "prefix gap / truth", *(name.removeprefix("gap_").replace("_", " ") for name in GAPS))


def gap_row(kind: str, T: int, level: float, reward: str) -> str:
    """One row of a table of gaps, without its first cell."""
    return " | ".join(f"{x:.2g}" for x in medians(GAP_COLUMNS, kind, T, level, reward))


CUT_COLUMNS = tuple(
    column for name in CUTS for column in (weight_bias(name, CAP), ratio(name, CAP), ratio(f"{name}_chi2", CAP))
)
CUT_NAMES = tuple(
    f"{name.removesuffix('_bias').replace('_', ' ')}: {x}" for name in CUTS for x in ("bias", "tail", "chi2")
)


def cut_row(T: int, level: float) -> str:
    """One row of the table of cuts at C = 1.5, without its first cell."""
    return " | ".join(f"{x:.2g}" for x in medians(CUT_COLUMNS, "bigram", T, level, "sparse", 50))


def table(first: str, names: Iterable[str], rows: dict[str, str]) -> str:
    """A table in Markdown."""
    return markdown_table((first, *names), rows.items()).strip()


def main() -> None:
    """Prints the four tables."""
    torch.set_default_dtype(torch.float64)
    by_T = {str(T): gap_row("tabular", T, 1e-3, "sparse") for T in range(2, 9)}
    print(table("T", GAP_NAMES, by_T), flush=True)
    by_level = {f"{level:g}": gap_row("tabular", 5, level, "sparse") for level in (1e-4, 1e-3, 1e-2, 1e-1)}
    print("\n" + table("KL per token", GAP_NAMES, by_level), flush=True)
    by_kind = {
        f"{kind}, {reward}": gap_row(kind, 5, 1e-3, reward)
        for kind, reward in (("tabular", "single"), ("tabular", "dense"), ("bigram", "sparse"), ("bigram", "dense"))
    }
    print("\n" + table("policy, reward", GAP_NAMES, by_kind), flush=True)
    by_cut = {f"{T}, {level:g}": cut_row(T, level) for T in (2, 4, 6) for level in (0.1, 0.3)}
    print("\n" + table("T, KL per token", CUT_NAMES, by_cut), flush=True)


if __name__ == "__main__":
    main()
