"""Rewards computed several at a time: grading starts when responses come back, in threads over the graders' processes.

The loop asks for one reward after the other, and gets the task's own rewards, only sooner.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from theory.contracts import NamedTensors, Prompt, Response, RolloutEngine, Rollouts, Sampling, Task


class AheadTask:
    """A Task that computes the rewards of expected responses ahead, and all others on request."""

    def __init__(self, task: Task, num_threads: int | None = None):
        self.task = task
        self._threads = ThreadPoolExecutor(num_threads or os.cpu_count(), thread_name_prefix="reward")
        self._expected: dict[int, tuple[Response, Future[float]]] = {}

    def expect(self, rollouts: Rollouts) -> None:
        """Starts on the rewards of these responses; each may be asked for once."""
        for response in rollouts.responses:
            # The response is kept alive, because another object could get its id otherwise.
            future = self._threads.submit(self.task.reward, response.prompt, response)
            self._expected[id(response)] = (response, future)

    # No `observe`: a task with turns would lose them here (theory/turns.py), and none of them grades in processes.
    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """The task's."""
        return self.task.prompts(step, num_prompts)

    def held_out(self) -> Sequence[Prompt]:
        """The task's."""
        return self.task.held_out()

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The task's; whatever its grader raises is raised here."""
        _, future = self._expected.pop(id(response), (None, None))
        return self.task.reward(prompt, response) if future is None else future.result()

    def close(self) -> None:
        """Cancels rewards that nobody has asked for."""
        self._threads.shutdown(wait=True, cancel_futures=True)


class AheadEngine:
    """A RolloutEngine that tells an `AheadTask` of every response."""

    def __init__(self, engine: RolloutEngine, task: AheadTask):
        self.engine, self.task = engine, task

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """The engine's."""
        rollouts = self.engine.generate(prompts, sampling)
        # Over-sampled responses may be dropped, or continued as others: their rewards are computed on request.
        if not sampling.enough:
            self.task.expect(rollouts)
        return rollouts

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """The engine's."""
        self.engine.load_weights(named_tensors, version)


__all__ = ["AheadEngine", "AheadTask"]
