"""Held-out evaluation: avg@k, the mean reward over k sampled responses of every held-out problem."""

from __future__ import annotations

from theory.contracts import RolloutEngine, Sampling, Task
from theory.turns import roll_out


def evaluate(
    engine: RolloutEngine,
    task: Task,
    *,
    num_samples: int,
    max_prompts: int,
    max_tokens: int,
    max_turns: int,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """avg@k on the first `max_prompts` held-out problems, in [0, 1]; mean length in tokens; share that stopped.

    The engine decides which policy is evaluated; a run passes one that computes `pi` itself.
    """
    # Cut before they are read: a task may make its prompts on access.
    prompts = task.held_out()[:max_prompts]
    sampling = Sampling(max_tokens=max_tokens, num_responses=num_samples, temperature=temperature, seed=seed)
    responses = roll_out(engine, task, prompts, sampling, max_turns).responses
    return {
        # Every problem has `num_samples` responses, so this is the mean over problems of their means.
        "eval/accuracy": sum(task.reward(r.prompt, r) for r in responses) / len(responses),
        # `len(r.tokens)` would count the task's observations, too.
        "eval/response_length": sum(int(r.is_response.sum()) for r in responses) / len(responses),
        "eval/stop_fraction": sum(r.finish == "stop" for r in responses) / len(responses),
    }
