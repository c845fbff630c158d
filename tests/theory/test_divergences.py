"""Laws of the divergences: over a small vocabulary every expectation is a sum, so estimators are equalities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from theory import divergences as d

V = 5
NAMED = {
    "k1": (d.k1, d.k1_kl_mu_old),
    "k2": (d.k2,),
    "k3": (d.k3, d.k3_kl_mu_old, d.k3_kl_old_pi, d.k3_kl_mu_pi),
}


@st.composite
def logits(draw: st.DrawFn) -> Tensor:
    return torch.tensor([draw(st.floats(-4, 4, width=32)) for _ in range(V)], dtype=torch.float64)


@given(p=logits(), q=logits())
def test_exact_divergences_equal_their_sums(p: Tensor, q: Tensor) -> None:
    """KL and TV on logits equal the plain sums over the vocabulary, in the direction of their names."""
    ps, qs = p.softmax(-1).tolist(), q.softmax(-1).tolist()
    pairs = list(zip(ps, qs, strict=True))
    assert d.kl_p_q(p, q).item() == pytest.approx(sum(a * math.log(a / b) for a, b in pairs), abs=1e-13, rel=1e-10)
    assert d.tv_p_q(p, q).item() == pytest.approx(sum(abs(a - b) for a, b in pairs) / 2, abs=1e-14)


def test_forbidden_tokens() -> None:
    """-inf logits: what p forbids adds nothing to KL, what only q forbids makes KL infinite."""
    full = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    cut = torch.tensor([0.3, -0.2, -math.inf], dtype=torch.float64)
    kept = full.softmax(-1)[:2].sum().item()
    assert d.kl_p_q(cut, full).item() == pytest.approx(-math.log(kept), rel=1e-12)
    assert d.tv_p_q(cut, full).item() == pytest.approx(1 - kept, rel=1e-12)
    assert d.kl_p_q(full, cut).item() == math.inf
    assert d.kl_p_q(cut, cut).item() == 0
    assert d.entropy(cut).item() == pytest.approx(d.entropy(full[:2]).item(), rel=1e-12)


@pytest.mark.parametrize("forbidden", [0, 1])
def test_kl_of_a_row_does_not_depend_on_what_other_rows_forbid(forbidden: int) -> None:
    """A row without -inf has the same bits of value and gradient beside a row with one, in p or in q."""
    alone = [torch.randn(1, V, generator=torch.manual_seed(s), dtype=torch.float64).requires_grad_() for s in (0, 1)]
    row = torch.zeros(1, V, dtype=torch.float64)
    cut = row.index_fill(1, torch.tensor([2]), -math.inf)
    beside = [cut, row] if forbidden == 0 else [row, cut]
    together = [torch.cat([x, other]) for x, other in zip(alone, beside, strict=True)]
    ours, theirs = d.kl_p_q(alone[0], alone[1])[0], d.kl_p_q(together[0], together[1])[0]
    assert ours.item() == theirs.item()
    grads = [torch.autograd.grad(value, alone) for value in (ours, theirs)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("fn", [d.kl_p_q, d.tv_p_q])
def test_forbidden_tokens_leave_gradients_finite(fn) -> None:
    """A token that both forbid passes no nan into the gradient of the tokens that they allow."""
    p = torch.tensor([0.3, -0.2, -math.inf], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.1, 0.4, -math.inf], dtype=torch.float64, requires_grad=True)
    grads = torch.autograd.grad(fn(p, q), (p, q))
    expected = torch.autograd.grad(fn(p[:2], q[:2]), (p, q))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@given(p=logits())
def test_entropy(p: Tensor) -> None:
    """Entropy is log V less KL to the uniform distribution."""
    uniform = torch.zeros(V, dtype=torch.float64)
    assert d.entropy(p).item() == pytest.approx(math.log(V) - d.kl_p_q(p, uniform).item(), abs=1e-12)


@given(p=logits(), q=logits())
def test_k1_and_k3_are_unbiased(p: Tensor, q: Tensor) -> None:
    """Summed over the vocabulary with weights p, k1 and k3 equal KL(p || q): the sampler is the second argument."""
    logp, logq = p.log_softmax(-1), q.log_softmax(-1)
    kl = d.kl_p_q(p, q)
    for estimator in (d.k1, d.k3):
        torch.testing.assert_close((logp.exp() * estimator(logq, logp)).sum(), kl, rtol=1e-10, atol=1e-13)


@given(p=logits(), q=logits())
def test_gradients_of_the_estimators(p: Tensor, q: Tensor) -> None:
    """Gradients: k3's in q is KL(p || q)'s; in p, k2's is KL(p || q)'s, k3's is KL(q || p)'s, k1's is 0."""
    p, q = p.requires_grad_(), q.requires_grad_()

    def sampled(estimator, wrt: Tensor) -> Tensor:
        logp, logq = p.log_softmax(-1), q.log_softmax(-1)
        return torch.autograd.grad((logp.exp().detach() * estimator(logq, logp)).sum(), wrt)[0]

    def exact(divergence: Tensor, wrt: Tensor) -> Tensor:
        return torch.autograd.grad(divergence, wrt)[0]

    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(sampled(d.k3, q), exact(d.kl_p_q(p, q), q), **close)
    torch.testing.assert_close(sampled(d.k2, p), exact(d.kl_p_q(p, q), p), **close)
    torch.testing.assert_close(sampled(d.k3, p), exact(d.kl_p_q(q, p), p), **close)
    torch.testing.assert_close(sampled(d.k1, p), torch.zeros_like(p), **close)


