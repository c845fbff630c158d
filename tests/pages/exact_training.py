"""The picture of docs/exact-training.md: one first policy, two engines, four remedies, by exact updates.

`python -m tests.pages.exact_training` draws it, from eight runs of some two seconds each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.report.style import PALETTE, spread
from sandbox.border.pictures import svg
from theory.exact.engines import Engine, engine, engine_at
from theory.exact.forest import Forest
from theory.exact.levels import REWARDS
from theory.exact.networks import NetworkPolicy
from theory.exact.rates import reinforce
from theory.exact.training import Settings, train
from theory.exact.trajectory import ExactTask, Trajectory
from theory.exact.tree import PrefixTree
from theory.streams import stream

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "exact-training.svg"
SEED = 0
NUM_PROMPTS, NUM_OPENINGS = 6, 3
NUM_UPDATES = 200
FIXED, SHARPER = "fixed by context, KL 0.18", "sharper, logits x 1.3"
REMEDIES = {
    "none": "no weight",
    "token_is": "token weight",
    "seq_tis": "sequence weight",
    "centred": "centred score",
}


@cache
def problem() -> tuple[ExactTask, NetworkPolicy]:
    """Six prompts with three openings each, two of which never pay; a quarter of the others' responses are right."""
    forest = Forest.uniform(PrefixTree(3, 5), NUM_PROMPTS, NUM_OPENINGS)
    generator = stream(SEED, "exact training page")
    reward_CY = REWARDS["sparse"](forest, generator).view(-1, forest.tree.num_responses)
    for prompt in range(NUM_PROMPTS):
        lost = torch.randperm(NUM_OPENINGS, generator=generator)[1:]
        reward_CY[prompt * NUM_OPENINGS + lost] = 0.0
    return ExactTask(forest, reward_CY.reshape(-1)), NetworkPolicy.random(forest, generator)


def engine_of(title: str) -> Engine:
    """The engine of a panel's title."""
    _, first = problem()
    if title == FIXED:
        return engine_at("fixed", 0.18, first, stream(SEED, "exact training page", "engine", "fixed"))
    return engine("sharper", 0.3, first, stream(SEED, "exact training page", "engine", "sharper"))


def run(title: str, remedy: str, observe_every: int = 4) -> Trajectory:
    """One exact run: Adam, one update per rollout, infinite groups."""
    task, first = problem()
    objective = reinforce("none" if remedy == "centred" else remedy)
    settings = Settings(
        objective, rate=1e-2, num_updates=NUM_UPDATES, centred=remedy == "centred", observe_every=observe_every,
        has_variance=False,
    )  # fmt: skip
    return train(task, first, engine_of(title), settings)


def figure() -> Figure:
    """Entropy and reward over updates: one first policy, two engines, four remedies, each labelled at its end."""
    matplotlib.rcParams |= {"font.size": 9}
    titles = (FIXED, SHARPER)
    drawn = Figure(figsize=(8.6, 4.9), layout="constrained")
    axes = drawn.subplots(2, len(titles), sharex=True, sharey="row")
    best = problem()[0].optimum
    for x, title in enumerate(titles):
        found = [run(title, remedy) for remedy in REMEDIES]
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
    """Labels with name and last value at the right edge, spread so that they do not overlap."""
    if scale == "log":
        axis.set(yscale="log", ylim=(0.008, 1.4))
    else:
        axis.set_ylim(0, 1.12 * best)
    low, high = axis.get_ylim()
    height = [log(end / low) / log(high / low) if scale == "log" else (end - low) / (high - low) for end in ends]
    # In percent of the axis: at least 8.5 apart, within 3 to 100.
    for place, at in enumerate(spread([100 * h for h in height], 8.5, 3.0, 100.0)):
        words = f"{tuple(REMEDIES.values())[place]} {ends[place]:.3f}"
        style = {"color": PALETTE[place].text, "fontsize": 8, "va": "center", "annotation_clip": False}
        axis.annotate(words, (1.02, at / 100), xycoords="axes fraction", **style)


def main() -> None:
    """Draws the picture."""
    PICTURE.write_text(svg(figure()), encoding="utf-8")


if __name__ == "__main__":
    main()
