"""Laws of the gap by place: an engine, a place of the batch or a position with more of it is named, chance is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.doctor.steps import places
from lab.doctor.steps.places import Places, _null
from lab.doctor.view import View
from lab.traces import Trace
from tests.lab.doctor.test_steps import drawn
from theory.streams import stream


def heavy(step: int, times: Callable[[Trace], Tensor]) -> Trace:
    """A trace whose gap is of a heavy-tailed law, the same for every token but for a factor."""
    trace = drawn(step)
    normal = torch.randn(len(trace.logp_old), generator=stream(step, "places test"), dtype=torch.float64)
    gap = 0.01 * normal.sign() * normal.abs().exp() * times(trace)
    return replace(trace, logp_mu=(trace.logp_old + gap).clamp(max=0.0))


def places_of(times: Callable[[Trace], Tensor], first: int, num_steps: int = 10) -> dict[str, int]:
    """The groups that are found over some steps, of four engines that take turns."""
    of = Places()
    for step in range(first, first + num_steps):
        trace = heavy(step, times)
        of.add(step, View.of(replace(trace, engines=torch.arange(len(trace)) % 4)))
    return {found.place.name: found.group for found in of.found(0)}


def one(trace: Trace) -> Tensor:
    """No place of its own."""
    return torch.ones(len(trace.logp_old))


def test_chance_is_no_place() -> None:
    """With a heavy-tailed gap that is the same everywhere, engines and places of the batch are named in 1 % of runs."""
    named = [name for seed in range(30) for name in places_of(one, first=1000 * seed) if name in ("engine", "slot")]
    assert len(named) <= 2


def test_an_engine_or_a_place_of_the_batch_with_more_of_the_gap_is_named() -> None:
    """A gap that is five times as large on engine 2, on response 7, or from a position on, is found there."""

    def on(is_hit: Callable[[View], Tensor], by: float = 5.0) -> Callable[[Trace], Tensor]:
        return lambda trace: torch.where(is_hit(View.of(trace)), by, 1.0)

    assert places_of(on(lambda view: view.response_n % 4 == 2), 1)["engine"] == 2
    # In two steps one of four engines is the largest twice a fourth of the time, whatever the size of the gap.
    assert not places_of(on(lambda view: view.response_n % 4 == 2), 1, num_steps=2)
    assert places_of(on(lambda view: view.response_n == 7, 8.0), 1)["slot"] == 7
    assert "positions" in places_of(on(lambda view: view.position_n == 5, 12.0), 1)


def test_an_engine_may_have_any_number() -> None:
    """Engines by port or process id: the one with more of the gap is named by its own number."""
    of = Places()
    for step in range(1, 11):
        trace = heavy(step, lambda own: torch.where(View.of(own).response_n % 4 == 2, 5.0, 1.0))
        of.add(step, View.of(replace(trace, engines=30_000 + 1000 * (torch.arange(len(trace)) % 4))))
    (found,) = (one for one in of.found(0) if one.place.name == "engine")
    assert found.group == 32_000 and found.title == "engine (or rank) 32000"


def test_chance_is_asked_only_where_a_group_has_enough_of_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its distribution takes seconds per 100 steps of 64 responses: for a gap that is the same everywhere, none."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(places, "_null", lambda *sizes: asked.append(sizes) or _null(*sizes))
    places_of(one, 1)
    assert not asked
    places_of(lambda own: torch.where(View.of(own).response_n % 4 == 2, 5.0, 1.0), 1)
    assert (10, 4) in asked
