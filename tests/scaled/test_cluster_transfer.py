"""Laws of what travels between processes: every bit arrives, buckets are bounded, integers stay narrow."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scaled.cluster.transfer import Bucket, Meter, buckets, pack, unpack
from tests.contracts import worlds
from theory.contracts import Sampling
from theory.routing.passes import RoutingPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool)


def random_tensors(seed: int, shapes: list[list[int]], dtypes: list[torch.dtype]) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    found = {}
    for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False)):
        found[f"t{i}"] = (torch.randn(shape, generator=draws) * 50).to(dtype)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every byte (NaN included)."""
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def travelled(bucket: Bucket) -> Bucket:
    """The bucket as Ray hands it out: read-only."""
    data = bucket.data.copy()
    data.flags.writeable = False
    return Bucket(bucket.entries, data)


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8)


@given(st.integers(0, 99), SHAPES, st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8), st.integers(1, 600))
@example(0, [[4, 4], [0]], [torch.float32] * 8, 1)
def test_every_bit_of_every_dtype_arrives_and_buckets_are_bounded(seed, shapes, dtypes, size) -> None:
    """Any tensors, bfloat16 and empty ones included, arrive whole and in order in buckets of at most the size, or of
    one tensor."""
    sent = random_tensors(seed, shapes, dtypes)
    parts = [travelled(bucket) for bucket in buckets(sent.items(), size)]
    got = [item for bucket in parts for item in bucket.tensors()]
    assert [name for name, _ in got] == list(sent)
    assert all(same(tensor, sent[name]) for name, tensor in got)
    assert all(bucket.num_bytes <= size or len(bucket.entries) == 1 for bucket in parts)


def test_tensors_of_a_bucket_are_views_of_it() -> None:
    """A receiver copies nothing: the tensors lie in the bucket's own memory."""
    (bucket,) = buckets(random_tensors(0, [[3], [2, 2]], [torch.float32] * 2).items(), 1000)
    start = bucket.data.ctypes.data
    assert [t.data_ptr() - start for _, t in bucket.tensors()] == [0, 64]


def test_buckets_are_streamed() -> None:
    """A bucket is ready before the tensors of the one after the next are asked for."""
    asked: list[str] = []

    def source():
        for i in range(6):
            asked.append(str(i))
            yield str(i), torch.zeros(64, dtype=torch.uint8)

    stream = buckets(source(), 128)
    next(stream)
    assert asked == ["0", "1", "2"]


def test_buckets_share_their_memory() -> None:
    """All buckets of a stream lie in one piece of memory, that of the largest; a tensor with strides arrives whole."""
    wide = torch.arange(600).reshape(20, 30)
    sent = {"a": torch.ones(64), "b": wide.T, "c": torch.zeros(64), "d": torch.full((64,), 2.0)}
    seen, got = [], {}
    for bucket in buckets(sent.items(), 256):
        seen.append(bucket)
        got |= dict(travelled(bucket).tensors())
    assert len(seen) == 4 and all(same(got[name], tensor) for name, tensor in sent.items())
    # The first is smaller than the second, whose memory all later ones have.
    assert len({bucket.data.ctypes.data for bucket in seen[1:]}) == 1


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
    packed = np.frombuffer(parcel.bucket.data, dtype=np.uint8).ctypes.data
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
