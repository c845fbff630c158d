"""Every law over every row of the tables in `laws_*.py`: values, gradients, stops, and what they depend on.

Laws of the trust regions alone are in `test_trust_regions.py`, of the mask (padding, splits, order) in
`test_objective_masks.py`, of presets against each other in `test_objectives.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.effort import few
from tests.strategies import MODERATE, batches
from tests.theory.laws_advantages import ADVANTAGE_ROWS, LENGTH_ADVANTAGE_ROWS, TOKEN_ADVANTAGE_ROWS
from tests.theory.laws_objectives import AGGREGATION_ROWS, CORRECTION_ROWS, RATIO_ROWS, REGION_ROWS, fits, tuned
from tests.theory.laws_presets import EVERY, PRESET_ROWS, gradient_by_hand
from tests.theory.objective_batches import Batch, approx, log_gaps, make_batch, tokens_of
from theory.advantages import ADVANTAGES, FORMULAS
from theory.objectives import AGGREGATIONS, CORRECTIONS, PRESETS, RATIOS, TRUST_REGIONS, Objective, correction, preset

PAIRS = [
    (p, c) for i, p in enumerate(PRESET_ROWS) for j, c in enumerate(CORRECTION_ROWS) if (i + j) % 5 == 0 and fits(p, c)
]
"""Every preset with every fifth correction, and every correction with every fifth preset: its weight is a factor."""
DIFFERENTIABLE = [n for n, row in PRESET_ROWS.items() if not (row.scored or row.replayed)]
LOOSEST = {n: math.inf if row.divergence else 1.0 for n, row in PRESET_ROWS.items() if row.eps is not None}


# ---- completeness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registered", "rows"),
    [
        (ADVANTAGES, ADVANTAGE_ROWS | LENGTH_ADVANTAGE_ROWS | TOKEN_ADVANTAGE_ROWS), (RATIOS, RATIO_ROWS),
        (CORRECTIONS, CORRECTION_ROWS),
        (PRESETS, PRESET_ROWS),
        (TRUST_REGIONS, REGION_ROWS), (AGGREGATIONS, AGGREGATION_ROWS),
        (FORMULAS, ADVANTAGE_ROWS | LENGTH_ADVANTAGE_ROWS | TOKEN_ADVANTAGE_ROWS),
    ],
)  # fmt: skip
def test_every_registered_name_has_a_row(registered: dict[str, object], rows: dict[str, object]) -> None:
    """The tables hold exactly the registered names: an implementation without laws fails here."""
    assert rows.keys() == registered.keys()
    assert all(getattr(value, "name", name) == name for name, value in registered.items())


# ---- ratios ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RATIO_ROWS)
@given(batch=batches())
def test_ratios_and_their_gradients(name: str, batch: Batch) -> None:
    """Each response's ratios, and their derivatives by every log pi of the batch, are the formulas on its tokens."""
    value = RATIOS[name](batch.pi, batch.old, batch.mask)
    jacobian = torch.func.jacrev(lambda pi: RATIOS[name](pi, batch.old, batch.mask))(batch.pi)
    expected = torch.zeros_like(jacobian)
    for b in range(len(batch.pi)):
        pi, old, _ = tokens_of(batch, b)
        log_ratio, at = [p - o for p, o in zip(pi, old, strict=True)], batch.mask[b].nonzero()[:, 0]
        if not log_ratio:
            continue
        assert value[b, at].tolist() == approx(RATIO_ROWS[name].by_hand(log_ratio))
        expected[b, at[:, None], b, at] = torch.tensor(RATIO_ROWS[name].jacobian(log_ratio))
    counted = batch.mask[:, :, None, None]
    torch.testing.assert_close(torch.where(counted, jacobian, 0.0), expected, rtol=1e-11, atol=1e-14)


