"""The study: every problem, engine error, objective, N and B of a config, trained exactly, a row per observation.

A case is one problem under one error. Paper: MiniRL (arXiv 2512.01374) Eq. 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
import torch

from lab.casebook import Rows
from lab.config.load import config_hash
from lab.flow.config import ErrorBlock, FlowConfig, FlowObjective
from lab.flow.table import COLUMNS
from theory.exact.engines import Engine, MovablePolicy, RollsOut, engine, engine_at
from theory.exact.levels import REWARDS
from theory.exact.training import train
from theory.exact.trajectory import ExactTask, Trajectory, mean_entropy
from theory.streams import stream


def flow(
    config: FlowConfig,
    report: Callable[[int, int, str], None] | None = None,
    former: Sequence[Rows] = (),
    keep: Callable[[Rows], None] | None = None,
    world: World | None = None,
) -> pd.DataFrame:
    """One row per problem, error, objective, N, B and observed update, with the columns of `lab.flow.COLUMNS`.

    `attrs` has the config's name and hash. `report(done, total, words)` is called after every case. `former` has the
    rows of the first cases, from a call that was cut short; `keep(rows)` takes those of every other case. `world` draws
    problems and engines; by default they are policies on a tree.
    """
    world = world or EXACT
    cases = [(problem, error) for problem in range(config.problems.count) for error in config.errors]
    rows: Rows = []
    for done, (problem, error) in enumerate(cases):
        # By position: the cases and their order follow from the config, whose hash the records share.
        found = former[done] if done < len(former) else _case(config, problem, error, world)
        if keep is not None and done >= len(former):
            keep(found)
        rows += found
        if report is not None:
            report(done + 1, len(cases), f"problem {problem}, {error.label}")
    frame = pd.DataFrame(rows, columns=[*COLUMNS])
    frame.attrs |= {"name": config.name, "config_hash": config_hash(config)}
    return frame


@dataclass(frozen=True)
class World:
    """A backend's reading of a config: a problem with its first policy, and the engine of one of its runs."""

    problem: Callable[[FlowConfig, int], tuple[ExactTask, MovablePolicy]]
    engine: Callable[[FlowConfig, int, ErrorBlock, FlowObjective, MovablePolicy], RollsOut]


def task_of(config: FlowConfig, generator: torch.Generator) -> ExactTask:
    """The contexts with their rewards, 0 after the `lost` openings of each prompt."""
    block, forest = config.problems, config.problems.forest()
    reward_CY = torch.stack([REWARDS[block.reward](forest.tree, generator) for _ in range(forest.num_contexts)])
    for prompt in range(block.prompts):
        # Contexts are prompt-major (`Forest.uniform`), so a prompt's openings are adjacent.
        lost = torch.randperm(block.openings, generator=generator)[: block.lost]
        reward_CY[prompt * block.openings + lost] = 0.0
    return ExactTask(forest, reward_CY.reshape(-1))


def problem_of(config: FlowConfig, number: int) -> tuple[ExactTask, MovablePolicy]:
    """The contexts and rewards of one problem, and its first policy."""
    generator = stream(config.seed, "flow", "problem", number)
    task = task_of(config, generator)
    return task, config.problems.policy.draw(task.forest, generator, config.training.temperature)


def engine_of(
    config: FlowConfig, number: int, error: ErrorBlock, objective: FlowObjective, first: MovablePolicy
) -> Engine:
    """The engine of one problem; its draw is the same at every level of a kind."""
    # The stream is named by the kind alone, so that levels differ in size, not in direction.
    generator = stream(config.seed, "flow", "engine", number, error.kind)
    if error.token_kl is not None:
        return engine_at(error.kind, error.token_kl, first, generator)
    return engine(error.kind, error.scale or 0.0, first, generator)  # only `exact` has neither dial


EXACT = World(problem_of, engine_of)
"""Policies on a tree, and errors as maps from pi to mu."""


def run_of(
    config: FlowConfig,
    number: int,
    error: ErrorBlock,
    objective: str,
    num_minibatches: int,
    batch_size: float,
    world: World = EXACT,
) -> Trajectory:
    """One run of the study; its noise is the same for every error and objective, so that runs are paired."""
    task, first = world.problem(config, number)
    block = config.objective(objective)
    settings = config.settings(block, num_minibatches, batch_size)
    generator = stream(config.seed, "flow", "noise", number, num_minibatches, str(batch_size))
    return train(task, first, world.engine(config, number, error, block, first), settings, generator)


def _case(config: FlowConfig, number: int, error: ErrorBlock, world: World) -> Rows:
    task, _ = world.problem(config, number)
    rows = []
    for objective in config.objectives:
        for n in config.num_minibatches:
            for size in config.batch_sizes:
                found = run_of(config, number, error, objective.name, n, size, world)
                run = f"problem {number}, {error.label}, {objective.name}, N = {n}, B = {size:g}"
                _require_finite(found, run, config.training.rate)
                place = {
                    "length": config.problems.length,
                    "problem": number,
                    "error": error.label,
                    "kind": error.kind,
                    "level": error.level,
                }
                place |= {"objective": objective.name, "N": n, "B": size}
                place |= {"optimum": task.optimum, "entropy_lost": math.nan}
                for i, update in enumerate(found.updates):
                    rows.append(place | {"update": update} | {name: of[i] for name, of in found.columns.items()})
                # Of the last policy alone: a trajectory keeps no earlier one.
                rows[-1]["entropy_lost"] = lost_entropy(task, found.policy)
    return rows


def _require_finite(found: Trajectory, run: str, rate: float) -> None:
    """ArithmeticError where the run left the finite numbers: no mean or interval over problems exists then."""
    for update, reward, entropy in zip(found.updates, found.columns["reward"], found.columns["entropy"], strict=True):
        if not (math.isfinite(reward) and math.isfinite(entropy)):
            raise ArithmeticError(
                f"{run}: expected a finite reward and entropy, got {reward} and {entropy} at update {update}; "
                f"a smaller training.rate than {rate:g} may help"
            )


def lost_entropy(task: ExactTask, policy: MovablePolicy) -> float:
    """Entropy of pi's next token in the contexts that never pay, nats; nan where each pays."""
    forest = task.forest
    # The responses of a context are adjacent in Y.
    is_lost_C = task.reward_Y.view(forest.num_contexts, -1).max(1).values == 0
    if not is_lost_C.any():
        return math.nan
    logp = [x[is_lost_C[forest.context_of_node(t)]] for t, x in enumerate(policy.logp())]
    # Contexts are equally likely, so the lost ones are a uniform forest of their own.
    return mean_entropy(type(forest).uniform(forest.tree, int(is_lost_C.sum())), logp)
