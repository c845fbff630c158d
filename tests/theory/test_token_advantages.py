"""Laws of advantages per token: the optimal token baseline is its formula; objectives take it as given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.effort import few
from tests.strategies import MODERATE, batches
from tests.theory.laws_advantages import optimal_token_by_hand
from tests.theory.objective_batches import Batch, make_batch
from tests.theory.test_objectives import same
from theory.advantages import advantages_of, optimal_token
from theory.objectives import PRESETS, preset
from theory.streams import stream

P, G, T, V = 3, 4, 6, 5


def scored(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards of P groups, log old of sampled tokens, sum_v old(v)^2, and a mask with holes; one group is all equal."""
    draws = stream(seed, "token-advantages")
    old = (2 * torch.randn(P * G, T, V, generator=draws, dtype=torch.float64)).log_softmax(-1)
    sampled = torch.distributions.Categorical(logits=old).sample()
    mask = torch.rand(P * G, T, generator=draws) < 0.7
    mask[:, 0] = True
    rewards = torch.rand(P, G, generator=draws, dtype=torch.float64)
    rewards[1] = 0.1
    return rewards, old.gather(2, sampled[..., None])[..., 0], old.exp().square().sum(-1), mask


@pytest.mark.parametrize("seed", range(5))
def test_the_optimal_token_baseline_is_its_formula(seed: int) -> None:
    """Each sampled token has its reward less the baseline of its place, written by hand on lists; holes have 0."""
    rewards, logp, squares, mask = scored(seed)
    found = optimal_token(rewards, logp, squares, mask)
    assert (found[~mask] == 0).all()
    for p in range(P):
        rows = range(p * G, (p + 1) * G)
        tokens = [list(zip(logp[b, mask[b]].exp().tolist(), squares[b, mask[b]].tolist(), strict=True)) for b in rows]
        expected = optimal_token_by_hand(rewards[p].tolist(), tokens)
        for b, values in zip(rows, expected, strict=True):
            assert found[b, mask[b]].tolist() == pytest.approx(values, abs=1e-12)
    assert (found[G : 2 * G] == 0).all()  # equal rewards
    longest = mask[:G].sum(1).sort().values
    if longest[-1] > longest[-2]:
        b = int(mask[:G].sum(1).argmax())
        assert (found[b, mask[b]][longest[-2] :] == 0).all()  # nobody to compare with


def test_of_equal_scores_it_is_the_groups_mean() -> None:
    """Where every token has the same distribution and probability, W is the same for all: A = R - mean(R)."""
    rewards, logp, squares, _ = scored(3)
    mask = torch.ones(P * G, T, dtype=torch.bool)
    one, two = torch.full_like(logp, -1.0), torch.full_like(squares, 0.4)
    expected = advantages_of("group_mean", rewards).reshape(-1, 1).expand(-1, T)
    torch.testing.assert_close(optimal_token(rewards, one, two, mask), expected, rtol=1e-12, atol=1e-15)
    certain = optimal_token(rewards, torch.zeros_like(one), torch.ones_like(two), mask)  # every W is 0
    torch.testing.assert_close(certain, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", PRESETS)
@few
@given(batch=batches(corners=MODERATE))
def test_a_tokens_advantage_takes_the_place_of_its_responses(name: str, batch: Batch) -> None:
    """Of equal advantages per token the gradient is that of the response's."""
    of_tokens = preset(name, advantage="optimal_token")
    each = torch.where(batch.mask, batch.advantages[:, None], torch.nan)
    nothing = replace(batch, advantages=torch.full_like(batch.advantages, 7.0))
    same(nothing.gradient(of_tokens, advantages_BT=each), batch.gradient(preset(name)))


def test_every_token_is_weighed_by_its_own() -> None:
    """REINFORCE's gradient at a token is its advantage over the number of responses."""
    batch = make_batch(4)
    each = torch.randn(batch.pi.shape, generator=stream(1, "each"), dtype=torch.float64)
    gradient = batch.gradient(preset("reinforce", advantage="optimal_token"), advantages_BT=each)
    torch.testing.assert_close(gradient, torch.where(batch.mask, each, 0.0) / len(each))


def test_what_does_not_fit_is_refused() -> None:
    """Advantages that are missing or not asked for, centering, a group of one, and rewards alone: one line each."""
    batch = make_batch(0)
    each = torch.zeros_like(batch.pi)
    with pytest.raises(ValueError, match=r"grpo: advantage optimal_token: expected advantages_BT, got none"):
        batch(preset("grpo", advantage="optimal_token"))
    with pytest.raises(ValueError, match=r"grpo: advantage group_norm: expected no advantages_BT, got some"):
        batch(preset("grpo"), advantages_BT=each)
    with pytest.raises(ValueError, match=r"centering: expected none beside an advantage per token, got full with opt"):
        preset("ppo", advantage="optimal_token", centering="full")
    with pytest.raises(ValueError, match=r"expected one per response \(group_mean, .*\), got optimal_token"):
        advantages_of("optimal_token", torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"optimal_token: expected at least 2 responses per prompt, got G = 1"):
        optimal_token(torch.ones(2, 1), torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool))
