"""Laws of buckets of named tensors: every bit arrives, sizes are bounded, and nothing is copied without need."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from scaled.cluster import buckets as module
from scaled.cluster.buckets import AS_IT_LIES, Bucket, Staging, buckets
from scaled.cluster.rank_group import RankActor
from scaled.cluster.transfer import pack, unpack
from scaled.cluster.weights import converted, unchanged

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
    pieces = tuple(piece.copy() for piece in bucket.pieces)
    for piece in pieces:
        piece.flags.writeable = False
    return Bucket(bucket.entries, pieces)


@pytest.fixture(params=[AS_IT_LIES, 16], ids=["small tensors copied", "most as they lie"])
def as_it_lies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes are copied into a bucket; with the other bound kept ones are pieces of it as they lie."""
    monkeypatch.setattr(module, "AS_IT_LIES", request.param)


SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8)
DTYPE_LISTS = st.lists(st.sampled_from(DTYPES), min_size=8, max_size=8)


@pytest.mark.usefixtures("as_it_lies")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the same bound for all examples
@given(st.integers(0, 99), SHAPES, DTYPE_LISTS, st.integers(1, 600), st.booleans())
@example(0, [[4, 4], [0]], [torch.float32] * 8, 1, True)
def test_every_bit_of_every_dtype_arrives_and_buckets_are_bounded(seed, shapes, dtypes, size, are_kept) -> None:
    """Any tensors, bfloat16 and empty ones included, arrive whole and in order in buckets of at most the size, or of
    one tensor."""
    sent = random_tensors(seed, shapes, dtypes)
    parts = [travelled(bucket) for bucket in buckets(sent.items(), size, are_kept)]
    got = [item for bucket in parts for item in bucket.tensors()]
    assert [name for name, _ in got] == list(sent)
    assert all(same(tensor, sent[name]) for name, tensor in got)
    assert all(bucket.num_bytes <= size or len(bucket.entries) == 1 for bucket in parts)


def test_tensors_of_a_bucket_are_views_of_it() -> None:
    """A receiver copies nothing: the tensors lie in the bucket's own memory."""
    (bucket,) = buckets(random_tensors(0, [[3], [2, 2]], [torch.float32] * 2).items(), 1000)
    start = bucket.pieces[0].ctypes.data
    assert [t.data_ptr() - start for _, t in bucket.tensors()] == [0, 64]


def test_a_large_tensor_that_is_kept_is_not_copied() -> None:
    """It is a piece in its own memory, so that the store's copy is the only one; with strides it is copied whole.
    One that nobody keeps is copied at once, so that its memory is free for the next."""
    large = torch.arange(2 * AS_IT_LIES, dtype=torch.uint8).reshape(2, -1)
    sent = {"small": torch.ones(3), "large": large, "strided": large.T, "none": torch.ones(0)}
    (bucket,) = buckets(sent.items(), 2**20, are_kept=True)
    got = dict(bucket.tensors())
    assert all(same(got[name], tensor) for name, tensor in sent.items())
    assert got["large"].data_ptr() == large.data_ptr() and same(bucket.tensor("large"), large)
    assert [len(piece) for piece in bucket.pieces] == [64 + large.nbytes, large.nbytes]
    assert bucket.num_bytes == 64 + 2 * large.nbytes
    parcel = pack({"large": large, "small": torch.ones(3)})
    assert parcel.bucket.pieces[1].ctypes.data == large.data_ptr()
    assert unpack(parcel)["large"].data_ptr() != large.data_ptr()  # the receiver's own
    assert len(next(buckets(sent.items(), 2**20)).pieces) == 1


def test_weights_that_nobody_converts_are_sent_as_they_lie() -> None:
    """A rank keeps them; those that it converts are copied as they are made."""
    weights = {"a": torch.ones(AS_IT_LIES), "b": torch.zeros(AS_IT_LIES)}
    (own,) = converted(weights.items(), 2**20, unchanged)
    assert [piece.ctypes.data for piece in own.pieces[1:]] == [weight.data_ptr() for weight in weights.values()]
    (made,) = converted(weights.items(), 2**20, lambda named: ((name, 2 * weight) for name, weight in named))
    assert len(made.pieces) == 1 and torch.equal(made.tensor("a"), 2 * weights["a"])


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
    """Copies of all buckets of a stream lie in one piece of memory, the largest's; a tensor with strides arrives whole.
    A process that keeps the memory has it for its next stream, too."""
    wide = torch.arange(600).reshape(20, 30)
    sent = {"a": torch.ones(64), "b": wide.T, "c": torch.zeros(64), "d": torch.full((64,), 2.0)}
    seen, got = [], {}
    staging = Staging()
    for bucket in buckets(sent.items(), 256, staging=staging):
        seen.append(bucket)
        got |= dict(travelled(bucket).tensors())
    assert len(seen) == 4 and all(same(got[name], tensor) for name, tensor in sent.items())
    # The first is smaller than the second, whose memory all later ones have.
    again = next(buckets(sent.items(), 256, staging=staging))
    assert len({bucket.pieces[0].ctypes.data for bucket in [*seen[1:], again]}) == 1


def test_a_bucket_has_the_same_bytes_in_any_memory() -> None:
    """The gaps between its tensors are zero, also where the memory held another bucket before."""
    sent, staging = {"a": torch.ones(3), "b": torch.ones(5)}, Staging()
    staging.room(256)[:] = 255
    one, other = (next(buckets(sent.items(), 256, staging=memory)).pieces[0] for memory in (staging, Staging()))
    assert one.tobytes() == other.tobytes() and len(one) == 64 + 20


def test_a_rank_keeps_the_memory_of_its_copies() -> None:
    """The next push copies to where the last one did."""
    rank = RankActor("")  # no file for its output
    rank.rank = SimpleNamespace(export=lambda folded: {"a": torch.arange(9.0)}.items())
    first, second = (next(rank.export(64, False, lambda named: named)) for _ in range(2))
    assert isinstance(first, Bucket) and isinstance(second, Bucket)
    assert first.pieces[0].ctypes.data == second.pieces[0].ctypes.data
