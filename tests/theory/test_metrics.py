"""Laws of the metrics: complete rows of the registry, checked names, and numbers wherever training has them."""

from __future__ import annotations

import math

import pytest
import torch

from theory.contracts import MiniBatch, Prompt, Response, Rollouts, UpdateStats
from theory.divergences import discrepancy_metrics, staleness_metrics
from theory.metrics import _METRICS, REGISTRY, check, describe
from theory.objectives import Totals, preset
from theory.step_metrics import update_metrics

GROUPS = {
    "reward", "eval", "rollout_corr", "staleness", "actor", "routing", "predictor", "response_length", "sampling",
    "progress", "timing_s", "transfer", "rollout", "probe", "turns",
}  # fmt: skip


def test_every_row_is_complete_and_described() -> None:
    """No name is registered twice; each has a known group, a formula, a unit and a source, which describe prints."""
    assert len(REGISTRY) == len(_METRICS)
    for name, metric in REGISTRY.items():
        assert metric.formula and metric.unit and metric.source
        assert name.split("/")[0] in GROUPS
        good = [] if metric.good is None else [f"good: {metric.good}"]
        source = "; ".join([metric.source, *good])
        assert describe(name) == f"{name} = {metric.formula} [{metric.unit}] ({source})"


def test_unknown_names_suggest_the_nearest() -> None:
    """An unregistered name is an error that names it and the registered one that it resembles most."""
    with pytest.raises(ValueError, match="'actor/pg_clipfraction': did you mean 'actor/pg_clipfrac'"):
        check({"actor/entropy": 1.0, "actor/pg_clipfraction": 0.1})
    with pytest.raises(ValueError, match="did you mean 'reward/mean'"):
        describe("reward/maen")


def test_no_data_must_be_absent() -> None:
    """None stands for no data and is refused: such a metric is left out."""
    with pytest.raises(ValueError, match="expected a number, got None"):
        check({"actor/entropy": None})


def test_producers_use_registered_names() -> None:
    """The names that `divergences` produces pass the check, so a rename on either side fails here."""
    x = torch.full((2, 3), -1.0, dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    check(discrepancy_metrics(x, x, mask))
    check(staleness_metrics(x, x, mask))


def test_metrics_stay_finite_where_the_update_does() -> None:
    """At pi/old = e^100 float32 has no ratio, but PPO's clipped term has value and gradient; e^75 stands in for it."""
    old_BT, pi_BT = torch.full((1, 1), -101.0, dtype=torch.float32), torch.full((1, 1), -1.0, dtype=torch.float32)
    response = Response(Prompt("0", (1,), ""), torch.tensor([1]), old_BT[0], torch.ones(1, dtype=torch.bool), "stop", 0)
    leaf_BT, mask_BT = pi_BT.clone().requires_grad_(), torch.ones(1, 1, dtype=torch.bool)
    advantages_B = torch.ones(1, dtype=torch.float32)
    output = preset("ppo")(leaf_BT, old_BT, old_BT, advantages_B, mask_BT, totals=Totals(1, 1))
    (gradient_BT,) = torch.autograd.grad(output.objective, leaf_BT)
    assert gradient_BT.item() == 0 and output.objective.item() == pytest.approx(1.2)
    minibatch = MiniBatch(Rollouts((response,)), old_BT, advantages_B, 0, 1)
    found = update_metrics([(minibatch, UpdateStats({}, pi_BT))], None, None)
    ratio = float(output.metrics["actor/ratio_mean"])
    assert [ratio, found["staleness/k3_kl"], found["actor/k3_kl_mu_pi"]] == pytest.approx([math.exp(75)] * 3, rel=1e-5)
