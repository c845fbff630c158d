"""Laws of advantages per token in the sandbox: what the old pass reports for them, and what the loop makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.contracts import worlds
from theory.advantages import advantages_of, optimal_token
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Sampling, UpdateStats
from theory.loop import global_step
from theory.objectives import preset
from theory.routing.passes import RoutingPlan


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_old_pass_reports_the_sum_of_squares(temperature: float) -> None:
    """sum_v old(v)^2 of each token is that of the whole distribution at T, to the bit in any micro-batches."""
    sampling = Sampling(max_tokens=7, num_responses=2, seed=3, temperature=temperature, num_top=99)
    rollouts = worlds.rollout_engine("logit-noise", worlds.model()).generate(worlds.prompts(), sampling)
    natural = RoutingPlan("natural")
    found = [worlds.training_engine(worlds.model(), micro_batch_size=n).score(rollouts, natural) for n in (128, 3)]
    exists = rollouts.padded().is_response_BT
    assert found[0].logp_top is not None and found[0].sum_squares_BT is not None
    expected = torch.where(exists, found[0].logp_top.padded().exp().square().sum(-1), 0.0)  # all of the vocabulary
    torch.testing.assert_close(found[0].sum_squares_BT, expected)
    assert torch.equal(found[0].sum_squares_BT, found[1].sum_squares_BT)


def test_mini_batches_carry_their_own_tokens_advantages() -> None:
    """Each mini-batch has the rows of the whole batch's advantages, and an update that does not depend on its cut."""
    objective = preset("grpo", advantage="optimal_token")
    algorithm = Algorithm(objective, num_prompts=4, num_responses=3, num_minibatches=2, max_tokens=6)
    norms = []
    for size in (128, 2):
        engine = worlds.training_engine(worlds.model(), micro_batch_size=size)
        taken: list[tuple[MiniBatch, UpdateStats]] = []
        update = engine.update

        def watched(minibatch, *rest, taken=taken, update=update):
            taken.append((minibatch, update(minibatch, *rest)))
            return taken[-1][1]

        engine.update = watched
        rollout = worlds.rollout_engine("fp8-and-noise", worlds.model())
        result = global_step(0, algorithm, rollout, engine, worlds.EvenTokens(), seed=1)
        rewards, batch = result.rewards_B.view(4, 3), result.rollouts.padded()
        assert result.scores.sum_squares_BT is not None
        whole = optimal_token(rewards, result.scores.logp_BT, result.scores.sum_squares_BT, batch.is_response_BT)
        for minibatch, _ in taken:
            assert minibatch.advantages_BT is not None
            for b, response in enumerate(minibatch.rollouts.responses):
                place = next(i for i, r in enumerate(result.rollouts.responses) if r.tokens is response.tokens)
                n = len(response.tokens)
                assert torch.equal(minibatch.advantages_BT[b, :n], whole[place, :n])
                assert minibatch.advantages_B[b] == advantages_of("group_mean", rewards).reshape(-1)[place]
        assert whole[batch.is_response_BT].std() > 0.01
        assert "rollout_corr/drift" not in result.metrics
        norms.append(taken[0][1].metrics["actor/grad_norm"])
    # As for other objectives: float32 sums in another order agree to a few units of 2^-24 each.
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


def test_an_engine_that_reports_no_squares_is_named() -> None:
    """Without sum_v old(v)^2 nothing is trained."""
    engine = worlds.training_engine(worlds.model())
    score = engine.score
    engine.score = lambda *arguments: replace(score(*arguments), sum_squares_BT=None)  # pyright: ignore
    algorithm = Algorithm(preset("grpo", advantage="optimal_token"), num_prompts=2, num_responses=2, max_tokens=4)
    rollout = worlds.rollout_engine("exact", worlds.model())
    with pytest.raises(ValueError, match=r"advantage optimal_token needs sum_v old\(v\)\^2 from the training engine"):
        global_step(0, algorithm, rollout, engine, worlds.EvenTokens(), seed=1)
