"""The routing record: what goes in comes out, and each known way to lose or misplace routes is an error."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from theory.routing.measures import difference_counts
from theory.routing.payloads import pack_record
from theory.routing.record import MISSING, RoutingRecord, index_dtype, narrowed
from theory.streams import stream

LAYERS = (1, 2, 5)


def draw_payloads(seed: int, num_tokens: list[int], L: int, K: int, E: int, num_missing: int = 0) -> list[Tensor]:
    """Random payloads (S - 1, L, K) of distinct ids in random order, with some rows missing."""
    generator = stream(seed, "payloads")
    payloads = []
    for S in num_tokens:
        ids = torch.rand(S - 1, L, E, generator=generator).argsort(dim=-1)[..., :K]
        lost = torch.randperm(S - 1, generator=generator)[:num_missing]
        ids[lost] = MISSING
        payloads.append(ids)
    return payloads


def pack(
    seed: int = 0, num_tokens: tuple[int, ...] = (5, 3, 7), K: int = 2, E: int = 8, **kwargs: int
) -> RoutingRecord:
    """A random record over LAYERS."""
    payloads = draw_payloads(seed, list(num_tokens), len(LAYERS), K, E, **kwargs)
    return pack_record(payloads, num_tokens, LAYERS, E)


sizes = st.lists(st.integers(2, 9), min_size=1, max_size=5)


@given(seed=st.integers(0, 999), num_tokens=sizes, num_missing=st.integers(0, 2), K=st.integers(2, 4))
def test_record_round_trips(seed: int, num_tokens: list[int], num_missing: int, K: int) -> None:
    """Packing keeps every row-layer's set of ids, per response, and padding adds nothing but -1."""
    payloads = draw_payloads(seed, num_tokens, 3, K, 9, num_missing)
    record = pack_record(payloads, num_tokens, LAYERS, 9)
    assert len(record) == len(num_tokens)
    assert record.num_rows_B == [S - 1 for S in num_tokens]
    padded = record.padded(max(num_tokens) + 1)
    for b, payload in enumerate(payloads):
        expected = payload.sort(dim=-1).values.to(torch.int8)
        assert torch.equal(record.rows(b), expected)
        assert torch.equal(padded[b, : len(payload)], expected)
        assert bool((padded[b, len(payload) :] == MISSING).all())
    for i, number in enumerate(LAYERS):
        assert torch.equal(record.layer(number), record.experts[:, i])
    assert record.num_missing_rows == sum(min(num_missing, S - 1) for S in num_tokens)
    assert int(record.row_mask.sum()) == len(record.experts) - record.num_missing_rows


@given(seed=st.integers(0, 999), num_tokens=sizes, data=st.data())
def test_select_then_concat_is_the_record(seed: int, num_tokens: list[int], data: st.DataObject) -> None:
    """Splitting a record at any point, or permuting it there and back, gives the record again."""
    record = pack_record(draw_payloads(seed, num_tokens, 3, 2, 8), num_tokens, LAYERS, 8)
    B = len(num_tokens)
    cut = data.draw(st.integers(0, B))
    order = data.draw(st.permutations(range(B)))
    back = [order.index(b) for b in range(B)]
    for same in (
        RoutingRecord.concat([record.select(range(cut)), record.select(range(cut, B))]),
        record.select(order).select(back),
    ):
        assert torch.equal(same.experts, record.experts)
        assert torch.equal(same.offsets, record.offsets)


@pytest.mark.parametrize(
    ("num_experts", "expected"),
    [
        (1, torch.int8),
        (128, torch.int8),
        (129, torch.int16),
        (256, torch.int16),
        (32768, torch.int16),
        (32769, torch.int32),
    ],
)
def test_ids_are_as_narrow_as_signed_integers_allow(num_experts: int, expected: torch.dtype) -> None:
    """The type holds every id and -1: no id of a model with more than 255 experts wraps (verl #7407), and the largest
    id of 128 experts is valid beside a number of experts that its type does not hold."""
    assert index_dtype(num_experts) == expected
    if num_experts >= 2:
        top = num_experts - 1
        record = pack_record([torch.tensor([[[top, 0]]])], [2], (0,), num_experts)
        assert record.experts.tolist() == [[[0, top]]]
        assert record.nbytes == 2 * expected.itemsize


