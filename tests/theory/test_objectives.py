"""Laws of the presets against each other: where one is another, values written by hand, and what first order means."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from tests.strategies import MODERATE, batches, policy_pairs, reals
from tests.theory.laws_presets import PRESET_ROWS
from tests.theory.objective_batches import Batch, make_batch
from theory.divergences import kl_p_q, tv_p_q
from theory.objectives import PRESETS, correction, preset, ratios
from theory.objectives import trust_regions as tr
from theory.objectives.presets.dual_clip import DualClip


def same(a: Tensor, b: Tensor) -> None:
    # The two sides order the same float64 products differently.
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


# ---- values by hand --------------------------------------------------------------------------------------------------


def one_response(*probabilities: tuple[float, float, float]) -> Batch:
    """One response of these tokens, each as (pi, old, mu), with advantage 2."""
    pi, old, mu = (torch.tensor([[math.log(p[i]) for p in probabilities]]) for i in range(3))
    return Batch(pi, old, mu, torch.tensor([2.0]), torch.ones(1, len(probabilities), dtype=torch.bool))


def test_values_on_one_token() -> None:
    """One token with known numbers: the value of each form of term."""
    good = one_response((0.6, 0.3, 0.4))
    bad = replace(good, advantages=-good.advantages)

    def value(name: str, batch: Batch) -> float:
        return batch(preset(name)).objective.item()

    assert value("reinforce", good) == pytest.approx(2 * math.log(0.6))
    assert value("ppo", good) == pytest.approx(1.2 * 2)
    assert value("ppo", bad) == pytest.approx(-2 * 2)
    assert value("grpo_dapo", good) == pytest.approx(1.27 * 2)
    assert value("gspo", good) == pytest.approx((1 + 4e-4) * 2)
    assert value("minirl", good) == 0
    assert value("minirl", bad) == pytest.approx(-1.5 * 2 * math.log(0.6))
    assert value("minirl_no_is", bad) == pytest.approx(-2 * 2 * math.log(0.6))
    assert value("cispo", good) == pytest.approx(2 * 2 * math.log(0.6))
    assert value("minpro", good) == pytest.approx(1.5 * 2 * math.log(0.6))
    # |pi - mu| = 0.2 > 0.15, and KL of (0.4, 0.6) from (0.6, 0.4) is 0.4 log 1.5 ... = 0.081 > 0.05: up is stopped.
    for name in ("dppo_tv", "dppo_kl", "cppo"):
        assert value(name, good) == 0
        assert value(name, bad) == pytest.approx(-1.5 * 2 * math.log(0.6))


def test_minpro_on_three_tokens() -> None:
    """Ratios 1/2, 3, 2: the weights are 1/2, 3 x 1/2 and 2 x min(1/2, 3); an earlier ratio above 1 is no cap at 1."""
    falling = one_response((0.2, 0.2, 0.4), (0.6, 0.2, 0.2), (0.4, 0.2, 0.2))
    expected = 2 * torch.tensor([[0.5, 1.5, 1.0]]) / 3
    same(falling.gradient(preset("minpro")), expected)
    rising = one_response((0.6, 0.4, 0.4), (0.5, 0.4, 0.4), (0.8, 0.4, 0.4))
    same(rising.gradient(preset("minpro")), 2 * torch.tensor([[1.5, 1.25 * 1.5, 2 * 1.25]]) / 3)


def test_cppo_on_three_tokens() -> None:
    """Deviations 0.1, 0.1, 0.04 under eps 0.12, delta_b 0.04, w = 1, 0.75, 0.5: what the prefix spent stops the rest.

    Token 2 may spend min(0.12, 0.12 + 0.04 - 0.1) = 0.06 and spends 0.075; token 3 may spend
    min(0.12, 0.12 + 0.07 - 0.175) = 0.015 and spends 0.02.
    """
    batch = one_response((0.5, 0.4, 0.4), (0.5, 0.4, 0.4), (0.44, 0.4, 0.4))
    objective = replace(preset("cppo"), trust_region=tr.CPPO(0.12, 0.12, delta_b=0.04, w_min=0.5))
    same(batch.gradient(objective), 2 * torch.tensor([[1.25, 0.0, 0.0]]) / 3)
    # Tokens that mu did not sample neither spend nor save: two of them after the first token change nothing.
    at = torch.tensor([0, 0, 0, 1, 2])
    holed = Batch(
        batch.pi[:, at],
        batch.old[:, at],
        batch.mu[:, at],
        batch.advantages,
        torch.tensor([[True, False, False, True, True]]),
    )
    same(holed.gradient(objective), 2 * torch.tensor([[1.25, 0.0, 0.0, 0.0, 0.0]]) / 3)
    # With half of the deviation on the first token, the second fits: 0.12 + 0.04 - 0.05 = 0.11 >= 0.075.
    less = one_response((0.45, 0.4, 0.4), (0.5, 0.4, 0.4), (0.44, 0.4, 0.4))
    same(less.gradient(objective), 2 * torch.tensor([[1.125, 1.25, 1.1]]) / 3)


def test_dppo_kl_is_from_mu_to_pi() -> None:
    """mu 0.9 and pi 0.99 are 0.1445 nats apart seen from mu and 0.0713 from pi; eps between the two stops."""
    batch = one_response((0.99, 0.9, 0.9))
    assert tr.binary_kl(batch.mu, batch.pi).item() == pytest.approx(0.9 * math.log(0.9 / 0.99) + 0.1 * math.log(10))
    assert tr.binary_kl(batch.mu, batch.pi).item() == pytest.approx(0.1445, abs=5e-5)
    assert tr.binary_kl(batch.pi, batch.mu).item() == pytest.approx(0.0713, abs=5e-5)
    assert batch.gradient(preset("dppo_kl", eps_high=0.1)).item() == 0
    assert batch.gradient(preset("dppo_kl", eps_high=0.15)).item() == pytest.approx(2 * 1.1)


# ---- one preset as another -------------------------------------------------------------------------------------------


@given(batch=batches(corners=MODERATE))
def test_dapo_is_grpo_with_equal_clips_and_token_mean(batch: Batch) -> None:
    """grpo_dapo with eps_high = eps_low is grpo under token_mean; on equal lengths it is plain grpo."""
    dapo = preset("grpo_dapo", eps_high=0.2)
    assert torch.equal(batch.gradient(dapo), batch.gradient(preset("grpo", aggregation="token_mean")))
    equal = replace(batch, mask=torch.ones_like(batch.mask))
    same(equal.gradient(dapo), equal.gradient(preset("grpo")))


@given(batch=batches(corners=MODERATE, T=1))
def test_gspo_of_one_token_is_the_token_ratio(batch: Batch) -> None:
    """On responses of one token GSPO is GRPO with GSPO's clips."""
    token = preset("grpo", eps_low=3e-4, eps_high=4e-4)
    assert torch.equal(batch.gradient(preset("gspo")), batch.gradient(token))


