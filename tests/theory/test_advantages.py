"""Laws of the advantages: those of every row of `laws_advantages.py`, then eps, mixed groups and noisy labels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import rewards
from tests.theory.laws_advantages import ADVANTAGE_ROWS, LENGTH_ADVANTAGE_ROWS
from theory.advantages import (
    ADVANTAGES,
    OF_LENGTHS,
    advantages_of,
    group_mean,
    group_norm,
    keep_mixed_groups,
    noisy_labels,
    overlong_penalty,
)
from theory.streams import stream


@pytest.mark.parametrize("name", ADVANTAGE_ROWS)
@given(rewards_PG=rewards())
def test_advantages_are_their_formulas(name: str, rewards_PG: Tensor) -> None:
    """Each group's advantages are the formula on its own rewards, whatever the other groups got."""
    expected = [ADVANTAGE_ROWS[name](row) for row in rewards_PG.tolist()]
    # group_norm divides a rounding of 1e-16 by at least 1e-6.
    torch.testing.assert_close(ADVANTAGES[name](rewards_PG), torch.tensor(expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGE_ROWS)
@given(reward=st.floats(-3, 3, width=32), G=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, G: int) -> None:
    """A group of equal rewards gives exactly 0 in float32 too, where their mean may be off by a rounding."""
    advantages_PG = ADVANTAGES[name](torch.full((1, G), reward, dtype=torch.float32))
    assert torch.equal(advantages_PG, torch.zeros(1, G, dtype=torch.float32))


@pytest.mark.parametrize("name", ["group_norm", "leave_one_out"])
def test_groups_that_cannot_be_compared_are_refused(name: str) -> None:
    """Where one response cannot be compared with another, the error names the advantage and says that G is 1."""
    with pytest.raises(ValueError, match=f"^{name}: expected at least 2 responses per prompt, got G = 1$"):
        ADVANTAGES[name](torch.ones(2, 1))


def test_group_norm_adds_eps_to_the_deviation() -> None:
    """A = (R - mean) / (std + eps): with std 1 / sqrt 2 and eps 1 the value is known (Pr2 Eq. 12)."""
    expected = 0.5 / (math.sqrt(0.5) + 1.0)
    torch.testing.assert_close(group_norm(torch.tensor([[1.0, 0.0]]), eps=1.0), torch.tensor([[expected, -expected]]))


@given(rewards_PG=rewards(min_responses=1))
def test_mixed_groups_are_those_with_unequal_rewards(rewards_PG: Tensor) -> None:
    """Dynamic sampling keeps a group exactly if its rewards are not all equal: if some advantage is not 0."""
    assert keep_mixed_groups(rewards_PG).tolist() == [len(set(row)) > 1 for row in rewards_PG.tolist()]
    assert torch.equal(keep_mixed_groups(rewards_PG), (group_mean(rewards_PG) != 0).any(1))


@given(rewards_PG=rewards(), seed=st.integers(0, 99))
def test_labels_without_noise_are_the_rewards(rewards_PG: Tensor, seed: int) -> None:
    """At 0 not a bit changes, at 1 every reward is 1 - R."""
    assert torch.equal(noisy_labels(rewards_PG, 0.0, stream(seed, "noise")), rewards_PG)
    assert torch.equal(noisy_labels(rewards_PG, 1.0, stream(seed, "noise")), 1.0 - rewards_PG)


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_labels_err_each_by_itself(share: float, reward: float) -> None:
    """As many are wrong as the share says, whatever the reward, and a neighbour's error says nothing of one's own."""
    labels_PG = noisy_labels(torch.full((20_000, 2), reward), share, stream(0, "noise"))
    is_wrong_PG = (labels_PG != reward).double()
    assert set(labels_PG.unique().tolist()) == {0.0, 1.0}
    # Five standard errors of a share, and of a correlation that is 0, over 40,000 and 20,000 draws.
    assert is_wrong_PG.mean().item() == pytest.approx(share, abs=5 * (share * (1 - share) / 40_000) ** 0.5)
    assert torch.corrcoef(is_wrong_PG.T)[0, 1].item() == pytest.approx(0.0, abs=5 / 20_000**0.5)


# ---- advantages that see lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTH_ADVANTAGE_ROWS)
@given(rewards_PG=rewards(), data=st.data())
def test_advantages_of_lengths_are_their_formulas(name: str, rewards_PG: Tensor, data: st.DataObject) -> None:
    """On any rewards and lengths the advantages are the formula on lists of the batch's tokens."""
    P, G = rewards_PG.shape
    lengths = data.draw(st.lists(st.lists(st.integers(1, 9), min_size=G, max_size=G), min_size=P, max_size=P))
    # A deviation below 1e-4 is of the order of the constant beside it, and of the rewards' rounding.
    assume(name == "opo" or rewards_PG.std() > 1e-2)
    got = advantages_of(name, rewards_PG, torch.tensor(lengths))
    expected = torch.tensor(LENGTH_ADVANTAGE_ROWS[name](rewards_PG.tolist(), lengths))
    torch.testing.assert_close(got, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", LENGTH_ADVANTAGE_ROWS)
@given(reward=st.floats(-3, 3, width=32), G=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero_at_any_length(name: str, reward: float, G: int) -> None:
    """A batch of equal rewards teaches nothing, whatever its lengths."""
    lengths_PG = torch.arange(1, 2 * G + 1).view(2, G)
    advantages_PG = advantages_of(name, torch.full((2, G), reward, dtype=torch.float32), lengths_PG)
    assert torch.equal(advantages_PG, torch.zeros(2, G, dtype=torch.float32))


def test_lengths_are_asked_for() -> None:
    """Without lengths the error names those advantages that need none."""
    assert set(OF_LENGTHS) == set(LENGTH_ADVANTAGE_ROWS)
    with pytest.raises(ValueError, match=r"needs no lengths \(group_mean, group_norm, leave_one_out\), got opo"):
        advantages_of("opo", torch.zeros(1, 2))


def test_overlong_penalty_is_a_line() -> None:
    """DAPO Eq. 13 at 20 of 100 tokens: 0 to 80, -1/4 at 85, -1 at 100; a factor scales it."""
    lengths_PG = torch.tensor([[1, 80, 85, 100]])
    assert overlong_penalty(lengths_PG, 100, 20).tolist() == [[0.0, 0.0, -0.25, -1.0]]
    assert overlong_penalty(lengths_PG, 100, 20, 2.0).tolist() == [[0.0, 0.0, -0.5, -2.0]]
    with pytest.raises(ValueError, match="expected 0 < overlong_buffer <= max_tokens = 100, got 101"):
        overlong_penalty(lengths_PG, 100, 101)
