"""Exact training under engine errors and their remedies: the tables and the picture of docs/exact-training.md.

`python -m tests.pages.exact_training` prints the tables and writes the picture: 320 runs of one to two seconds each,
on two processes. test_exact_training.py computes parts of them again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import matplotlib
import torch
from matplotlib.figure import Figure

from lab.report.style import PALETTE
from sandbox.border.pictures import svg
from theory.exact.engines import Engine, engine, engine_at
from theory.exact.forest import Forest
from theory.exact.levels import REWARDS
from theory.exact.networks import NetworkPolicy
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.exact.trajectory import Task, Trajectory, mean_entropy
from theory.exact.tree import PrefixTree
from theory.streams import stream

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "exact-training.svg"
NUM_PROBLEMS = 8
NUM_PROMPTS, NUM_OPENINGS = 6, 3
NUM_UPDATES = 200
NUM_PROCESSES = 2

REMEDIES = ("none", "token_is", "prefix_tis", "seq_tis", "centred")
TITLES = {
    "none": "no weight",
    "token_is": "token weight",
    "prefix_tis": "prefix weight",
    "seq_tis": "sequence weight",
    "centred": "no weight, centred score",
}


@dataclass(frozen=True)
class Error:
    """A row: an engine error, by the KL(mu || pi) a token at which it starts, or by its scale."""

    title: str
    name: str
    level: float | None = None
    scale: float = 0.0

    def build(self, first: NetworkPolicy, seed: int) -> Engine:
        """The engine of one problem."""
        generator = stream(seed, "exact training page", "engine", self.name)
        if self.level is None:
            return engine(self.name, self.scale, first, generator)
        return engine_at(self.name, self.level, first, generator)


ERRORS = {
    error.title: error
    for error in (
        Error("fixed by context, KL 0.18", "fixed", 0.18),
        Error("fixed by context, KL 0.057", "fixed", 0.057),
        Error("fixed by context, KL 0.015", "fixed", 0.015),
        Error("sharper, logits x 1.3", "sharper", scale=0.3),
        Error("flatter, logits / 1.3", "flatter", scale=0.3),
        Error("along one direction, KL 0.057", "low_rank", 0.057),
        Error("top-p 0.9", "top_p", scale=0.1),
        Error("weights rounded to INT4", "rounded", scale=1 / 7),
    )
}
NUMBERS = ("entropy", "entropy where lost", "reward")


@cache
def problem(seed: int) -> tuple[Task, NetworkPolicy]:
    """Six prompts with three openings each, of which two are lost; sparse rewards; a random network."""
    forest = Forest.uniform(PrefixTree(3, 5), NUM_PROMPTS, NUM_OPENINGS)
    generator = stream(seed, "exact training page")
    reward_CY = REWARDS["sparse"](forest, generator).view(forest.num_contexts, -1)
    for prompt in range(NUM_PROMPTS):
        lost = torch.randperm(NUM_OPENINGS, generator=generator)[1:]
        reward_CY[prompt * NUM_OPENINGS + lost] = 0.0
    return Task(forest, reward_CY.reshape(-1)), NetworkPolicy.random(forest, generator)


def lost_entropy(task: Task, policy: NetworkPolicy) -> float:
    """Entropy of pi's next token where no response earns anything, nats."""
    forest = task.forest
    is_lost_C = task.reward_Y.view(forest.num_contexts, -1).max(1).values == 0
    logp = [x[is_lost_C[forest.context_of_node(t)]] for t, x in enumerate(policy.logp())]
    return mean_entropy(Forest.uniform(forest.tree, int(is_lost_C.sum())), logp)


def run(error: Error, remedy: str, seed: int, observe_every: int = NUM_UPDATES) -> Trajectory:
    """One exact run: Adam, one update a rollout, infinite groups."""
    task, first = problem(seed)
    objective = reinforce("none" if remedy == "centred" else remedy)
    settings = Settings(
        objective, rate=1e-2, num_updates=NUM_UPDATES, centred=remedy == "centred", observe_every=observe_every
    )
    return train(task, first, error.build(first, seed), settings)


def ends(title: str, remedy: str, seed: int) -> tuple[float, ...]:
    """Where one run ends, by NUMBERS."""
    found = run(ERRORS[title], remedy, seed)
    assert isinstance(found.policy, NetworkPolicy)
    return found["entropy"][-1], lost_entropy(problem(seed)[0], found.policy), found["reward"][-1]


def cell(rows: Sequence[tuple[float, ...]], number: str) -> str:
    """A mean over problems, and the smallest and largest of them."""
    values = [row[NUMBERS.index(number)] for row in rows]
    return f"{mean(values):.3f} ({min(values):.2f} to {max(values):.2f})"


def table(found: dict[tuple[str, str], list[tuple[float, ...]]], number: str) -> str:
    """A table in Markdown: errors by remedies."""
    titles = dict.fromkeys(title for title, _ in found)
    head = [f"| {number} at the end | {' | '.join(TITLES[r] for r in REMEDIES)} |", "|---" * (len(REMEDIES) + 1) + "|"]
    rows = [f"| {t} | {' | '.join(cell(found[t, r], number) for r in REMEDIES)} |" for t in titles]
    return "\n".join([*head, *rows])


def figure(titles: Sequence[str] = ("fixed by context, KL 0.18", "sharper, logits x 1.3"), seed: int = 0) -> Figure:
    """Entropy and reward over updates: one policy, two engines, four remedies."""
    matplotlib.rcParams |= {"font.size": 9}
    drawn = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = drawn.subplots(2, len(titles), sharex=True, sharey="row")
    for x, title in enumerate(titles):
        for place, remedy in enumerate(("none", "token_is", "seq_tis", "centred")):
            found = run(ERRORS[title], remedy, seed, observe_every=5)
            style = {"color": PALETTE[place].line, "lw": 1.4, "ls": ("-", "-", "--", "-.")[place]}
            axes[0, x].plot(found.updates, found["entropy"], label=TITLES[remedy], **style)
            axes[1, x].plot(found.updates, found["reward"], **style)
        axes[0, x].set_title(f"engine: {title}")
        axes[1, x].set_xlabel("updates")
        axes[1, x].axhline(problem(seed)[0].optimum, color="#888888", lw=0.8, ls=":")
    axes[0, 0].set(ylabel="entropy of pi, nats", ylim=(0, None))
    axes[1, 0].set(ylabel="expected reward J(pi)", ylim=(0, None))
    axes[0, 0].legend(frameon=False)
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def main(titles: Sequence[str]) -> None:
    """Prints each error's row as soon as it is there, then the tables; draws the picture."""
    titles = titles or tuple(ERRORS)
    jobs = [(title, remedy, seed) for title in titles for remedy in REMEDIES for seed in range(NUM_PROBLEMS)]
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        for job, end in zip(jobs, pool.map(ends, *zip(*jobs, strict=True)), strict=True):
            found.setdefault(job[:2], []).append(end)
            print(*job, *(f"{x:.4f}" for x in end), file=sys.stderr, flush=True)
    for number in NUMBERS:
        print("\n" + table(found, number), flush=True)
    PICTURE.write_text(svg(figure()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
