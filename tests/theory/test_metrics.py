"""Laws of the metric registry: complete rows, checked names, and producers that use registered ones."""

from __future__ import annotations

import pytest
import torch

from theory.divergences import discrepancy_metrics, staleness_metrics
from theory.metrics import REGISTRY, check, describe

GROUPS = {
    "reward", "eval", "rollout_corr", "staleness", "actor", "routing", "predictor", "response_length", "sampling",
    "progress", "timing_s", "transfer", "rollout", "probe", "turns",
}  # fmt: skip


def test_every_row_is_complete() -> None:
    """A registered metric has a formula, a unit, a source, and a known group."""
    for name, metric in REGISTRY.items():
        assert metric.formula
        assert metric.unit
        assert metric.source
        assert name.split("/")[0] in GROUPS


def test_names_are_unique() -> None:
    """No metric is registered twice: the registry is as long as the list it was made from."""
    from theory import metrics

    assert len(REGISTRY) == len(metrics._METRICS)


def test_describe_says_formula_unit_and_source() -> None:
    """describe prints what the registry holds."""
    for name, metric in REGISTRY.items():
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
