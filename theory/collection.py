"""The first part of a global step: prompts are drawn, mu samples, the task rewards.

Dynamic sampling is DAPO's, as in R3 sec. 5.1 (arXiv 2510.11370); over-sampling is in `theory.oversampling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from theory.advantages import keep_mixed_groups
from theory.algorithm import Algorithm
from theory.contracts import RolloutEngine, Rollouts, Sampling, Task
from theory.oversampling import Backlog, first_complete
from theory.streams import derive_seed
from theory.turns import roll_out


@dataclass(frozen=True)
class Collected:
    """The rollouts of one global step, their rewards, and how many draws they took (metrics).

    `predictor` is the W_p that mu's gates held, where it is no longer the learner's (one step off); None where it is.
    `backlog` has the responses in progress, which the next `collect` takes; None without over-sampling.
    """

    rollouts: Rollouts
    rewards_PG: Float[Tensor, "P G"]
    metrics: dict[str, float]
    predictor: dict[int, Float[Tensor, "D E"]] | None = None
    backlog: Backlog | None = None


def collect(
    step: int, algorithm: Algorithm, rollout: RolloutEngine, task: Task, seed: int, backlog: Backlog | None = None
) -> Collected:
    """P groups of G responses with their rewards, and how many draws they took.

    Dynamic sampling (DAPO, as in R3 sec. 5.1) draws further prompts until P groups have mixed rewards or the rounds are
    used up; then groups of equal rewards fill the batch. Rewards are the task's, before label noise and the length
    penalty, whichever the advantage (`theory.advantages.keep_mixed_groups` says when a dropped group has a gradient).
    Over-sampling continues `backlog` (None: nothing is in progress) and takes the first P groups that are complete.
    """
    if algorithm.oversampling is not None:
        backlog = Backlog.at(step, algorithm) if backlog is None else backlog
        rollouts, rewards_PG, metrics, left = first_complete(step, algorithm, rollout, task, seed, backlog)
        return Collected(rollouts, rewards_PG, metrics, backlog=left)
    P, G, rounds = algorithm.num_prompts, algorithm.num_responses, algorithm.dynamic_sampling_rounds
    batches: list[Rollouts] = []
    mixed: list[tuple[int, int, Tensor]] = []
    uniform: list[tuple[int, int, Tensor]] = []
    # Every round of every step has its own prompts and its own seed.
    for draw in range(step * rounds, (step + 1) * rounds):
        sampling = Sampling(
            max_tokens=algorithm.max_tokens,
            num_responses=G,
            temperature=algorithm.temperature,
            seed=derive_seed(seed, "rollout", draw),
            num_features=algorithm.predictor.num_positions if algorithm.passes.rollout == "predicted" else 0,
            num_top=algorithm.objective.num_top,
        )
        batch = roll_out(rollout, task, task.prompts(draw, P), sampling, algorithm.max_turns)
        rewards_PG = torch.tensor([task.reward(r.prompt, r) for r in batch.responses], dtype=torch.float32).view(P, G)
        for p, is_mixed in enumerate(keep_mixed_groups(rewards_PG).tolist()):
            # Without dynamic sampling every group is kept, in its own order.
            (mixed if is_mixed or rounds == 1 else uniform).append((len(batches), p, rewards_PG[p]))
        batches.append(batch)
        if len(mixed) >= P:
            break
    # Never fewer than P: every round draws P groups, mixed or not.
    groups = (mixed + uniform)[:P]
    kept = sum(int(keep_mixed_groups(rewards_G[None])[0]) for *_, rewards_G in groups)
    metrics = {"sampling/rounds": float(len(batches)), "sampling/kept_group_fraction": kept / P}
    # One select per stretch of one batch's groups, so that a batch whose groups are all kept is not copied.
    parts = [
        batches[n].select([p * G + g for _, p, _ in own for g in range(G)])
        for n, own in groupby(groups, key=lambda group: group[0])
    ]
    return Collected(Rollouts.concat(parts), torch.stack([rewards_G for *_, rewards_G in groups]), metrics)
