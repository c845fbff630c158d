"""The cold start stops at its target, is done once for equal inputs, and says so when the target is out of reach."""

from __future__ import annotations

import pytest
import torch

from lab.tasks import build
from lab.tasks.arithmetic import ArithmeticConfig
from sandbox.cold_start import cold_start, demonstration_loss
from sandbox.config import ColdStartBlock, ModelBlock
from sandbox.model import MoE
from sandbox.run import model_config
from theory.streams import stream

TASK = ArithmeticConfig(min_digits=2, max_digits=2, num_held_out=8)
SMALL = ModelBlock(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, num_experts=4, expert_size=32)


def fresh(seed: int = 0) -> MoE:
    return MoE(model_config(SMALL, build(TASK).tokenizer.vocab_size), stream(seed, "model"))


def stage(tmp_path, **changes) -> ColdStartBlock:
    block = {"target_accuracy": 0.02, "max_updates": 400, "check_every": 20, "num_check": 64} | changes
    return ColdStartBlock(cache=str(tmp_path / "cache"), **block)


def test_it_stops_at_the_target_and_is_cached(tmp_path):
    """The first call trains to the target; the second finds the same bits without an update."""
    reports = []
    first, summary = cold_start(
        fresh(),
        build(TASK),
        stage(tmp_path),
        description={"test": 1},
        max_tokens=24,
        report=lambda *r: reports.append(r),
    )
    assert summary["accuracy"] >= 0.02
    assert reports[-1][0] == summary["num_updates"] <= 400
    assert reports[-1][1] < reports[0][1]
    again, same = cold_start(
        fresh(1),
        build(TASK),
        stage(tmp_path),
        description={"test": 1},
        max_tokens=24,
        report=lambda *_: pytest.fail("ran"),
    )
    assert same == summary
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_an_unreachable_target_is_an_error_and_leaves_no_cache(tmp_path):
    """A target that is not met within max_updates is one line with both accuracies; nothing half-done is kept."""
    block = stage(tmp_path, target_accuracy=1.0, max_updates=20)
    with pytest.raises(ValueError, match=r"expected to reach 1.0 within 20 updates, got 0\.\d+"):
        cold_start(fresh(), build(TASK), block, description={}, max_tokens=24)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_the_loss_is_the_mean_surprise_of_the_demonstration(tmp_path):
    """The loss equals -mean log pi of the demonstrations' tokens, computed token by token without a batch."""
    task, model = build(TASK), fresh()
    prompts = task.prompts(0, 3)
    draws = stream(0, "demonstrations")
    demonstrations = [task.demonstration(p, draws, "columns") for p in prompts]
    terms = []
    for prompt, demonstration in zip(prompts, demonstrations, strict=True):
        tokens = torch.tensor([[*prompt.tokens, *demonstration]])
        logp = torch.log_softmax(model(tokens), -1)[0]
        start = len(prompt.tokens)
        terms += [-logp[start + t - 1, token] for t, token in enumerate(demonstration)]
    # float32 means over about 60 terms of size 3, summed in another order.
    assert demonstration_loss(model, prompts, demonstrations).item() == pytest.approx(
        torch.stack(terms).mean().item(), rel=1e-5
    )