@given(batch=batches(corners=("near", "equal", "wide")))
def test_gspo_token_equals_gspo(batch: Batch) -> None:
    """With one advantage per response, GSPO-token has GSPO's value and gradient (GSPO sec. 4.3)."""
    token = replace(preset("gspo"), ratio=ratios.sequence_geometric_token)
    same(batch.gradient(token), batch.gradient(preset("gspo")))
    same(batch(token).objective, batch(preset("gspo")).objective)


@given(batch=batches(corners=MODERATE))
def test_sequence_product_is_the_sequence_gradient(batch: Batch) -> None:
    """sg[prod pi/mu] A log pi by Seq-TIS without cap is the gradient of prod(pi/mu) A (MiniRL Eq. 1 and 2)."""
    whole = preset("reinforce", correction=correction("seq_tis", numerator="pi", cap=math.inf))
    pi = batch.pi.clone().requires_grad_()
    log_ratio_B = torch.where(batch.mask, pi - batch.mu, 0.0).sum(1)
    kept = batch.mask.any(1)
    ((log_ratio_B.exp() * batch.advantages)[kept].sum() / max(int(kept.sum()), 1)).backward()
    torch.testing.assert_close(batch.gradient(whole), pi.grad, rtol=1e-11, atol=1e-14)


@given(batch=batches(corners=("on_policy", "one_engine", "generic")))
def test_cispo_inside_its_bounds_is_weighted_reinforce(batch: Batch) -> None:
    """Where no ratio leaves CISPO's bounds it is sg[r] A log pi: REINFORCE with pi/mu as weight, once old is mu."""
    batch = replace(batch, mu=batch.old)
    weighted = preset("reinforce", correction=correction("token_is", numerator="pi"), aggregation="token_mean")
    same(batch.gradient(preset("cispo")), batch.gradient(weighted))