# ---- objectives: gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "correction_name"), PAIRS)
@few
@given(batch=batches(corners=MODERATE))
def test_gradient_is_the_score_function_form(name: str, correction_name: str, batch: Batch) -> None:
    """Autograd's gradient of the presets under the corrections of the engine gap equals the form written by hand."""
    row, fix = PRESET_ROWS[name], CORRECTION_ROWS[correction_name]
    bounds = fix.tight or {}
    expected = gradient_by_hand(
        row, batch, lambda rho: fix.weights(rho, **bounds), lambda rho: fix.keeps(rho, **bounds)
    )
    torch.testing.assert_close(batch.gradient(tuned(name, correction_name)), expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", PRESET_ROWS)
@given(batch=batches())
def test_gradient_under_its_own_correction(name: str, batch: Batch) -> None:
    """Each preset as it is has its paper's gradient, and a finite one: at equal, certain and extreme policies too."""
    row, gradient = PRESET_ROWS[name], batch.gradient(preset(name))
    expected = gradient_by_hand(row, batch, row.weights, numerator=row.numerator)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-14)


def test_the_corrections_tables_bind() -> None:
    """On moderate batches each bound of the table binds for some tokens and not for all: or it would show little."""
    for name, row in CORRECTION_ROWS.items():
        flags = []
        for seed in range(8):
            fix, gap, mask = correction(name, **(row.tight or {})), log_gaps(make_batch(seed)), make_batch(seed).mask
            flags += (fix.truncated(gap, mask) | ~fix.keep(gap, mask)[:, None])[mask].tolist()
        assert any(flags) == (row.tight is not None)
        assert not all(flags)


def hessian(objective: Objective, batch: Batch) -> Tensor:
    def slope(pi: Tensor) -> Tensor:
        value = replace(batch, pi=pi)(objective).objective
        return torch.autograd.grad(value, pi, create_graph=True)[0]

    pi = batch.pi.clone().requires_grad_()
    first = slope(pi).flatten()
    if not first.requires_grad:
        return torch.zeros(len(first), len(first))
    rows = [torch.autograd.grad(x, pi, retain_graph=True)[0].flatten() for x in first]
    return torch.stack(rows)


@pytest.mark.parametrize("name", PRESET_ROWS)
@few
@given(batch=batches(corners=MODERATE))
def test_what_is_stopped_has_no_derivative(name: str, batch: Batch) -> None:
    """Where the weight is stopped, the gradient is a constant of pi (second derivative 0): no weight leaks into it.

    Where the ratio itself is differentiated, the second derivative is the derivative of the form written by hand.
    """
    B, T = batch.pi.shape
    second = hessian(preset(name), batch).unflatten(0, (B, T)).unflatten(-1, (B, T))
    gradient, expected = batch.gradient(preset(name)), torch.zeros_like(second)
    # Rows without a response token stay 0, and so does every position off the mask.
    for b, is_response_T in enumerate(batch.mask):
        where = torch.nonzero(is_response_T).flatten()
        expected[b, where[:, None], b, where] = PRESET_ROWS[name].hessian(gradient[b, where])
    # A stopped weight leaves nothing at all, not even rounding.
    torch.testing.assert_close(second, expected, rtol=1e-11, atol=1e-14 if expected.any() else 0.0)


@pytest.mark.parametrize("name", PRESET_ROWS)
@few
@given(batch=batches())
def test_only_pi_carries_a_gradient(name: str, batch: Batch) -> None:
    """No gradient reaches old, mu or the advantages: weights, masks and baselines are constants."""
    pi, old, mu, A = (x.clone().requires_grad_() for x in (batch.pi, batch.old, batch.mu, batch.advantages))
    preset(name)(pi, old, mu, A, batch.mask).objective.backward()
    assert pi.grad is not None
    assert [x.grad for x in (old, mu, A)] == [None, None, None]


