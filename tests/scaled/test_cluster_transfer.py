"""Laws of values that travel between processes: every bit arrives, integers stay narrow."""

from __future__ import annotations

import torch

from scaled.cluster.transfer import Meter, pack, unpack
from tests.contracts import worlds
from tests.scaled.test_cluster_buckets import same
from theory.contracts import Sampling
from theory.routing.passes import RoutingPlan


def test_rollouts_survive_to_the_bit_and_travel_narrow() -> None:
    """A batch with routes and features arrives as it was, its experts as int8 and its token ids as int32."""
    engine = worlds.rollout_engine("exact", worlds.model())
    rollouts = engine.generate(worlds.prompts(3), Sampling(6, 2, seed=1, num_features=2))
    parcel = pack((rollouts, RoutingPlan("replay", record=rollouts.experts)))
    got, routing = unpack(parcel)
    assert got.responses[0].prompt == rollouts.responses[0].prompt
    for a, b in zip(got.responses, rollouts.responses, strict=True):
        assert (
            same(a.tokens, b.tokens) and same(a.logp_mu, b.logp_mu) and (a.finish, a.version) == (b.finish, b.version)
        )
    assert same(got.experts.experts, rollouts.experts.experts) and same(got.features.logits, rollouts.features.logits)
    assert routing.record is got.experts  # sent once
    types = [entry.dtype for entry in parcel.bucket.entries]
    assert "int8" in types and "int64" not in types
    got.responses[0].tokens.add_(1)  # a copy of its own: writing to it disturbs nobody
    copy, view = (unpack(parcel, shared=is_shared)[0].experts.experts for is_shared in (False, True))
    packed = parcel.bucket.pieces[0].ctypes.data
    place = [tensor.data_ptr() - packed for tensor in (copy, view)]
    assert same(copy, view) and 0 <= place[1] < parcel.bucket.num_bytes
    assert not 0 <= place[0] < parcel.bucket.num_bytes


def test_large_integers_are_not_narrowed() -> None:
    """Integers beyond 32 bits arrive as they were."""
    seeds = torch.tensor([2**40, -(2**62), 3])
    assert torch.equal(unpack(pack(seeds)), seeds)


def test_a_meter_sums_and_starts_anew() -> None:
    """`take` gives the sums since the last `take`."""
    meter = Meter()
    meter.add("a", 1.0)
    meter.add("a", 2.0)
    with meter.seconds("b"):
        pass
    taken = meter.take()
    assert taken["a"] == 3.0 and 0 <= taken["b"] < 1 and meter.take() == {}