@pytest.mark.parametrize(
    ("dtype", "top"),
    [
        (torch.uint8, 200), (torch.int8, 120), (torch.uint16, 40_000), (torch.int16, 300), (torch.uint32, 70_000),
        (torch.int32, 70_000), (torch.int64, 70_000),
    ],
)  # fmt: skip
def test_payloads_of_every_integer_type_are_read_by_value(dtype: torch.dtype, top: int) -> None:
    """An id stays what it is in whatever type it came, and one out of range is found there: nothing wraps."""
    payload = torch.tensor([[[top, 3], [5, top]]]).to(dtype)
    record = pack_record([payload], [2], (1,), 100_000, num_decoder_layers=2)
    assert record.experts.tolist() == [[[5, top]]]
    with pytest.raises(ValueError, match=rf"expected expert ids in \[0, {top}\) or -1, got \[5, {top}\]"):
        pack_record([payload], [2], (1,), top, num_decoder_layers=2)


def test_a_part_is_cut_at_once() -> None:
    """Responses, rows and layers cut together are each cut alone, one after the other; the empty ones have no rows."""
    record = pack()
    part = record.part(responses=[2, 0], rows=(1, 4), layers=[5], num_empty=2)
    one_by_one = record.select([2, 0]).part(rows=(1, 4)).part(layers=[5])
    assert torch.equal(part.experts, one_by_one.experts)
    assert part.num_rows_B == [*one_by_one.num_rows_B, 0, 0]
    assert part.layer_numbers == (5,)
    with pytest.raises(ValueError, match=r"expected a response in \[0, 3\), got 3"):
        record.part(responses=[3])


def test_one_trailing_row_is_dropped_and_said() -> None:
    """A payload of S rows loses its last one, with a warning that names both numbers (slime #1045)."""
    payloads = draw_payloads(0, [6, 4], 3, 2, 8)
    long = torch.cat([payloads[1], payloads[1][:1]])
    with pytest.warns(UserWarning, match=re.escape("response 1: 4 rows for 4 tokens")):
        record = pack_record([payloads[0], long], [6, 4], LAYERS, 8)
    assert torch.equal(record.rows(1), payloads[1].sort(dim=-1).values.to(torch.int8))


@pytest.mark.parametrize("num_rows", [0, 3, 6])
def test_any_other_number_of_rows_is_an_error(num_rows: int) -> None:
    """S tokens have S - 1 rows: the message names both numbers and the response."""
    rows = draw_payloads(1, [20], 3, 2, 8)[0][:num_rows]
    with pytest.raises(ValueError, match=f"response 1: expected 4 rows for 5 tokens, got {num_rows}"):
        pack_record([draw_payloads(0, [4], 3, 2, 8)[0], rows], [4, 5], LAYERS, 8)


def test_payload_over_all_decoder_layers_is_cut_by_number() -> None:
    """The dense layers' columns are dropped by layer number, whatever they hold (slime #819, verl #5452)."""
    payload = draw_payloads(0, [6], 6, 2, 8)[0]
    expected = payload[:, list(LAYERS)].sort(dim=-1).values.to(torch.int8)
    payload[:, [0, 3, 4]] = 99
    record = pack_record([payload], [6], LAYERS, 8, num_decoder_layers=6)
    assert record.layer_numbers == LAYERS
    assert torch.equal(record.experts, expected)


def test_layers_are_bound_by_number_not_by_order() -> None:
    """Payload columns named in another order land at their own layers."""
    payload = draw_payloads(0, [6], 3, 2, 8)[0]
    record = pack_record([payload], [6], (5, 1, 2), 8)
    assert torch.equal(record.layer(5), payload[:, 0].sort(dim=-1).values.to(torch.int8))
    with pytest.raises(ValueError, match=r"\[1, 2, 5\], got layer 3"):
        record.layer(3)


