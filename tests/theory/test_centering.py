"""Laws of score centering, by enumeration: each token's part of the gradient has the mean 0 under mu, and only that
goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from theory.objectives import CORRECTIONS, PRESETS, Objective, Top, correction, preset
from theory.streams import stream

V = 7
OBJECTIVES: dict[str, Objective] = {
    "no weight": preset("reinforce", centering="full"),
    "pi/mu": preset("reinforce", correction=correction("token_is", numerator="pi"), centering="full"),
    "pi/mu up to 1.2": preset(
        "reinforce", correction=correction("token_tis", numerator="pi", cap=1.2), centering="full"
    ),
    "pi/mu in [0.8, 1.2]": preset(
        "reinforce", correction=correction("token_clip", numerator="pi", lo=0.8, hi=1.2), centering="full"
    ),
    "IcePop": preset("reinforce", correction=correction("icepop", lo=0.8, hi=1.2), centering="full"),
    "MiniRL": preset("minirl", centering="full"),
    "PPO": preset("ppo", centering="full"),
    "CISPO": preset("cispo", centering="full"),
    "DPPO": preset("dppo_tv", centering="full", eps_low=0.05, eps_high=0.05),
    "SAPO": preset("sapo", centering="full"),
    "dual clip": preset("ppo_dual_clip", centering="full", clip_ratio_c=1.3),
}


def policies(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi, and log old and log mu near it, over V tokens after one context."""
    logits, step, engine = torch.randn(3, V, generator=stream(seed, "centering"), dtype=torch.float64)
    old = (logits + 0.5 * step).log_softmax(-1)
    return logits, old, (old + 0.5 * engine).log_softmax(-1)


def gradient_of_each(
    objective: Objective, logits: Tensor, old: Tensor, mu: Tensor, advantage: float, k: int = V
) -> Tensor:
    """(V, V): the gradient by the logits that each token, were it sampled, would give; a response of one token.

    All in one batch of V responses, over which every aggregation is a mean.
    """
    ids = mu.topk(k).indices
    leaf = logits.expand(V, V).clone().requires_grad_()
    all_VV = [leaf.log_softmax(-1), old.expand(V, V), mu.expand(V, V)]
    sampled = [x.diagonal()[:, None] for x in all_VV]
    top = None
    if objective.centering != "none":
        top = Top(*(x[:, None, ids] for x in all_VV), is_complete=k == V)
    output = objective(*sampled, torch.full((V,), advantage), torch.ones(V, 1, dtype=torch.bool), top=top)
    return V * torch.autograd.grad(output.objective, leaf)[0]


def uncentred(objective: Objective) -> Objective:
    """The same without centering."""
    return replace(objective, centering="none")


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=8)
@given(seed=st.integers(0, 200), advantage=st.sampled_from([-1.5, 0.7]))
def test_the_centred_score_has_the_mean_0_under_mu(name: str, seed: int, advantage: float) -> None:
    """With all of mu, E_mu[gradient] is 0, and each token's gradient is that without centering less its mean."""
    logits, old, mu = policies(seed)
    centred = gradient_of_each(OBJECTIVES[name], logits, old, mu, advantage)
    plain = gradient_of_each(uncentred(OBJECTIVES[name]), logits, old, mu, advantage)
    mean = mu.exp() @ plain
    torch.testing.assert_close(mu.exp() @ centred, torch.zeros(V, dtype=torch.float64), atol=1e-13, rtol=0)
    torch.testing.assert_close(centred, plain - mean, atol=1e-13, rtol=0)


@settings(max_examples=20)
@given(seed=st.integers(0, 200), k=st.integers(1, V))
def test_where_mu_is_pi_nothing_is_taken_off(seed: int, k: int) -> None:
    """Without a weight E_pi[grad log pi] = 0, and the tail of mu is pi's: with any k the gradient is what it was."""
    logits = policies(seed)[0]
    pi = logits.log_softmax(-1)
    objective = preset("reinforce", centering="top_k", centering_k=k)
    centred = gradient_of_each(objective, logits, pi, pi, 0.8, k)
    torch.testing.assert_close(centred, gradient_of_each(uncentred(objective), logits, pi, pi, 0.8), atol=1e-12, rtol=0)


# DPPO's bound is on probabilities, and the tail's is not that of its tokens.
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "DPPO"])
@settings(max_examples=8)
@given(seed=st.integers(0, 200))
def test_top_k_takes_the_tail_for_pis_own(name: str, seed: int) -> None:
    """Where mu's tail, and old's, are pi's rescaled, the k likeliest tokens and their masses are all that counts."""
    logits, _, mu = policies(seed)
    pi = logits.log_softmax(-1)
    ids = mu.topk(3).indices
    is_head = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)

    def with_tail_of_pi(p: Tensor) -> Tensor:
        scaled = pi.exp() * (1 - p.exp()[is_head].sum()) / (1 - pi.exp()[is_head].sum())
        return torch.where(is_head, p.exp(), scaled).log()

    mu = with_tail_of_pi(mu)
    old = with_tail_of_pi(policies(seed + 1)[1].where(is_head, policies(seed + 1)[1]))
    if set(mu.topk(3).indices.tolist()) != set(ids.tolist()):
        return  # the rescaled tail is likelier than the head: another problem
    full = gradient_of_each(OBJECTIVES[name], logits, old, mu, 0.8)
    top = gradient_of_each(replace(OBJECTIVES[name], centering="top_k"), logits, old, mu, 0.8, k=3)
    torch.testing.assert_close(top, full, atol=1e-11, rtol=0)


