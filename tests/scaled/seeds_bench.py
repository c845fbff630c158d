"""The cost of a seed for each response in vLLM on a CPU: `python -m tests.scaled.seeds_bench [ROUNDS]`.

One engine samples the same prompts without seeds, with a seed per response (as runs do), with a seed per token (as
partial rollouts do), and with a seed per response beside the prompts' log-probabilities, which runs do not ask for. The
ways take turns; ratios are of the same round, and a first round is not counted. Times are the process's own, and of
the best rounds, since other work on the machine adds to both. Routes are recorded in all ways.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from lab.markdown import markdown_table
from sandbox.model import MoE
from sandbox.model.checkpoint import to_hf
from scaled.vllm_engine import engine as engine_module
from scaled.vllm_engine.worker import OPTIONS
from tests.scaled import vllm_world
from theory.contracts import Prompt, Sampling
from theory.streams import stream

VOCABULARY, PROMPTS, LENGTH = 8192, 32, 32
SAMPLING = Sampling(max_tokens=16, num_responses=1, seed=1)


def _unseeded(params: Any) -> None:
    params.seed = None


def _per_token(params: Any) -> None:
    params.extra_args = {OPTIONS: {"token_seed": 7}}


def _with_prompts(params: Any) -> None:
    params.prompt_logprobs = 0


WAYS: dict[str, Callable[[Any], None]] = {
    "no seeds": _unseeded,
    "a seed per response": lambda params: None,
    "a seed per token": _per_token,
    "a seed per response, log-probabilities of prompts": _with_prompts,
}


def measure(rounds: int = 10) -> dict[str, list[float]]:
    """CPU seconds per sampled token by way, one for each round; the ways begin in turns."""
    config = replace(vllm_world.model_config(), vocab_size=VOCABULARY)
    weights = MoE(config, stream(0, "seeds-bench"))
    draws = stream(0, "seeds-bench-prompts")
    tokens = torch.randint(2, VOCABULARY, (PROMPTS, LENGTH), generator=draws).tolist()
    prompts = [Prompt(str(i), tuple(row), "") for i, row in enumerate(tokens)]
    plain = engine_module.sampling_params
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        engine = vllm_world.engine(weights, Path(folder), max_num_batched_tokens=1024, kv_cache_gib=0.1)
        engine.load_weights(iter(to_hf(weights)), version=0)
        try:
            for number in range(rounds + 1):
                names = list(WAYS)
                for name in names[number % len(names) :] + names[: number % len(names)]:

                    def changed(*args: Any, change: Callable[[Any], None] = WAYS[name]) -> Any:
                        params = plain(*args)
                        change(params)
                        return params

                    engine_module.sampling_params = changed
                    start = time.process_time()
                    rollouts = engine.generate(prompts, SAMPLING)
                    # Per token: a response may meet its stop token.
                    each = (time.process_time() - start) / sum(len(r.tokens) for r in rollouts.responses)
                    if number:
                        seconds[name].append(each)
        finally:
            engine_module.sampling_params = plain
            engine.close()
    return seconds


def table(seconds: dict[str, list[float]]) -> str:
    """Tokens per CPU second of the best round, and times over those without seeds: best rounds, and single rounds."""
    first, lines = seconds["no seeds"], []
    for name, found in seconds.items():
        each = [a / b for a, b in zip(found, first, strict=True)]
        numbers = min(found) / min(first), median(each), min(each), max(each)
        lines.append((name, f"{1 / min(found):.0f}", *(f"{x:.2f}" for x in numbers)))
    head = ("vLLM on a CPU", "tokens per CPU second", "time over no seeds, best rounds", "median", "least", "most")
    return markdown_table(head, lines)


if __name__ == "__main__":
    print(table(measure(*map(int, sys.argv[1:]))))
