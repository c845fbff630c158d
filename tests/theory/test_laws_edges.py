"""Laws at the edges: an advantage of exactly 0, a cap below 1, and errors that name what they are about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.theory.laws_objectives import REGION_ROWS
from tests.theory.objective_batches import log_gaps, make_batch
from theory.advantages import group_norm, leave_one_out
from theory.objectives import CORRECTIONS, PRESETS, combine_metrics, correction, preset
from theory.objectives.objective import _require_shapes

UNBOUNDED = {"none", "soft_gate", "gamma_kernel"}
"""Regions without a bound, which count no clipped tokens."""
SIGNED = [name for name, row in REGION_ROWS.items() if row.signed and name not in UNBOUNDED]
CAPPED = [name for name, cls in CORRECTIONS.items() if "cap" in cls.__dataclass_fields__]


@pytest.mark.parametrize("name", SIGNED)
def test_a_zero_advantage_stops_nothing(name: str) -> None:
    """A response without an advantage is pushed nowhere: no bound binds on it, and no clip fraction counts it."""
    batch = make_batch(0, staleness=0.6)
    still = replace(batch, advantages=torch.zeros_like(batch.advantages))
    objective = next(o for o in PRESETS.values() if o.trust_region.name == name)
    assert still(objective).metrics["actor/pg_clipfrac"].item() == 0
    assert not still.gradient(objective).any()


@pytest.mark.parametrize("cap", [0.25, 0.75])
@pytest.mark.parametrize("name", CAPPED)
def test_a_cap_may_be_below_one(name: str, cap: float) -> None:
    """Any cap above 0 is one: no weight exceeds it, and some reach it."""
    batch = make_batch(0)
    weight = correction(name, cap=cap).weight(log_gaps(batch), batch.mask)[batch.mask]
    assert weight.max().item() == cap


def test_errors_name_the_argument_and_the_function() -> None:
    """A message begins with the tensor of the wrong shape, or the function for which the group is too small."""
    x, mask, A = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    wrong = torch.zeros(2, 1)
    for name, arguments in {
        "logp_old_BT": (x, wrong, x, A, mask, None),
        "logp_mu_BT": (x, x, wrong, A, mask, None),
        "is_response_BT": (x, x, x, A, mask[:, :1], None),
        "logp_ref_BT": (x, x, x, A, mask, wrong),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected the shape of logp_pi_BT, \(2, 3\), got \(2, 1\)$"):
            _require_shapes(*arguments)
    for function in (group_norm, leave_one_out):
        with pytest.raises(ValueError, match=rf"^{function.__name__}: expected at least 2 responses per prompt"):
            function(torch.ones(2, 1))
    with pytest.raises(ValueError, match="expected at least 1 response token in the parts together, got 0"):
        combine_metrics([(0, {}), (0, {})])
    with pytest.raises(ValueError, match="expected cap > 0"):
        preset("minirl", cap=0.0)
