"""Laws of engine gaps that are too wide for a float: weights are their caps or an honest inf, never nan, never clamped.

TRL #7120 computed clamp(rho) / rho, which is nan where rho overflows; verl clamps log-ratios at 20, and what should
stop a run looks like a large number.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from theory.objectives import CORRECTIONS, correction, preset

CAPPED = [name for name, cls in CORRECTIONS.items() if "cap" in cls.__dataclass_fields__]
ONE, MASK = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)


def logp(x: float) -> Tensor:
    return torch.tensor([[x]], dtype=torch.float64)


def gradient(name: str, pi: float, old: float, mu: float, A: float = 1.0, **overrides) -> float:
    """The gradient of the preset by log pi of a single token."""
    logp_pi = logp(pi).requires_grad_()
    preset(name, **overrides)(logp_pi, logp(old), logp(mu), A * ONE, MASK).objective.backward()
    assert logp_pi.grad is not None
    return logp_pi.grad.item()


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("gap", [25.0, 800.0, math.inf])
def test_a_capped_weight_is_its_cap(name: str, gap: float) -> None:
    """However likely old makes a token that mu thought impossible, its capped weight is the cap."""
    assert gradient("reinforce", -0.5, -0.5, -0.5 - gap, correction=correction(name, cap=3.0)) == 3.0


@pytest.mark.parametrize("gap", [-800.0, -25.0, 15.0, 25.0])
def test_an_uncapped_weight_is_the_ratio(gap: float) -> None:
    """exp(gap) to rounding, also beyond 20 nats: nothing is clamped on the way, and 1e-11 is no 2e-9."""
    weight = gradient("reinforce", -0.5, -0.5, -0.5 - gap, correction=correction("token_is"))
    assert weight == pytest.approx(math.exp(gap), rel=1e-12, abs=0)


@pytest.mark.parametrize("gap", [-800.0, -25.0, 25.0, 800.0])
def test_icepop_zeroes_what_is_outside(gap: float) -> None:
    """A weight outside the interval is exactly 0, at any distance."""
    assert gradient("reinforce", -0.5, -0.5, -0.5 - gap, correction=correction("icepop")) == 0


@pytest.mark.parametrize("step", [-25.0, -3.0, 3.0, 25.0])
@pytest.mark.parametrize("name", ["ppo", "grpo", "minirl_no_is"])
def test_the_ratio_is_not_clamped(name: str, step: float) -> None:
    """Where A leads pi back, the gradient is A pi/old whatever the distance: only the named bounds bind."""
    A = -1.0 if step > 0 else 1.0
    assert gradient(name, -30.0 + step, -30.0, -30.0, A) == pytest.approx(A * math.exp(step), rel=1e-12, abs=0)


def test_the_largest_weight_is_reported_as_it_is() -> None:
    """rollout_corr/weight_max is the weight itself, also where it is far out."""
    out = preset("reinforce", correction=correction("token_is"))(logp(-1.0), logp(-1.0), logp(-31.0), ONE, MASK)
    assert out.metrics["rollout_corr/weight_max"].item() == pytest.approx(math.exp(30), rel=1e-12)