@given(batch=batches(corners=("on_policy", "equal")))
def test_minirl_on_policy(batch: Batch) -> None:
    """With pi = old MiniRL's gradient is old/mu A, without the IS weight A (sec. 4.3); with mu = old, REINFORCE's."""
    weighted = preset("reinforce", correction=correction("token_is"))
    same(batch.gradient(preset("minirl")), batch.gradient(weighted))
    reinforce = batch.gradient(preset("reinforce"))
    assert torch.equal(batch.gradient(preset("minirl_no_is")), reinforce)
    assert torch.equal(replace(batch, mu=batch.old).gradient(preset("minirl")), reinforce)


@given(batch=batches(corners=MODERATE))
def test_cppo_without_weights_and_budget_is_dppo(batch: Batch) -> None:
    """With w_min = 1 and delta_b = 1 CPPO is DPPO-Binary-TV; with either alone it stops more or less, never else."""
    dppo = preset("dppo_tv", aggregation="token_mean", eps_low=0.05, eps_high=0.1)
    cppo = preset("cppo", eps_low=0.05, eps_high=0.1)
    region = cppo.trust_region
    assert isinstance(region, tr.CPPO)
    plain = replace(cppo, trust_region=replace(region, w_min=1.0, delta_b=1.0))
    assert torch.equal(batch.gradient(plain), batch.gradient(dppo))
    kept = batch.gradient(dppo) != 0
    budgeted = batch.gradient(replace(cppo, trust_region=replace(region, w_min=1.0, delta_b=0.01)))
    weighted = batch.gradient(replace(cppo, trust_region=replace(region, delta_b=1.0)))
    assert not ((budgeted != 0) & ~kept).any()
    assert not (kept & (weighted == 0)).any()


@pytest.mark.parametrize("num_tokens", [2, 4])
@given(pair=policy_pairs(4))
def test_the_binary_divergence_is_a_lower_bound(num_tokens: int, pair: tuple[Tensor, Tensor]) -> None:
    """Seeing one token against all others loses information (data processing); with two tokens it loses none."""
    p, q = (x[:num_tokens] for x in pair)
    logp, logq = p.log_softmax(-1), q.log_softmax(-1)
    # Nearer to certainty, 1 - p is lost in the rounding of log p.
    assume(((logp < -1e-9) & (logq < -1e-9)).all())
    tv, kl = tr.binary_tv(logp, logq), tr.binary_kl(logp, logq)
    if num_tokens == 2:
        torch.testing.assert_close(tv, tv_p_q(p, q).expand(2), rtol=1e-9, atol=1e-14)
        # 1 - p is good to 1e-16 / 1e-9.
        torch.testing.assert_close(kl, kl_p_q(p, q).expand(2), rtol=1e-6, atol=1e-13)
    assert (tv <= tv_p_q(p, q) + 1e-14).all()
    assert (kl <= kl_p_q(p, q) + 1e-13).all()
    assert (kl >= -1e-13).all()


def test_the_binary_divergence_at_certainty() -> None:
    """A certain token: no divergence from itself, a large one of an uncertain p from a certain q, never nan."""
    sure, half, never = torch.tensor([0.0]), torch.tensor([math.log(0.5)]), torch.tensor([-math.inf])
    assert tr.binary_kl(sure, sure).item() == 0
    assert tr.binary_kl(never, never).item() == 0
    assert tr.binary_kl(half, sure).item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 * 2**52))
    assert tr.binary_kl(half, never).item() == math.inf
    assert tr.binary_kl(sure, half).item() == pytest.approx(math.log(2))
    assert tr.binary_kl(never, half).item() == pytest.approx(math.log(2))
    # An engine may report 0 as a rounding above it.
    assert tr.binary_kl(half, torch.tensor([1e-9])).item() == pytest.approx(tr.binary_kl(half, sure).item())


