"""Laws of memory: it is counted to the byte, and generation's does not grow with responses x tokens x vocabulary."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sandbox.bench.memory import largest_allocation, peak_bytes
from sandbox.bench.reference_work import MODEL
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from theory.contracts import Prompt, Sampling
from theory.streams import stream

MEGABYTE = 2**20


def test_peak_is_the_most_held_at_once() -> None:
    """Three sums that are kept are three tensors, one after the other they are one; so are intermediate results."""
    x = torch.zeros(MEGABYTE // 4)
    # Exact but for the scalars, which torch makes tensors of a few bytes.
    assert 0 <= peak_bytes(lambda: [x + k for k in range(3)]) - 3 * MEGABYTE < 64
    assert 0 <= peak_bytes(lambda: (x + 1).add_(x + 2)) - 2 * MEGABYTE < 64
    assert 0 <= peak_bytes(lambda: [(x + k).numel() for k in range(3)]) - MEGABYTE < 64
    assert peak_bytes(lambda: None) == 0
    assert largest_allocation(lambda: (x + 1, torch.cat([x, x]))) == 2 * MEGABYTE


@pytest.mark.parametrize("num_features", [0, 4])
def test_memory_of_generation_does_not_grow_with_tokens_times_vocabulary(num_features: int) -> None:
    """With 24 tokens more a response, generation holds less than one step's logits more, and allocates nothing larger.

    That is 1/24 of what keeping logits or distributions would add; what may grow is cache, routes and tokens.
    """
    vocab_size, num_responses = 2**13, 8
    small = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "expert_size": 8}
    model = MoE(replace(MODEL, vocab_size=vocab_size, **small), stream(0, "test_memory"))
    engine = SandboxEngine(model.config, ())
    engine.load_model(model, version=0)
    prompts = [Prompt(str(p), (3, 4, 5, 6), "") for p in range(2)]
    logits_bytes = 4 * vocab_size * num_responses * len(prompts)

    def generate(max_tokens: int) -> None:
        engine.generate(prompts, Sampling(max_tokens, num_responses, seed=0, num_features=num_features))

    generate(8)  # what torch sets up once
    peaks = [peak_bytes(lambda: generate(8)), peak_bytes(lambda: generate(32))]
    assert peaks[1] - peaks[0] < logits_bytes
    # Drawing works on one step's distributions in float64.
    assert largest_allocation(lambda: generate(32)) <= 2 * logits_bytes