@given(log_r=st.floats(-5, 5))
def test_pointwise_values(log_r: float) -> None:
    """With r = first / second: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, under every pair of names."""
    first, second = torch.tensor([[log_r - 1.0]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    log_r = (first - second).item()
    expected = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.expm1(log_r) - log_r}
    for letter, functions in NAMED.items():
        for fn in functions:
            assert fn(first, second).item() == pytest.approx(expected[letter], rel=1e-12, abs=1e-15)


def test_k3_keeps_its_digits_near_one() -> None:
    """At log r = 1e-6 k3 is 5e-13 to six digits, where r - 1 - log r computed naively has none left."""
    value = d.k3(torch.tensor([1e-6], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64))
    # expm1(x) - x cancels 1e-6 against 1e-6: an ulp of that, 2e-22, is 4e-10 of the result.
    assert value.item() == pytest.approx(5e-13 + 1e-18 / 6, rel=1e-8, abs=0)


@given(ratio=st.sampled_from([0.1, 0.49, 0.51, 1.0, 1.9, 2.1, 40.0]), tau=st.sampled_from([1.5, 2, 30.0]))
def test_extreme_fraction(ratio: float, tau: float) -> None:
    """F(tau) counts tokens with max(a/b, b/a) > tau, is symmetric, and ignores what the mask leaves out (R3 Eq. 3)."""
    a = torch.tensor([[math.log(ratio), 0.0, 0.0, math.nan]], dtype=torch.float64)
    b = torch.zeros(1, 4, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]])
    expected = (max(ratio, 1 / ratio) > tau) / 3
    assert d.extreme_fraction(a, b, mask, tau).item() == pytest.approx(expected)
    assert d.extreme_fraction(b, a, mask, tau).item() == pytest.approx(expected)