@pytest.mark.parametrize(
    ("name", "correction_name"),
    [(n, c) for i, n in enumerate(DIFFERENTIABLE) for c in ("none", ("token_tis", "minpro", "seq_mis")[i % 3])],
)
def test_finite_differences(name: str, correction_name: str) -> None:
    """For objectives whose value is differentiable in pi, autograd agrees with central differences off the kinks."""
    batch, objective = make_batch(3, B=3, T=4), tuned(name, correction_name)
    grad, h = batch.gradient(objective), 1e-6
    for b, t in torch.cartesian_prod(torch.arange(len(batch.pi)), torch.arange(batch.pi.shape[1])).tolist():
        step = torch.zeros_like(batch.pi)
        step[b, t] = h
        up, down = (replace(batch, pi=batch.pi + sign * step)(objective).objective for sign in (1, -1))
        # Central differences: error h^2 / 6 ~ 2e-13 plus rounding 1e-16 / h = 1e-10.
        assert ((up - down) / (2 * h)).item() == pytest.approx(grad[b, t].item(), abs=1e-9)


@pytest.mark.parametrize("name", [n for n in PRESET_ROWS if PRESET_ROWS[n].scored])
def test_finite_differences_of_the_score(name: str) -> None:
    """For objectives that stop their weight, the gradient is that of the value with every weight held where it was."""
    batch, objective = make_batch(3, staleness=0.4), preset(name)
    coefficient = batch.gradient(objective)
    held = torch.where(batch.mask, coefficient * batch.pi, 0.0).sum().item()
    assert batch(objective).objective.item() == pytest.approx(held, rel=1e-12, abs=1e-15)


# ---- objectives: metamorphic -----------------------------------------------------------------------------------------


def on_a_grid(batch: Batch) -> Batch:
    """The same batch with log-probabilities that are multiples of 2^-10, so that sums of them are exact."""
    pi, old, mu = ((x * 1024).round() / 1024 for x in (batch.pi, batch.old, batch.mu))
    return replace(batch, pi=pi, old=old, mu=mu)


@pytest.mark.parametrize(("name", "correction_name"), [pair for pair in EVERY if pair[0] != "dppo_kl"])
@few
@given(batch=batches(corners=MODERATE).map(on_a_grid), c=st.sampled_from([-0.25, -1.0, -4.0]))
def test_a_common_factor_of_the_policies(name: str, correction_name: str | None, batch: Batch, c: float) -> None:
    """A constant added to all three log-probabilities changes no ratio, and so no gradient; probabilities it scales.

    A mask on total variation has the same stops once its widths are scaled by e^c (one on KL has no such rule).
    """
    objective = tuned(name, correction_name)
    expected = batch.gradient(objective)
    if PRESET_ROWS[name].divergence:
        region = objective.trust_region
        widths = {k: v * math.exp(c) for k, v in vars(region).items() if k in ("eps_low", "eps_high", "delta_b")}
        objective = replace(objective, trust_region=type(region)(**(vars(region) | widths)))
    moved = replace(batch, pi=batch.pi + c, old=batch.old + c, mu=batch.mu + c)
    torch.testing.assert_close(moved.gradient(objective), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", PRESET_ROWS)
@few
@given(batch=batches(corners=MODERATE), factor=st.sampled_from([-1.0, 0.0, 0.5, 8.0]))
def test_the_advantage_is_a_factor(name: str, batch: Batch, factor: float) -> None:
    """J is linear in advantages of one sign: a positive factor scales value and gradient, 0 gives exactly 0."""
    objective = preset(name)
    scaled = replace(batch, advantages=batch.advantages * factor)
    if factor < 0:
        # The other sign has the other bounds: without bounds that bind, it is the negative.
        open_ended = [k for k in ("eps_high", "clip_ratio_c") if hasattr(objective.trust_region, k)]
        lowest = {"eps_low": LOOSEST[name]} if name in LOOSEST else {}
        looser = PRESET_ROWS[name].symmetric or lowest | dict.fromkeys(open_ended, math.inf)
        free = preset(name, **looser)
        torch.testing.assert_close(scaled.gradient(free), -batch.gradient(free), rtol=0, atol=0)
    else:
        torch.testing.assert_close(scaled.gradient(objective), factor * batch.gradient(objective), rtol=1e-15, atol=0)