@given(certainties=reals(2, 8, low=0.0, high=1e-6))
def test_engines_that_round_a_certain_token_differently_do_not_diverge(certainties: Tensor) -> None:
    """In float32, log-probabilities between -1e-6 and 0 are one and the same certainty: no mask stops them."""
    logp, logq = (-certainties).float()
    assert (tr.binary_kl(logp, logq) < 1e-4).all()
    assert (tr.binary_tv(logp, logq) < 1e-4).all()


@pytest.mark.parametrize("name", [n for n in PRESET_ROWS if n != "reinforce"])
@given(batch=batches(corners=("equal",)))
def test_first_order(name: str, batch: Batch) -> None:
    """With pi = old = mu every preset's gradient is REINFORCE's under the same aggregation."""
    reinforce = preset("reinforce", aggregation=PRESETS[name].aggregation)
    same(batch.gradient(preset(name)), batch.gradient(reinforce))


@pytest.mark.parametrize("c", [1.5, 3.0, math.inf])
def test_dual_clip_is_trls_two_sided_clip(c: float) -> None:
    """max(min(r A, clip(r) A), c A) where A < 0 is TRL's min(min(r, delta) A, clip(r) A) with delta = c, for either A.

    With c = inf it is PPO. Both are written here from their formulas; ratios from 0.02 to 50.
    """
    log_r = torch.linspace(-4.0, 4.0, 81, dtype=torch.float64)[:, None]
    old, mask = torch.full_like(log_r, -5.0), torch.ones_like(log_r, dtype=torch.bool)
    objective = preset("ppo_dual_clip", clip_ratio_c=c)
    for A in (1.0, -1.0):
        r = log_r.exp()
        expected = torch.minimum(r.clamp(max=c) * A, r.clamp(0.8, 1.2) * A).mean()
        advantages = torch.full((81,), A, dtype=torch.float64)
        value = objective(old + log_r, old, old, advantages, mask).objective
        torch.testing.assert_close(value, expected, rtol=1e-14, atol=0)
        if c == math.inf:
            assert torch.equal(value, preset("ppo")(old + log_r, old, old, advantages, mask).objective)


@pytest.mark.parametrize("plain", ["ppo", "grpo"])
def test_a_dual_clip_adds_one_bound(plain: str) -> None:
    """`ppo_dual_clip` and `grpo_dual_clip` differ from their parents in c alone; with c = inf they have their value."""
    parent, dual = preset(plain), preset(f"{plain}_dual_clip")
    region, own = dual.trust_region, parent.trust_region
    assert isinstance(region, DualClip) and isinstance(own, tr.MinClip)
    assert (region.eps_low, region.eps_high, region.clip_ratio_c) == (own.eps_low, own.eps_high, 3.0)
    assert replace(dual, name=parent.name, title=parent.title, trust_region=own) == parent
    batch = make_batch(3, staleness=1.5)
    open_ended = preset(f"{plain}_dual_clip", clip_ratio_c=math.inf)
    assert torch.equal(batch(open_ended).objective, batch(parent).objective)


@pytest.mark.parametrize("plain", ["ppo", "grpo"])
@given(batch=batches(corners=("on_policy",)))
def test_one_update_per_rollout_never_meets_the_second_clip(plain: str, batch: Batch) -> None:
    """With pi = old, under any engine gap, a dual clip changes no bit of the value or the gradient."""
    value, gradient = batch.with_gradient(preset(f"{plain}_dual_clip"))
    wanted, its_gradient = batch.with_gradient(preset(plain))
    assert torch.equal(value.objective, wanted.objective) and torch.equal(gradient, its_gradient)


@pytest.mark.parametrize("name", PRESETS)
def test_metrics_are_beside_the_objective(name: str) -> None:
    """Without its metrics an objective has the same value, to the bit, and none of them."""
    batch = one_response((0.6, 0.4, 0.1), (0.5, 0.4, 0.2), (0.4, 0.4, 0.3))
    objective = preset(name, kl_coefficient=0.0, centering="none")
    whole, bare = batch(objective), batch(objective, has_metrics=False)
    assert whole.objective.isfinite() and torch.equal(whole.objective, bare.objective)
    assert whole.metrics and not bare.metrics
