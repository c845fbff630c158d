"""Laws of the advantages: what the group's baseline takes away, what it leaves, and exact zeros for equal rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from theory.advantages import ADVANTAGES, FORMULAS, group_mean, group_norm, keep_mixed_groups, leave_one_out


@st.composite
def rewards(draw: st.DrawFn) -> Tensor:
    P, G = draw(st.integers(1, 3)), draw(st.integers(2, 6))
    values = st.floats(-3, 3, allow_nan=False, width=32)
    return torch.tensor([[draw(values) for _ in range(G)] for _ in range(P)], dtype=torch.float64)


@given(rewards_PG=rewards(), name=st.sampled_from(sorted(ADVANTAGES)))
def test_each_group_sums_to_zero(rewards_PG: Tensor, name: str) -> None:
    """Advantages of a group sum to 0: no objective moves the mean reward's own level."""
    total_P = ADVANTAGES[name](rewards_PG).sum(1)
    # group_norm divides by at least 1e-6, which magnifies the rounding of the sum (1e-15) by at most 1e6.
    torch.testing.assert_close(total_P, torch.zeros_like(total_P), rtol=0, atol=1e-8)


@given(rewards_PG=rewards())
def test_group_mean_is_reward_less_mean(rewards_PG: Tensor) -> None:
    """group_mean differs from the reward by one number a group, the mean."""
    expected = torch.stack([row - sum(row.tolist()) / len(row) for row in rewards_PG])
    torch.testing.assert_close(group_mean(rewards_PG), expected, rtol=0, atol=1e-14)


@given(rewards_PG=rewards())
def test_leave_one_out_is_reward_less_mean_of_others(rewards_PG: Tensor) -> None:
    """leave_one_out's baseline is the mean of the other responses, computed here by leaving each out."""
    G = rewards_PG.shape[1]
    others = torch.stack([rewards_PG[:, [j for j in range(G) if j != i]].mean(1) for i in range(G)], dim=1)
    torch.testing.assert_close(leave_one_out(rewards_PG), rewards_PG - others, rtol=0, atol=1e-13)


@given(n=st.integers(1, 7), G=st.just(8))
def test_group_norm_has_unit_sample_variance(n: int, G: int) -> None:
    """With n of G rewards 1, the squares of group_norm sum to G - 1: the standard deviation is the sample one."""
    rewards_PG = torch.tensor([[1.0] * n + [0.0] * (G - n)], dtype=torch.float64)
    torch.testing.assert_close(
        group_norm(rewards_PG, eps=0.0).square().sum().item(), float(G - 1), rtol=1e-12, atol=1e-12
    )


def test_group_norm_adds_eps_to_the_deviation() -> None:
    """A = (R - mean) / (std + eps): with std 1 / sqrt 2 and eps 1 the value is known (Pr2 Eq. 12)."""
    expected = 0.5 / (math.sqrt(0.5) + 1.0)
    got = group_norm(torch.tensor([[1.0, 0.0]], dtype=torch.float64), eps=1.0)
    torch.testing.assert_close(got, torch.tensor([[expected, -expected]], dtype=torch.float64))


@given(
    reward=st.floats(-3, 3, allow_nan=False, width=32), G=st.integers(2, 9), name=st.sampled_from(sorted(ADVANTAGES))
)
def test_equal_rewards_give_exactly_zero(reward: float, G: int, name: str) -> None:
    """A group of equal rewards gives exactly 0 in float32 too, where their mean may be off by a rounding."""
    advantages_PG = ADVANTAGES[name](torch.full((1, G), reward, dtype=torch.float32))
    assert torch.equal(advantages_PG, torch.zeros(1, G, dtype=torch.float32))


@given(rewards_PG=rewards(), shift=st.floats(-2, 2, width=16), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_shift_and_scale(rewards_PG: Tensor, shift: float, scale: float) -> None:
    """A shift of all rewards changes no advantage; a scale multiplies group_mean and leave_one_out."""
    for fn in (group_mean, leave_one_out):
        torch.testing.assert_close(fn(rewards_PG * scale + shift), fn(rewards_PG) * scale, rtol=0, atol=1e-12)


def test_mixed_groups_are_those_with_unequal_rewards() -> None:
    """Dynamic sampling keeps a group exactly if its rewards are not all equal."""
    rewards_PG = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.3, 0.3, 0.3], [1.0, 0.0, 0.0]])
    assert keep_mixed_groups(rewards_PG).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("name", ["group_norm", "leave_one_out"])
def test_group_of_one_is_refused(name: str) -> None:
    """Where one response cannot be compared with another, the error says that G is 1."""
    with pytest.raises(ValueError, match="at least 2 responses a prompt, got G = 1"):
        ADVANTAGES[name](torch.ones(2, 1))


def test_every_advantage_has_a_formula() -> None:
    """The printed formulas cover exactly the functions."""
    assert FORMULAS.keys() == ADVANTAGES.keys()