@pytest.mark.parametrize("L", [2, 4, 5])
def test_layer_count_that_fits_neither_is_an_error(L: int) -> None:
    """A payload over neither the MoE layers nor all decoder layers names the three numbers."""
    payload = draw_payloads(0, [4], L, 2, 8)
    with pytest.raises(ValueError, match=rf"expected 3 layers \[1, 2, 5\], or all 6 decoder layers, got {L}"):
        pack_record(payload, [4], LAYERS, 8, num_decoder_layers=6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 8], r"response 1, row 2, layer 5: expected expert ids in \[0, 8\) or -1, got \[3, 8\]"),
        ([-2, 4], r"response 1, row 2, layer 5: expected expert ids in \[0, 8\) or -1, got \[-2, 4\]"),
        ([264, 4], r"response 1, row 2, layer 5: expected expert ids in \[0, 8\) or -1, got \[264, 4\]"),
        ([4, 4], r"response 1, row 2, layer 5: expected distinct .* got \[4, 4\]"),
        ([0, 0], r"response 1, row 2, layer 5: expected distinct .* got \[0, 0\]"),
        ([4, -1], r"response 1, row 2, layer 5: expected distinct .* got \[-1, 4\]"),
    ],
)
def test_bad_ids_name_response_row_and_layer(ids: list[int], message: str) -> None:
    """Ids out of range, repeated (zero filling included: verl #4986) or partly missing are found where they are."""
    payloads = draw_payloads(0, [4, 6, 3], 3, 2, 8)
    payloads[1][2, 2] = torch.tensor(ids)
    with pytest.raises(ValueError, match=message):
        pack_record(payloads, [4, 6, 3], LAYERS, 8)


def with_a_layer_of_zeros(K: int) -> list[Tensor]:
    payloads = draw_payloads(0, [4, 6], 3, K, 8, num_missing=1)
    for payload in payloads:
        payload[:, 1] = torch.where(payload[:, 1] == MISSING, MISSING, 0)
    return payloads


ZEROS = r"layer 2: expected routed experts, got id 0 in every slot of all 6"


def test_layer_that_was_never_captured_is_an_error() -> None:
    """A layer of zeros is an unfilled buffer (vLLM #33013, #35623), also where rows are missing."""
    with pytest.raises(ValueError, match=ZEROS):
        pack_record(with_a_layer_of_zeros(K=2), [4, 6], LAYERS, 8)