def test_extreme_fraction_of_nan_is_nan() -> None:
    """A NaN is no ordinary token: F is NaN, and 0 again where the mask leaves it out."""
    a, mask = torch.tensor([[0.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool)
    assert d.extreme_fraction(a, torch.zeros(1, 2), mask, 2.0).isnan()
    assert d.extreme_fraction(a, torch.zeros(1, 2), mask & ~a.isnan(), 2.0) == 0


def test_extreme_fraction_refuses_tau_below_one() -> None:
    """tau < 1 would count every token and is refused."""
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"tau >= 1, got 0\.5"):
        d.extreme_fraction(x, x, x == 0, 0.5)


def test_one_sample_that_carries_everything_is_one_effective_sample() -> None:
    """At any magnitude of the weights: e^900 is no float."""
    spike = torch.tensor([[900.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert d.effective_sample_size(spike, spike > -1).item() == pytest.approx(1 / 4)


def test_chi2_token_and_seq() -> None:
    """chi2_token is the mean of rho^2 - 1 over tokens; chi2_seq that of the squared product over responses."""
    rho = torch.tensor([[2.0, 0.5, 3.0], [1.5, math.nan, math.nan], [math.nan] * 3], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, False, False], [False] * 3])
    old, mu = rho.log(), torch.zeros(3, 3, dtype=torch.float64)
    assert d.chi2_token(old, mu, mask).item() == pytest.approx((4 + 0.25 + 9 + 2.25) / 4 - 1)
    assert d.chi2_seq(old, mu, mask).item() == pytest.approx((9 + 2.25) / 2 - 1)


def test_a_long_responses_chi2_is_finite() -> None:
    """A product of 1,000 token ratios at 0.05 nats each has a square beyond float32; the metric stops at e^75."""
    gap = torch.full((8192, 1000), 0.05)
    found = d.chi2_seq(gap, torch.zeros_like(gap), gap > 0).item()
    assert found == pytest.approx(math.exp(d.SATURATION), rel=1e-5)
    assert math.isnan(d.chi2_seq(torch.full((1, 2), math.nan), torch.zeros(1, 2), torch.ones(1, 2) > 0).item())


def test_masked_mean() -> None:
    """A value under False changes no result and gets exactly zero gradient, and the mean of nothing is an error."""
    x = torch.tensor([[1.0, math.nan, 4.0, math.inf]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    mean = d.masked_mean(x, mask)
    mean.backward()
    assert mean.item() == 2.5
    assert x.grad is not None
    assert x.grad.tolist() == [[0.5, 0.0, 0.5, 0.0]]
    with pytest.raises(ValueError, match="at least 1 True in the mask, got 0 of 4"):
        d.masked_mean(x, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="got 0 of 4"):
        d.effective_sample_size(x, torch.zeros_like(mask))


def test_discrepancy_and_staleness_metrics() -> None:
    """Each metric equals its formula, computed here token by token over a ragged batch with nan in the padding."""
    old_rows, mu_rows = [[-0.5, -1.0, -2.0], [-0.1]], [[-0.4, -1.9, -2.1], [-0.3]]
    nan = math.nan
    old = torch.tensor([old_rows[0], [*old_rows[1], nan, nan], [nan] * 3], dtype=torch.float64)
    mu = torch.tensor([mu_rows[0], [*mu_rows[1], nan, nan], [nan] * 3], dtype=torch.float64)
    mask = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    gaps = [o - m for orow, mrow in zip(old_rows, mu_rows, strict=True) for o, m in zip(orow, mrow, strict=True)]
    diffs = [
        abs(math.exp(o) - math.exp(m))
        for orow, mrow in zip(old_rows, mu_rows, strict=True)
        for o, m in zip(orow, mrow, strict=True)
    ]
    rho = [math.exp(g) for g in gaps]
    k3 = sum(r - 1 - math.log(r) for r in rho) / 4
    expected = {
        "rollout_corr/kl": -sum(gaps) / 4,
        "rollout_corr/k3_kl": k3,
        "rollout_corr/chi2_token": sum(r * r for r in rho) / 4 - 1,
        "rollout_corr/chi2_seq": ((rho[0] * rho[1] * rho[2]) ** 2 + rho[3] ** 2) / 2 - 1,
        "rollout_corr/eff_sample_size": sum(rho) ** 2 / (4 * sum(r * r for r in rho)),
        "rollout_corr/extreme_frac_tau2": 1 / 4,
        "rollout_corr/probs_diff_mean": sum(diffs) / 4,
        "rollout_corr/probs_diff_max": max(diffs),
        "rollout_corr/log_ppl_diff": -(sum(gaps[:3]) / 3 + gaps[3]) / 2,
    }
    assert d.discrepancy_metrics(old, mu, mask) == pytest.approx(expected, rel=1e-12)
    assert d.staleness_metrics(old, mu, mask) == pytest.approx(
        {"staleness/k3_kl": k3, "staleness/extreme_frac_tau2": 1 / 4}, rel=1e-12
    )
    with pytest.raises(ValueError, match="at least 1 True"):
        d.discrepancy_metrics(old, mu, torch.zeros_like(mask))
