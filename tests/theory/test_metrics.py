"""Laws of the metric registry: complete rows, checked names, and producers that use registered ones."""

from __future__ import annotations

import pytest
import torch

from theory.divergences import discrepancy_metrics, staleness_metrics
from theory.metrics import _METRICS, REGISTRY, check, describe

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