def test_a_top_1_layer_may_have_chosen_expert_0_throughout() -> None:
    """With one slot a row that chose expert 0 looks like one that was never filled: it is kept, and said."""
    payloads = with_a_layer_of_zeros(K=1)
    with pytest.warns(UserWarning, match=ZEROS):
        record = pack_record(payloads, [4, 6], LAYERS, 8)
    assert record.layer(2).tolist() == torch.cat(payloads)[:, 1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_that_are_no_integers_are_an_error(dtype: torch.dtype) -> None:
    """Ids come as integers or not at all."""
    with pytest.raises(ValueError, match=f"response 0: expected integer expert ids, got {dtype}"):
        pack_record([torch.zeros(3, 3, 2, dtype=dtype)], [4], LAYERS, 8)


def test_a_record_cannot_be_built_invalid() -> None:
    """The constructor checks type, order, range, layers and offsets as `pack` does: no invalid record exists."""
    good = pack()
    rows = len(good.experts)
    unsorted = good.experts.flip(-1)
    half = torch.tensor([[[-1, 5, -1]]], dtype=torch.int8)  # missing by its ends alone
    cases = [
        ((good.experts.long(), good.offsets, LAYERS, 8), "expected ids as torch.int8, got torch.int64"),
        ((unsorted, good.offsets, LAYERS, 8), "row 0, layer 1: expected distinct ascending"),
        ((half, torch.tensor([0, 1]), (0,), 8), r"or -1 in every slot, got \[-1, 5, -1\]"),
        ((good.experts, good.offsets, LAYERS, 3), "expected distinct ascending expert ids in \\[0, 3\\)"),
        ((good.experts, good.offsets, (1, 2), 8), "expected 3 layer numbers for 3 layers of ids, got 2"),
        ((good.experts, good.offsets, (2, 1, 5), 8), r"ascending layer numbers .* got \[2, 1, 5\]"),
        ((good.experts, good.offsets[:-1], LAYERS, 8), f"rise from 0 to {rows} rows, got"),
        ((good.experts, good.offsets.flip(0), LAYERS, 8), f"rise from 0 to {rows} rows, got"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            RoutingRecord(*arguments)


def test_records_that_differ_do_not_join_or_compare() -> None:
    """Layers, slots and experts must agree to concatenate; rows as well to compare (Megatron-LM #217)."""
    record, wide = pack(), pack(K=3)
    with pytest.raises(ValueError, match=r"record 1: expected .*\(1, 2, 5\), 2, 8\) .* got \(\(1, 2, 5\), 3, 8\)"):
        RoutingRecord.concat([record, wide])
    with pytest.raises(ValueError, match=r"expected \[4, 2, 6\] rows per response, got \[4, 2\]"):
        record.check_same_rows(record.select([0, 1]))
    with pytest.raises(ValueError, match="width of at least 6 rows, got 5"):
        record.padded(5)
    with pytest.raises(ValueError, match=r"expected a response in \[0, 3\), got 3"):
        record.select([3])


def test_layers_of_a_stage_are_those_columns() -> None:
    """A pipeline stage's part of a record holds its own layers' ids."""
    record = pack()
    part = record.part(layers=[5, 2])
    assert part.layer_numbers == (2, 5)
    assert torch.equal(part.experts, record.experts[:, [1, 2]])

    assert record.part(layers=[]).experts.shape == (len(record.experts), 0, record.num_slots)
    with pytest.raises(ValueError, match="got layer 3"):
        record.part(layers=[3])


@given(seed=st.integers(0, 999), num_tokens=sizes, width=st.integers(1, 4))
def test_windows_partition_every_response(seed: int, num_tokens: list[int], width: int) -> None:
    """Windows of equal width hold each response's rows once and in order, as sequence-parallel ranks share them."""
    record = pack_record(draw_payloads(seed, num_tokens, 3, 2, 9), num_tokens, LAYERS, 9)
    windows = [record.part(rows=(start, start + width)) for start in range(0, max(num_tokens), width)]
    for b in range(len(record)):
        assert torch.equal(torch.cat([w.rows(b) for w in windows]), record.rows(b))
        assert all(len(w.rows(b)) <= width for w in windows)


@pytest.mark.parametrize("num_experts", [128, 32_768])
def test_the_largest_id_that_a_type_holds(num_experts: int) -> None:
    """Where the number of experts does not fit the ids' type, the largest id is packed, replayed and compared as others
    are; ids out of range are found in wider payloads, and -1 stays missing."""
    top = num_experts - 1
    ids = torch.tensor([[[0, top]], [[MISSING, MISSING]], [[top - 1, top]]])
    record = pack_record([ids], [4], (0,), num_experts)
    assert torch.iinfo(record.experts.dtype).max == top
    assert record.experts.tolist() == ids.tolist()
    other = pack_record([ids.roll(1, 0)], [4], (0,), num_experts)
    assert difference_counts(record, other)[:, 0].tolist() == [1, MISSING, MISSING]
    with pytest.raises(ValueError, match=rf"ids in \[0, {num_experts}\) or -1, got \[0, {num_experts}\]"):
        pack_record([torch.tensor([[[0, num_experts]]])], [2], (0,), num_experts)


def test_wider_ids_of_a_file_are_narrowed_by_value() -> None:
    """Ids in a wider type become the record's own; one that would wrap is an error with both ends of the range."""
    ids = torch.tensor([[[0, 127]], [[MISSING, MISSING]]])
    for dtype in (torch.int16, torch.int64):
        assert torch.equal(narrowed(ids.to(dtype), 128), ids.to(torch.int8))
    assert narrowed(ids.to(torch.int8), 128).dtype == torch.int8
    for bad in (128, 256, -2):
        with pytest.raises(ValueError, match=rf"expected expert ids in \[0, 128\) or -1, got {min(-1, bad)} to"):
            narrowed(torch.cat([ids, torch.tensor([[[0, bad]]])]).to(torch.int16), 128)
