"""Laws of the clues from routes: records that are late or lack rows, routers that differ, and their KL."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.doctor.diagnosis import diagnose, weigh
from lab.doctor.evidence import gather
from lab.doctor.importers import rows
from lab.doctor.routes import NOWHERE, kl_by_first_layer
from lab.doctor.view import View
from lab.doctor.words import routers
from lab.traces import Trace
from tests.lab.doctor.patients import with_experts
from tests.lab.doctor.test_clues import EXACT, ROWS, noisy
from theory.streams import stream


def routed(shift: int, share: float = 0.0) -> Trace:
    """Exact log-probabilities with routes: mu's are old's, `shift` rows late, a share of them another expert."""
    generator, out = stream(0, "routes"), []
    for row in ROWS:
        S = len(row["tokens"])
        old = torch.rand(S - 1, 2, 8, generator=generator).topk(2).indices.sort(-1).values
        mu = old.roll(shift, 0)
        wrong = torch.rand(S - 1, 2, 1, generator=generator) < share
        mu = torch.where(wrong, torch.rand(S - 1, 2, 8, generator=generator).topk(2).indices.sort(-1).values, mu)
        out.append(with_experts(row, mu, old))
    return rows.trace(out)


def test_a_record_that_is_a_row_late_agrees_with_its_neighbours() -> None:
    """Routes that are written a row late agree with old's row before, and with equal log-probabilities it is named."""
    late, right = gather(routed(1)), gather(routed(0))
    assert late["row_shift_gain"] > 3 > 1 > right["row_shift_gain"]
    assert right["router_disagreement"] == 0 and right["num_flips"] == 0
    assert diagnose(routed(1)).named[0].name == "route_record"
    assert diagnose(routed(0)).named[0].name == "nothing"


def test_rows_that_the_record_lacks_hide_nothing() -> None:
    """They are named with their share, and beside them what the other rows show; equal bits do not clear them."""
    flipped, exact = replace(routed(0, share=0.2), logp_mu=noisy(0.02).logp_mu), routed(0)
    lacks = torch.arange(len(flipped.tokens) - len(flipped)) % 10 == 0
    for trace, others in ((flipped, ["routing"]), (exact, [])):
        assert trace.experts_mu is not None and diagnose(trace).named[0].name == (others or ["nothing"])[0]
        found = diagnose(replace(trace, experts_mu=trace.experts_mu.masked_fill(lacks[:, None, None], -1)))
        assert [cause.name for cause in found.named] == ["missing_rows", *others]
        assert found.fault is not None and found.fault.name == "missing_rows"
        assert "mu's experts are missing in 10" in "\n".join(found.lines())
    late = routed(1)
    assert late.experts_mu is not None
    found = diagnose(replace(late, experts_mu=late.experts_mu.masked_fill(lacks[:, None, None], -1)))
    assert [cause.name for cause in found.named] == ["route_record"]


def test_the_ratios_of_routes_are_their_formulas() -> None:
    """Differing routers per deviation and KL per differing router are quotients of the clues beside them."""
    flipped = routed(0, share=0.2)
    trace = replace(flipped, logp_mu=noisy(0.2).logp_mu)
    seen, view = gather(trace), View.of(trace)
    assert view.difference_RL is not None and view.differs_n is not None
    rate = (seen["num_flips"] + 1) / view.difference_RL.numel()
    assert seen["router_disagreement"] == pytest.approx(seen["num_flips"] / view.difference_RL.numel())
    assert seen["flips_per_size"] == pytest.approx(rate / seen["size"])
    k3: Tensor = view.d_n.expm1() - view.d_n
    kept = k3.sort().values[: math.ceil(0.995 * len(k3))]
    assert seen["kl_per_flip"] == pytest.approx(kept.mean().item() / rate)
    assert seen["flip_share_of_kl"] == pytest.approx((k3[view.differs_n].sum() / k3.sum()).item())
    assert seen["flip_token_share"] == pytest.approx(int(view.differs_n.sum()) / len(view))


def test_kl_on_tokens_that_nearly_all_differ_proves_nothing() -> None:
    """Where 90% of the tokens have a differing router, the words for routers say that replay must be measured."""
    seen = {"router_disagreement": 0.27, "size": 0.03, "flip_share_of_kl": 0.99}
    assert "replay" not in routers(seen | {"flip_token_share": 0.89})
    assert "90 % of all tokens have such experts" in routers(seen | {"flip_token_share": 0.9})


def test_the_kl_by_first_layer_sums_to_the_kl() -> None:
    """Each token's k3 is counted once, at the first layer whose experts differ, or where none does."""
    flipped = routed(0, share=0.2)
    view = View.of(replace(flipped, logp_mu=noisy(0.2).logp_mu))
    parts = kl_by_first_layer(view)
    assert parts is not None and set(parts) == {NOWHERE, *flipped.layer_numbers}
    assert sum(parts.values()) == pytest.approx(gather(view.trace)["k3_kl"])
    assert view.difference_RL is not None
    is_first_n = (view.difference_RL > 0)[view.row_n][:, 0]
    k3: Tensor = view.d_n.expm1() - view.d_n
    assert parts[flipped.layer_numbers[0]] == pytest.approx((k3[is_first_n].sum() / len(view)).item())
    assert kl_by_first_layer(View.of(EXACT)) is None


@pytest.mark.parametrize(("rate", "noise", "is_routing"), [
    (1.2, 0.0, False), (2.0, 0.0, False), (1.2, 0.3, True), (1.2, None, True), (4.0, 0.0, True), (0.3, 0.3, False),
])  # fmt: skip
def test_routers_that_repeat_their_errors_are_more_than_rounding_only_where_they_are_many(
    rate: float, noise: float | None, is_routing: bool
) -> None:
    """As many differing routers speak for routers of their own where they do not repeat, and not where all repeats."""
    seen = {"flips_per_size": rate, "kl_per_flip": 0.01, "num_flips": 30.0, "size": 0.006, "sure_ratio": 0.6}
    seen |= {"exact_share": 0.0, "k3_kl": 1e-4} | ({} if noise is None else {"noise_share": noise})
    assert (next(iter(weigh(seen))).name == "routing") == is_routing
