"""Laws of extreme log-probabilities: value and gradient are those of the equation for any finite or -inf, in any type.

A clip that binds is flat, however large the ratio (0 times inf is nan in PPO as it is usually written); a weight that
overflows times a ratio that underflows is a number; 16-bit log-probabilities are computed with in 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.effort import few
from tests.strategies import MODERATE, batches
from tests.theory.extreme_reference import reference
from tests.theory.laws_objectives import CORRECTION_ROWS, fits, tuned
from tests.theory.laws_presets import PRESET_ROWS
from tests.theory.objective_batches import Batch
from theory.objectives import Objective, preset

LOG_PROBS = (0.0, -0.02, -0.5, -1.0, -3.0, -12.0, -50.0, -95.0, -110.0, -400.0, -800.0, -2000.0, -math.inf)
"""Far from every bound of the tables in all their differences, and on both sides of what each type can hold."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
B, T = 2, 3
log_probs = st.lists(st.sampled_from(LOG_PROBS), min_size=B * T, max_size=B * T)


@st.composite
def extremes(draw: st.DrawFn) -> Batch:
    pi, old, mu = (torch.tensor(draw(log_probs)).view(B, T) for _ in range(3))
    equal = draw(st.sampled_from(["none", "on_policy", "one_engine"]))
    old = pi.clone() if equal == "on_policy" else mu.clone() if equal == "one_engine" else old
    A = torch.tensor(draw(st.lists(st.sampled_from([-1.5, -1.0, 0.0, 0.5, 1.0]), min_size=B, max_size=B)))
    mask = torch.arange(T) < torch.tensor(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))[:, None]
    return Batch(pi, old, mu, A, mask)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    pi, old, mu, A = (x.to(dtype) for x in (batch.pi, batch.old, batch.mu, batch.advantages))
    return Batch(pi, old, mu, A, batch.mask)


def one(pi: list[float], old: list[float], mu: list[float], A: float) -> Batch:
    """One response, with a second one that is empty."""
    empty, mask = [0.0] * T, torch.tensor([[True] * T, [False] * T])
    first, second, third = (torch.tensor([x, empty]) for x in (pi, old, mu))
    return Batch(first, second, third, torch.tensor([A, 0.0]), mask)


FLAT = one([-1.0] * T, [-400.0, -1.0, -1.0], [-1.0] * T, 1.0)
IMPOSSIBLE = one([-math.inf, -1.0, -1.0], [-1.0] * T, [-1.0] * T, 1.0)
IDLE = one([-1.0] * T, [-1.0] * T, [-2000.0, -1.0, -1.0], 0.0)


def require_equation(objective: Objective, batch: Batch, dtype: torch.dtype) -> None:
    batch = cast(batch, dtype)
    rows = [tuple(x[b][batch.mask[b]].tolist() for x in (batch.pi, batch.old, batch.mu)) for b in range(B)]
    wide = torch.promote_types(dtype, torch.float32)
    expected = reference(objective, rows, batch.advantages.tolist(), torch.finfo(wide).eps)  # pyright: ignore
    gradient = torch.zeros(B, T)
    for b in range(B):
        gradient[b, batch.mask[b]] = torch.tensor(expected.gradient[b])
    # A logarithm of size x is known to x eps, which is the relative error of its exponential.
    size = sum(abs(x) for row in rows for part in row for x in part if x > -math.inf)
    rtol = torch.finfo(wide).eps * (64 + 8 * size)
    atol = max(torch.finfo(wide).tiny, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    out, result = batch.with_gradient(objective)
    assert result.dtype == dtype
    # Rounded once more to the type of log pi, where what is too large for it is inf.
    torch.testing.assert_close(
        result.double(), gradient.to(wide).to(dtype).double(), rtol=rtol + 2 * torch.finfo(dtype).eps, atol=atol
    )
    terms = torch.tensor(expected.terms).to(wide).double()
    assume(not terms.sum().isnan())  # infinities of both signs
    value = out.objective
    assert value.dtype == wide
    total, bound = terms.sum(), rtol * terms[terms.isfinite()].abs().sum()
    torch.testing.assert_close(value.double(), total, rtol=rtol, atol=float(bound) + atol)


PAIRS = [(p, None) for p in PRESET_ROWS] + [
    (p, c) for i, p in enumerate(PRESET_ROWS) for j, c in enumerate(CORRECTION_ROWS) if (i + j) % 2 == 0 and fits(p, c)
]
"""Every preset alone and with every other correction, and every correction with every other preset."""


@pytest.mark.parametrize(("name", "correction_name"), PAIRS)
@few
@given(batch=extremes(), dtype=st.sampled_from(DTYPES), numerator=st.sampled_from(["old", "pi"]))
@example(batch=FLAT, dtype=torch.float32, numerator="old")
@example(batch=IMPOSSIBLE, dtype=torch.float32, numerator="old")
@example(batch=IDLE, dtype=torch.float64, numerator="old")
def test_extremes_are_those_of_the_equation(
    name: str, correction_name: str | None, batch: Batch, dtype: torch.dtype, numerator: str
) -> None:
    """Any finite or -inf log-probabilities, in any type: J and its gradient are the equation's, and never nan."""
    objective = tuned(name, correction_name)
    if correction_name is not None and objective.correction.weighted and objective.trust_region.weight_ratio == "pi/mu":
        objective = replace(objective, correction=replace(objective.correction, numerator=numerator))
    require_equation(objective, batch, dtype)


@pytest.mark.parametrize("name", ["grpo", "grpo_dual_clip", "gspo", "ctpo"])
def test_an_open_bound_and_no_advantage_are_nothing(name: str) -> None:
    """Where the upper bound is inf, as M2PO's may be, a ratio that overflows adds 0 with A = 0: inf times 0, twice."""
    batch = cast(one([-1.0] * T, [-400.0, -1.0, -1.0], [-1.0] * T, 0.0), torch.float32)
    out, gradient = batch.with_gradient(preset(name, eps_high=math.inf))
    assert out.objective == 0 and not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PRESET_ROWS)
@few
@given(batch=batches(corners=MODERATE))
def test_sixteen_bits_are_computed_in_thirty_two(name: str, dtype: torch.dtype, batch: Batch) -> None:
    """J of 16-bit log-probabilities is that of the same numbers in float32, and so is its gradient, rounded once."""
    objective, narrow = preset(name), cast(batch, dtype)
    wide = cast(narrow, torch.float32)
    (out, gradient), (expected, wide_gradient) = narrow.with_gradient(objective), wide.with_gradient(objective)
    assert torch.equal(out.objective, expected.objective)
    assert out.metrics == expected.metrics
    assert torch.equal(gradient, wide_gradient.to(dtype))
