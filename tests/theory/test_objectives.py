"""The law table of the objectives: every preset under every correction against score-function forms written by hand.

`GRADIENT` holds, for each preset, the derivative of the aggregated sum by each response token's log pi, on plain lists.
A preset without a row there fails `test_the_law_table_covers_every_preset`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.objective_batches import TIGHT, Batch, make_batch, tuned
from theory.objectives import CORRECTIONS, PRESETS, correction, preset, ratios

CLIPPED = ("ppo", "grpo", "grpo_dapo", "dr_grpo", "gspo")

# ---- the score-function forms, by hand -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequence:
    """One response as lists: r = pi/old and w (the correction's weight) of each token, and the advantage."""

    r: list[float]
    w: list[float]
    A: float
    pi_over_mu: list[float]

    @property
    def s(self) -> float:
        return math.exp(sum(math.log(r) for r in self.r) / len(self.r))


def stopped(r: float, A: float, low: float, high: float) -> bool:
    return (A > 0 and r > high) or (A < 0 and r < low)


def minirl(s: Sequence) -> list[float]:
    """M_t w_t A with w = pi/mu of the correction times r where the correction is one of old/mu."""
    return [0.0 if stopped(r, s.A, 0.8, 1.27) else w * r * s.A for r, w in zip(s.r, s.w, strict=True)]


def token_clip(low: float, high: float) -> Callable[[Sequence], list[float]]:
    """d/dlog pi of w min(r A, clip(r) A): w r A, and 0 where the bound binds."""
    return lambda s: [0.0 if stopped(r, s.A, low, high) else w * r * s.A for r, w in zip(s.r, s.w, strict=True)]


def gspo(s: Sequence) -> list[float]:
    """Every term of the response carries s, and ds/dlog pi_t = s/|y|: the mean weight times s A on each token."""
    value = 0.0 if stopped(s.s, s.A, 1 - 3e-4, 1 + 4e-4) else sum(s.w) / len(s.w) * s.s * s.A
    return [value] * len(s.r)


GRADIENT: dict[str, tuple[Callable[[Sequence], list[float]], str]] = {
    "minirl": (minirl, "token_sum"),
    "minirl_lengthnorm": (minirl, "length_norm"),
    "minirl_no_is": (minirl, "token_sum"),
    "reinforce": (lambda s: [w * s.A for w in s.w], "token_sum"),
    "ppo": (token_clip(0.8, 1.2), "token_sum"),
    "grpo": (token_clip(0.8, 1.2), "length_norm"),
    "grpo_dapo": (token_clip(0.8, 1.27), "token_mean"),
    "dr_grpo": (token_clip(0.8, 1.2), "token_sum"),
    "cispo": (lambda s: [w * min(max(r, 0.0), 5.0) * s.A for r, w in zip(s.r, s.w, strict=True)], "token_mean"),
    "gspo": (gspo, "length_norm"),
}


def weights_by_hand(name: str, rho: list[float]) -> list[float]:
    prefix = [math.prod(rho[: t + 1]) for t in range(len(rho))]
    return {
        "none": [1.0] * len(rho), "geo_rs": [1.0] * len(rho), "k3_rs": [1.0] * len(rho),
        "token_is": rho,
        "token_tis": [min(r, 1.1) for r in rho],
        "prefix_tis": [min(p, 1.1) for p in prefix],
        "seq_tis": [min(prefix[-1], 1.1)] * len(rho),
        "seq_mis": [prefix[-1]] * len(rho),
        "icepop": [r if 0.9 <= r <= 1.1 else 0.0 for r in rho],
    }[name]  # fmt: skip


def keeps_by_hand(name: str, rho: list[float]) -> bool:
    product = math.prod(rho)
    if name == "seq_mis":
        return 0.8 <= product <= 1.2
    if name == "geo_rs":
        return 0.9 <= product ** (1 / len(rho)) <= 1.1
    return name != "k3_rs" or sum(r - 1 - math.log(r) for r in rho) / len(rho) <= 0.01


def gradient_by_hand(form: Callable[[Sequence], list[float]], agg: str, batch: Batch, weights, keeps) -> Tensor:
    """The gradient assembled on lists: per-token coefficients over the aggregation's denominator, 0 elsewhere."""
    grad = torch.zeros_like(batch.pi)
    kept = []
    for b in range(len(batch.pi)):
        at = batch.mask[b]
        pi, old, mu = (x[b][at].tolist() for x in (batch.pi, batch.old, batch.mu))
        rho = [math.exp(o - m) for o, m in zip(old, mu, strict=True)]
        if not keeps(rho):
            continue
        whole = [math.exp(p - m) for p, m in zip(pi, mu, strict=True)]
        ratio = [math.exp(p - o) for p, o in zip(pi, old, strict=True)]
        coefficients = form(Sequence(ratio, weights(rho), batch.advantages[b].item(), whole))
        scale = 1 / len(ratio) if agg == "length_norm" else 1.0
        grad[b, at] = scale * torch.tensor(coefficients, dtype=torch.float64)
        kept.append(len(ratio))
    denominator = sum(kept) if agg == "token_mean" else len(kept)
    return grad / denominator if kept else grad


def test_the_law_table_covers_every_preset() -> None:
    """The table of gradients has exactly the presets: a new preset needs its law."""
    assert GRADIENT.keys() == PRESETS.keys()


@pytest.mark.parametrize("correction_name", list(CORRECTIONS))
@pytest.mark.parametrize("name", list(GRADIENT))
def test_gradient_is_the_score_function_form(name: str, correction_name: str) -> None:
    """Autograd's gradient of each preset under each correction equals the form written by hand."""
    form, agg = GRADIENT[name]
    for seed in range(4):
        batch = make_batch(seed)
        expected = gradient_by_hand(
            form,
            agg,
            batch,
            lambda rho: weights_by_hand(correction_name, rho),
            lambda rho: keeps_by_hand(correction_name, rho),
        )
        torch.testing.assert_close(batch.gradient(tuned(name, correction_name)), expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("correction_name", list(TIGHT))
def test_the_table_tests_what_binds(correction_name: str) -> None:
    """On the batches of the table each bound binds for some and not for all: or the table would show little."""
    outputs = [make_batch(seed)(tuned("ppo", correction_name)).metrics for seed in range(4)]
    bound = "rejected" if correction_name in ("seq_mis", "geo_rs", "k3_rs") else "truncated"
    for name in (f"rollout_corr/{bound}_fraction", "actor/pg_clipfrac_low", "actor/pg_clipfrac_high"):
        assert 0 < sum(out[name].item() for out in outputs) / 4 < 1


@pytest.mark.parametrize(("name", "agg"), [("minirl", "token_sum"), ("minirl_lengthnorm", "length_norm")])
@given(seed=st.integers(0, 500))
def test_minirl_default_weight_is_whole(name: str, agg: str, seed: int) -> None:
    """MiniRL's gradient is M_t min(pi/mu, cap) A over the denominator: the whole weight is truncated (Eq. 7)."""
    batch = make_batch(seed, staleness=0.3, gap=0.6)

    def form(s: Sequence) -> list[float]:
        return [
            0.0 if stopped(r, s.A, 0.8, 1.27) else min(x, 1.5) * s.A for r, x in zip(s.r, s.pi_over_mu, strict=True)
        ]

    expected = gradient_by_hand(form, agg, batch, lambda rho: rho, lambda rho: True)
    torch.testing.assert_close(batch.gradient(preset(name, cap=1.5)), expected, rtol=1e-11, atol=1e-14)
    assert preset(name).correction == correction("token_tis", numerator="pi", cap=5.0)


@pytest.mark.parametrize("correction_name", ["none", "token_tis", "seq_mis"])
@pytest.mark.parametrize("name", CLIPPED)
def test_finite_differences(name: str, correction_name: str) -> None:
    """For objectives whose value is differentiable in pi, autograd agrees with central differences off the kinks."""
    batch = make_batch(3)
    objective = tuned(name, correction_name)
    grad, h = batch.gradient(objective), 1e-6
    for b, t in torch.cartesian_prod(torch.arange(len(batch.pi)), torch.arange(batch.pi.shape[1])).tolist():
        step = torch.zeros_like(batch.pi)
        step[b, t] = h
        up, down = (replace(batch, pi=batch.pi + sign * step)(objective).objective for sign in (1, -1))
        # Central differences: error h^2 / 6 ~ 2e-13 plus rounding 1e-16 / h = 1e-10.
        assert ((up - down) / (2 * h)).item() == pytest.approx(grad[b, t].item(), abs=1e-9)


# ---- values --------------------------------------------------------------------------------------------------------


def test_values_on_one_token() -> None:
    """One token with known numbers: the value of each form of term."""
    pi, old, mu = (torch.tensor([[math.log(p)]], dtype=torch.float64) for p in (0.6, 0.3, 0.4))
    good, mask = torch.tensor([2.0], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)

    def value(name: str, A: Tensor) -> float:
        return preset(name)(pi, old, mu, A, mask).objective.item()

    assert value("reinforce", good) == pytest.approx(2 * math.log(0.6))
    assert value("ppo", good) == pytest.approx(1.2 * 2)
    assert value("ppo", -good) == pytest.approx(-2 * 2)
    assert value("grpo_dapo", good) == pytest.approx(1.27 * 2)
    assert value("gspo", good) == pytest.approx((1 + 4e-4) * 2)
    assert value("minirl", good) == 0
    assert value("minirl", -good) == pytest.approx(-1.5 * 2 * math.log(0.6))
    assert value("minirl_no_is", -good) == pytest.approx(-2 * 2 * math.log(0.6))
    assert value("cispo", good) == pytest.approx(2 * 2 * math.log(0.6))


# ---- presets against each other ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 500))
def test_dapo_is_grpo_with_equal_clips_and_token_mean(seed: int) -> None:
    """grpo_dapo with eps_high = eps_low is grpo under token_mean; on equal lengths it is plain grpo."""
    batch = make_batch(seed)
    dapo = preset("grpo_dapo", eps_high=0.2)
    assert torch.equal(batch.gradient(dapo), batch.gradient(preset("grpo", aggregation="token_mean")))
    equal = replace(batch, mask=torch.ones_like(batch.mask))
    torch.testing.assert_close(equal.gradient(dapo), equal.gradient(preset("grpo")), rtol=1e-12, atol=1e-15)


@given(seed=st.integers(0, 500))
def test_gspo_of_one_token_is_the_token_ratio(seed: int) -> None:
    """On responses of one token GSPO is GRPO with GSPO's clips."""
    batch = make_batch(seed, T=1)
    token = preset("grpo", eps_low=3e-4, eps_high=4e-4)
    assert torch.equal(batch.gradient(preset("gspo")), batch.gradient(token))


@given(seed=st.integers(0, 500))
def test_gspo_token_equals_gspo(seed: int) -> None:
    """With one advantage a response, GSPO-token has GSPO's value and gradient (GSPO sec. 4.3)."""
    batch = make_batch(seed, staleness=0.001)
    token = replace(preset("gspo"), ratio=ratios.sequence_geometric_token)
    torch.testing.assert_close(batch.gradient(token), batch.gradient(preset("gspo")), rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(batch(token).objective, batch(preset("gspo")).objective, rtol=1e-12, atol=0)


@given(seed=st.integers(0, 500))
def test_sequence_product_is_the_sequence_gradient(seed: int) -> None:
    """sg[prod pi/mu] A log pi by Seq-TIS without cap is the gradient of prod(pi/mu) A (MiniRL Eq. 1 and 2)."""
    batch = make_batch(seed)
    whole = preset("reinforce", correction=correction("seq_tis", numerator="pi", cap=math.inf))
    pi = batch.pi.clone().requires_grad_()
    log_ratio = torch.where(batch.mask, pi - batch.mu, 0.0).sum(1)
    (log_ratio.exp() * batch.advantages).mean().backward()
    torch.testing.assert_close(batch.gradient(whole), pi.grad, rtol=1e-11, atol=1e-14)


@given(seed=st.integers(0, 500))
def test_cispo_inside_its_bounds_is_weighted_reinforce(seed: int) -> None:
    """Where no ratio leaves CISPO's bounds it is sg[r] A log pi, that is REINFORCE with a token weight."""
    batch = make_batch(seed, gap=0.0)
    weighted = preset("reinforce", correction=correction("token_is", numerator="pi"), aggregation="token_mean")
    torch.testing.assert_close(batch.gradient(preset("cispo")), batch.gradient(weighted), rtol=1e-12, atol=1e-15)


@given(seed=st.integers(0, 500))
def test_minirl_on_policy(seed: int) -> None:
    """With pi = old MiniRL's gradient is old/mu A, without the IS weight A (sec. 4.3); with mu = old, REINFORCE's."""
    batch = make_batch(seed, staleness=0.0, gap=0.3)
    weighted = preset("reinforce", correction=correction("token_is"))
    torch.testing.assert_close(batch.gradient(preset("minirl")), batch.gradient(weighted), rtol=1e-12, atol=1e-15)
    reinforce = batch.gradient(preset("reinforce"))
    assert torch.equal(batch.gradient(preset("minirl_no_is")), reinforce)
    same = replace(batch, mu=batch.old)
    assert torch.equal(same.gradient(preset("minirl")), reinforce)


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "reinforce"])
@given(seed=st.integers(0, 200))
def test_first_order(name: str, seed: int) -> None:
    """With pi = old = mu every preset's gradient is REINFORCE's under the same aggregation."""
    batch = make_batch(seed, staleness=0.0, gap=0.0)
    reinforce = preset("reinforce", aggregation=PRESETS[name].aggregation)
    torch.testing.assert_close(batch.gradient(preset(name)), batch.gradient(reinforce), rtol=1e-12, atol=1e-15)
