"""Laws of the KL penalty: what is taken off the objective, and what each estimator's gradient is the gradient of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.theory.objective_batches import make_batch
from theory import divergences
from theory.objectives import preset
from theory.objectives.kl_penalty import ESTIMATORS, kl_pi_ref
from theory.streams import stream


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_penalty_is_taken_off(estimator: str) -> None:
    """J with beta is J without, less beta times the aggregated estimator; the metric is its token mean (Pr2 Eq. 11)."""
    batch = make_batch(0)
    ref = torch.where(batch.mask, batch.old - 0.3, math.nan)
    plain, penalised = preset("ppo"), preset("ppo", kl_coefficient=0.1, kl_estimator=estimator)
    values = kl_pi_ref(batch.pi, batch.old - 0.3, estimator, batch.mu)[batch.mask]
    out = batch(penalised, logp_ref_BT=ref)
    assert out.objective.item() == pytest.approx(batch(plain).objective.item() - 0.1 * values.sum().item() / 6)
    assert out.metrics["actor/kl_penalty"].item() == pytest.approx(values.mean().item())
    dirty = replace(batch, pi=torch.where(batch.mask, batch.pi, math.nan))
    gradient = dirty.gradient(penalised, logp_ref_BT=ref)
    assert torch.equal(gradient, batch.gradient(penalised, logp_ref_BT=ref))
    assert not gradient[~batch.mask].any()
    with pytest.raises(ValueError, match=r"expected logp_ref_BT for kl_coefficient 0\.1, got None"):
        batch(penalised)


@given(seed=st.integers(0, 500))
def test_kl_penalty_by_enumeration(seed: int) -> None:
    """Over tokens from pi: k1 and k3 average KL(pi || ref); gradients are 0, KL(pi || ref)'s, KL(ref || pi)'s."""
    generator = stream(seed, "penalty")
    logits, ref = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, logref = logits.log_softmax(-1)[None], ref.log_softmax(-1)[None]
    exact, reverse = divergences.kl_p_q(logits, ref), divergences.kl_p_q(ref, logits)
    wanted = {"k1": torch.zeros(4, dtype=torch.float64)}
    wanted["k2"], wanted["k3"] = (torch.autograd.grad(x, logits)[0] for x in (exact, reverse))
    for estimator, gradient in wanted.items():
        mean = (logp.exp().detach() * kl_pi_ref(logp, logref, estimator)).sum()
        if estimator != "k2":
            torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-13)
        (got,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 500))
def test_the_ratio_makes_k3_unbiased_for_tokens_of_mu(seed: int) -> None:
    """Over tokens from mu, (pi/mu) k3 averages KL(pi || ref), and its gradient that of KL(pi || ref), for any mu."""
    generator = stream(seed, "unbiased_penalty")
    logits, ref, mu = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp, logref, logmu = (x.log_softmax(-1)[None] for x in (logits, ref, mu))
    mean = (logmu.exp() * kl_pi_ref(logp, logref, "k3_is", logmu)).sum()
    exact = divergences.kl_p_q(logits, ref)
    torch.testing.assert_close(mean, exact, rtol=1e-10, atol=1e-13)
    got, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (mean, exact))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 500))
def test_k3_plus_is_k3_with_the_gradient_of_k2(seed: int) -> None:
    """Straight-through: the value is k3's, the gradient k2's, token by token."""
    pi, ref = torch.randn(2, 1, 5, generator=stream(seed, "straight"), dtype=torch.float64)
    pi.requires_grad_()
    plus, k2 = kl_pi_ref(pi, ref, "k3+"), kl_pi_ref(pi, ref, "k2")
    assert torch.equal(plus, kl_pi_ref(pi, ref, "k3"))
    assert torch.equal(*(torch.autograd.grad(x.sum(), pi)[0] for x in (plus, k2)))


def test_the_ratio_needs_mu() -> None:
    """k3_is without mu is refused, and not taken for k3."""
    with pytest.raises(ValueError, match="k3_is: expected logp_mu_BT, got None"):
        kl_pi_ref(torch.zeros(1, 1), torch.zeros(1, 1), "k3_is")
