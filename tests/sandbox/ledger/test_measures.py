"""Laws of sandbox/ledger/measures.py: what number a row gives, and where it gives none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.measures import KL_RISE, STEP_SECONDS, SURVIVAL, between, probe


def _row(**series: Sequence[float]) -> dict[str, Any]:
    full = {name: [*values, *[None] * (NUM_WINDOWS - len(values))] for name, values in series.items()}
    return {"series": full, "first_step": None, "num_steps": 100, "probes": {}}


def test_survival_is_the_part_of_the_run_before_its_first_reason() -> None:
    """1 where no rule fired; (first step - 1) / steps where one did."""
    assert SURVIVAL.of(_row()) == 1.0
    assert SURVIVAL.of(_row() | {"first_step": 51}) == 0.5
    assert SURVIVAL.of(_row() | {"first_step": 1}) == 0.0


def test_a_run_that_stopped_keeps_its_last_value() -> None:
    """Where the asked windows are empty, the last value before them stands; without any, there is no number."""
    name = "reward/mean"
    last = between(name, 0.75, 1.0, "w", "1")
    whole = _row(**{name: [0.1] * 15 + [0.5] * 5})
    assert last.of(whole) == pytest.approx(0.5)
    assert last.of(_row(**{name: [0.1, 0.2, 0.3]})) == 0.3
    assert math.isnan(last.of(_row()))
    assert between(name, 0.0, 0.1, "w", "1").of(whole) == pytest.approx(0.1)


def test_the_rise_of_the_kl_is_over_its_beginning() -> None:
    """The largest window over the mean of the first two; no number where it begins at 0."""
    name = "rollout_corr/k3_kl"
    assert KL_RISE.of(_row(**{name: [1.0, 3.0, 20.0, 4.0]})) == 10.0
    assert math.isnan(KL_RISE.of(_row(**{name: [0.0, 0.0, 20.0]})))


def test_the_time_of_a_step_is_the_processors() -> None:
    """CPU seconds over the steps that were taken; none for a run that was resumed, or that has no such field."""
    assert STEP_SECONDS.of(_row() | {"cpu_seconds": 50.0, "last_step": 25}) == 2.0
    assert math.isnan(STEP_SECONDS.of(_row() | {"cpu_seconds": None, "last_step": 25}))
    assert math.isnan(STEP_SECONDS.of(_row() | {"last_step": 25}))


def test_a_probe_that_found_nothing_is_no_number() -> None:
    """null in a row is nan; what was found is itself."""
    measure = probe("p", "words", "1")
    assert math.isnan(measure.of(_row()))
    assert measure.of(_row() | {"probes": {"p": 0.25}}) == 0.25


@pytest.mark.parametrize(("start", "stop"), [(0.5, 0.5), (-0.1, 1.0), (0.5, 1.1), (0.51, 0.52)])
def test_windows_that_hold_nothing_are_refused(start: float, stop: float) -> None:
    """A measure over no window is a ValueError."""
    with pytest.raises(ValueError, match="start, stop"):
        between("x", start, stop, "w", "1")
