"""Exact training under engine errors and their remedies: the tables of docs/exact-training-tables.md
and the picture of docs/exact-training.md.

`python -m tests.pages.exact_training` prints the tables and writes the picture: 360 runs of one to two seconds each,
on two processes. test_exact_training.py computes parts of them again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from statistics import mean

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.markdown import markdown_table
from lab.report.style import PALETTE, spread
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
    )
}
CASES = {"sparse": tuple(ERRORS), "single": ("fixed by context, KL 0.18", "sharper, logits x 1.3")}
"""The errors tried under each reward: a random quarter of an open context's responses is right, or one is."""
NUMBERS = ("entropy", "entropy where lost", "reward")


@cache
def problem(seed: int, reward: str = "sparse") -> tuple[Task, NetworkPolicy]:
    """Six prompts with three openings each, of which two are lost, that is never pay; a random network."""
    forest = Forest.uniform(PrefixTree(3, 5), NUM_PROMPTS, NUM_OPENINGS)
    generator, num = stream(seed, "exact training page"), forest.tree.num_responses
    if reward == "sparse":
        reward_CY = REWARDS[reward](forest, generator).view(-1, num)
    else:
        reward_CY = torch.stack([REWARDS[reward](forest.tree, generator) for _ in range(forest.num_contexts)])
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


@cache  # the picture and the tables have some in common
def run(error: Error, remedy: str, seed: int, reward: str = "sparse", observe_every: int = NUM_UPDATES) -> Trajectory:
    """One exact run: Adam, one update a rollout, infinite groups."""
    task, first = problem(seed, reward)
    objective = reinforce("none" if remedy == "centred" else remedy)
    settings = Settings(
        objective, rate=1e-2, num_updates=NUM_UPDATES, centred=remedy == "centred", observe_every=observe_every
    )
    return train(task, first, error.build(first, seed), settings)


def ends(title: str, remedy: str, seed: int, reward: str = "sparse") -> tuple[float, ...]:
    """The end of one run, by NUMBERS."""
    found = run(ERRORS[title], remedy, seed, reward)
    assert isinstance(found.policy, NetworkPolicy)
    return found["entropy"][-1], lost_entropy(problem(seed, reward)[0], found.policy), found["reward"][-1]


def cell(ends: Sequence[tuple[float, ...]], number: str) -> str:
    """A mean over problems, and the smallest and largest of them."""
    values = [end[NUMBERS.index(number)] for end in ends]
    return f"{mean(values):.3f} ({min(values):.2f} to {max(values):.2f})"


def table(found: Mapping[tuple[str, str], Sequence[tuple[float, ...]]], number: str) -> str:
    """A table in Markdown: errors by remedies."""
    titles = dict.fromkeys(title for title, _ in found)
    heads = (f"{number} at the end", *(TITLES[r] for r in REMEDIES))
    return markdown_table(heads, [(t, *(cell(found[t, r], number) for r in REMEDIES)) for t in titles])


DRAWN = ("none", "token_is", "seq_tis", "centred")


def figure(reward: str = "sparse", seed: int = 0) -> Figure:
    """Entropy and reward over updates: one first policy, two engines, four remedies, each named with where it ends."""
    matplotlib.rcParams |= {"font.size": 9}
    titles = CASES["single"]
    drawn = Figure(figsize=(8.6, 4.9), layout="constrained")
    axes = drawn.subplots(2, len(titles), sharex=True, sharey="row")
    best = problem(seed, reward)[0].optimum
    for x, title in enumerate(titles):
        found = [run(ERRORS[title], remedy, seed, reward, observe_every=4) for remedy in DRAWN]
        for y, name in enumerate(("entropy", "reward")):
            axis = axes[y, x]
            for place, one in enumerate(found):
                style = {"color": PALETTE[place].line, "lw": 1.6, "ls": ("-", "-", "--", "-.")[place]}
                axis.plot(one.updates, one[name], **style)
            _name_ends(axis, [one[name][-1] for one in found], "log" if name == "entropy" else "linear", best)
        axes[0, x].set_title(f"engine error: {title}", loc="left")
        axes[1, x].set_xlabel("updates")
        axes[1, x].axhline(best, color="#888888", lw=0.8, ls=":")
        axes[1, x].text(2, best, f"best policy {best:.3f}", va="bottom", color="#666666", fontsize=8)
    axes[0, 0].set(ylabel="entropy of pi, nats per token", xlim=(0, NUM_UPDATES))
    axes[1, 0].set(ylabel="expected reward J(pi)")
    for axis in axes.ravel():
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def _name_ends(axis: Axes, ends: Sequence[float], scale: str, best: float) -> None:
    """The names of the lines and their last values at the right edge, kept apart."""
    if scale == "log":
        axis.set(yscale="log", ylim=(0.008, 1.4))
    else:
        axis.set_ylim(0, 1.12 * best)
    low, high = axis.get_ylim()
    height = [log(end / low) / log(high / low) if scale == "log" else (end - low) / (high - low) for end in ends]
    for place, at in enumerate(spread([100 * h for h in height], 8.5, 3.0, 100.0)):
        words = f"{TITLES[DRAWN[place]].removeprefix('no weight, ')} {ends[place]:.3f}"
        style = {"color": PALETTE[place].text, "fontsize": 8, "va": "center", "annotation_clip": False}
        axis.annotate(words, (1.02, at / 100), xycoords="axes fraction", **style)


def main() -> None:
    """Draws the picture, and prints the tables of each kind of reward; with --picture the picture alone."""
    PICTURE.write_text(svg(figure()), encoding="utf-8")
    if "--picture" in sys.argv:
        return
    for reward, titles in CASES.items():
        jobs = [
            (title, remedy, seed, reward) for title in titles for remedy in REMEDIES for seed in range(NUM_PROBLEMS)
        ]
        found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
        with ProcessPoolExecutor(NUM_PROCESSES) as pool:
            for (title, remedy, *_), end in zip(jobs, pool.map(ends, *zip(*jobs, strict=True)), strict=True):
                found.setdefault((title, remedy), []).append(end)
        for number in NUMBERS:
            print(table(found, number), flush=True)


if __name__ == "__main__":
    main()