def test_top_k_goes_to_full() -> None:
    """Over ten problems the mean error of the centred mean falls with k, and is 0 at k = V - 1, where the tail is one
    token, and at V."""
    errors = []
    for k in range(1, V + 1):
        means = []
        for seed in range(10):
            logits, old, mu = policies(seed)
            objective = preset("reinforce", centering="top_k", centering_k=k)
            means.append((mu.exp() @ gradient_of_each(objective, logits, old, mu, 1.0, k)).norm())
        errors.append(float(torch.stack(means).mean()))
    assert all(a > b for a, b in pairwise(errors[:-1])) and errors[0] > 0.01
    assert max(errors[-2:]) < 1e-12


def test_padding_and_rejected_tokens_are_not_centred() -> None:
    """Off the mask nothing enters the gradient, whatever stands there."""
    logits, old, mu = policies(0)
    leaf = logits.clone().requires_grad_()
    pi = leaf.log_softmax(-1)
    top = Top(*(torch.stack([x, torch.full_like(x, torch.nan)]).view(1, 2, V) for x in (pi, old, mu)), is_complete=True)
    one = [torch.stack([x[2], torch.tensor(torch.nan)]).view(1, 2) for x in (pi, old, mu)]
    mask = torch.tensor([[True, False]])
    objective = OBJECTIVES["PPO"]
    got = torch.autograd.grad(objective(*one, torch.ones(1), mask, top=top).objective, leaf)[0]
    torch.testing.assert_close(got, gradient_of_each(objective, logits, old, mu, 1.0)[2])


WEIGHTED = {
    f"reinforce + {name}": preset("reinforce", correction=name) for name, one in CORRECTIONS.items() if one.weighted
}


@pytest.mark.parametrize("name", [*PRESETS, *WEIGHTED])
def test_tokens_depend_on_each_other_or_not(name: str) -> None:
    """`is_tokenwise` is False just where other tokens' pi, old or mu change the derivative of a token's term."""
    objective, most = WEIGHTED.get(name) or preset(name, aggregation="token_sum"), 0.0
    mask, A = torch.ones(4, 5, dtype=torch.bool), torch.tensor([1.0, -1.0, 0.5, -2.0])
    others = torch.arange(5) != 2

    def slope(numbers: Tensor) -> Tensor:
        leaf = numbers[0].clone().requires_grad_()
        shift = -0.1 * numbers[3] if objective.uses_router_shift else None
        output = objective(leaf, numbers[1], numbers[2], A, mask, router_shift_BT=shift)
        return torch.autograd.grad(output.objective, leaf)[0][:, 2]

    for seed in range(12):
        # Near policies, within most bounds, and far ones.
        apart = (0.05, 0.2, 0.5, 2.0)[seed % 4] * torch.randn(2, 4, 4, 5, generator=stream(seed, "others")).double()
        first, second = (apart - 1).clamp(max=-0.01)
        most = max(most, (slope(first) - slope(torch.where(others, second, first))).abs().max().item())
    assert objective.is_tokenwise == (most == 0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: preset("gspo", centering="full"),
            "gspo: centering: expected none, or a ratio of none, token",
        ),
        (lambda: preset("minirl", correction="seq_tis", centering="top_k"), "top_k with the correction seq_tis"),
        (lambda: preset("cppo", centering="full"), "got full with the trust region cppo"),
        (lambda: preset("minirl", centering="half"), "centering"),
        (lambda: preset("minirl", centering="top_k", centering_k=0), "centering_k >= 1, got 0"),
    ],
)
def test_what_does_not_compose_is_one_line(make, said) -> None:
    """A weight or bound that looks at other tokens has no coefficient of a token that was not sampled."""
    with pytest.raises(ValueError, match=said):
        make()


def test_full_wants_all_of_mu() -> None:
    """`full` refuses a record of fewer tokens, and centering one of none."""
    logits, old, mu = policies(0)
    with pytest.raises(ValueError, match="expected all tokens of mu for centering full, got the 3 likeliest"):
        gradient_of_each(OBJECTIVES["PPO"], logits, old, mu, 1.0, k=3)
    with pytest.raises(ValueError, match="expected mu's likeliest tokens for centering full, got none"):
        OBJECTIVES["PPO"](*[torch.zeros(1, 1)] * 3, torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
