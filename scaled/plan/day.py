"""A simulated day of a recipe, and the chances and rates that shape it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chance:
    """The chances that the plan's one step leaves out.

    gpu_hours_per_failure: mean GPU hours between two failures; Llama 3 (arXiv 2407.21783) sec. 3.3.4 had 419 in 54 days
    on 16,384 GPUs. restart_s: until ranks continue from their checkpoint; engine_restart_s: until a lost engine
    samples again. slow_std: standard deviation of the logarithm of an engine's time in a rollout. save_gb_s: GB/s of a
    checkpoint. is_length_drawn: whether lengths are drawn; else every sequence has the mean. has_fixed_shares: whether
    each engine has its share of the prompts from the start; else it gets the next ones as it has room.
    """

    gpu_hours_per_failure: float = 54 * 24 * 16_384 / 419
    restart_s: float = 600.0
    engine_restart_s: float = 180.0
    slow_std: float = 0.05
    save_gb_s: float = 2.0
    is_length_drawn: bool = True
    has_fixed_shares: bool = False


@dataclass(frozen=True)
class Rates:
    """Seconds of each stage relative to the plan's, in (0, inf); 1 is the plan's own."""

    rollout: float = 1.0
    training: float = 1.0
    push: float = 1.0
    checkpoint: float = 1.0


@dataclass
class Day:
    """The simulated hours: steps that count, and the seconds of each of their stages.

    sampled_s: seconds of the rollouts, those beside training too. idle_s: the part of them in which an engine waits for
    the others, a mean over engines. lost_s: work since the last checkpoint that a dead rank took with it; down_s:
    restarts of ranks. The stages, both and a step that was under way at the end add up to the hours.
    """

    hours: float
    num_steps: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    sampled_s: float = 0.0
    idle_s: float = 0.0
    lost_s: float = 0.0
    down_s: float = 0.0
    num_failures: int = 0
    num_engine_failures: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of the hours per step that counts, in (0, inf]."""
        return 3600 * self.hours / self.num_steps if self.num_steps else math.inf


# In the order of the columns of `what_if.table`, which takes the values by position.
STAGES = ("rollout", "training", "push", "checkpoint")
"""Where sampling runs ahead, `rollout` is the time that training waits for it."""

__all__ = ["STAGES", "Chance", "Day", "Rates"]
