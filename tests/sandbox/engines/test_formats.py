"""Number formats round as they are defined, and leave alone what they are not for."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.recording import NonFiniteError
from sandbox.engines import StaleWeights, WeightPrecision
from sandbox.engines.defect import kept_weights
from sandbox.engines.formats import (
    FP8_MAX,
    amax_of_blocks,
    amax_of_rows,
    amax_of_tensor,
    round_bf16,
    round_fp8_e4m3,
    round_fp8_saturating,
    round_fp16,
    round_scaled,
)
from tests.contracts import worlds
from theory.streams import stream

FLOATS = st.floats(-1e4, 1e4, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_fp8_error_is_bounded_by_its_format(values):
    """|round(x) - x| <= 2^-4 |x| + half the smallest subnormal step, scaled: e4m3 has 3 mantissa bits."""
    x = torch.tensor(values)
    amax = x.abs().amax()
    scale = (amax / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    error = (round_fp8_e4m3(x, amax) - x).abs()
    # Half of 2^-9, the step of e4m3's subnormals; 1e-6 |x| for the float32 products with the scale.
    assert (error <= x.abs() * (2**-4 + 1e-6) + scale * 2**-10).all()


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_rounding_is_idempotent_and_odd(values):
    """Rounding twice is rounding once, and round(-x) = -round(x), in both formats."""
    x = torch.tensor(values)
    assert torch.equal(round_bf16(round_bf16(x)), round_bf16(x))
    assert torch.equal(round_bf16(-x), -round_bf16(x))
    amax = x.abs().amax()
    assert torch.equal(round_fp8_e4m3(-x, amax), -round_fp8_e4m3(x, amax))


@pytest.mark.parametrize(("form", "largest"), [("int8", 127), ("int4", 7)])
@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_integer_error_is_half_a_step(form, largest, values):
    """|round(x) - x| <= amax / (2 largest), x is a whole number of steps, and levels run from -largest to largest."""
    x = torch.tensor(values)
    amax = x.abs().amax()
    rounded = round_scaled(x, form, amax)
    # A relative 1e-6 for the float32 quotient and product; 1e-37: subnormal amplitudes are rounded to 0.
    assert ((rounded - x).abs() <= amax / (2 * largest) * (1 + 1e-4) + amax * 1e-6 + 1e-37).all()
    if amax > 1e-30:
        levels = rounded / (amax / largest)
        assert levels.abs().max() <= largest + 1e-3 and (levels - levels.round()).abs().max() < 1e-3
    assert torch.equal(round_scaled(-x, form, amax), -rounded)


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_fp16_error_is_bounded_by_its_format(values):
    """|round(x) - x| <= 2^-11 |x|, or half of 2^-24 where fp16 is subnormal."""
    x = torch.tensor(values)
    assert ((round_fp16(x) - x).abs() <= x.abs() * 2**-11 + 2**-25).all()


def test_fp16_overflow_is_an_error():
    """A magnitude beyond fp16 is named, not turned into an infinity that a sampler would meet later; it ends a run and
    a branch as any other number that is not finite does."""
    assert round_fp16(torch.tensor([65504.0])).item() == 65504
    for kind in (OverflowError, NonFiniteError):
        with pytest.raises(kind, match="at most 65504, got 70000"):
            round_fp16(torch.tensor([1.0, -7e4]))


def test_fp8_at_scale_one_saturates_and_flushes():
    """Without a scale 448 is the largest magnitude and 2^-9 the smallest step, as in a cache with k_scale = 1."""
    x = torch.tensor([1e3, -1e3, 448.0, 2**-9, 2**-10, 2**-11, 17.0, 19.0])
    expected = torch.tensor([448.0, -448.0, 448.0, 2**-9, 0.0, 0.0, 16.0, 20.0])
    assert torch.equal(round_fp8_saturating(x), expected)


def test_smaller_scales_keep_smaller_values():
    """A scale per row keeps small rows that a scale per tensor flushes to zero, and a scale per block small blocks."""
    x = torch.tensor([[1000.0, 500.0], [1e-3, 2e-3]])
    assert torch.equal(round_scaled(x, "fp8_e4m3", amax_of_tensor(x))[1], torch.zeros(2))
    assert torch.allclose(round_scaled(x, "fp8_e4m3", amax_of_rows(x))[1], x[1], rtol=2**-4)
    y = torch.tensor([[1000.0, 1e-3], [500.0, 2e-3]])
    assert torch.equal(round_scaled(y, "int8", amax_of_rows(y))[:, 1], torch.zeros(2))
    assert torch.allclose(round_scaled(y, "int8", amax_of_blocks(y, 2, 1))[:, 1], y[:, 1], rtol=1e-2)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_blocks_tile_the_matrix(R, C, num_rows, num_columns):
    """Every element's amax is that of its block, edge blocks included: the definition, entry by entry."""
    x = torch.randn(2, R, C, generator=stream(R * 100 + C, "blocks"))
    amax = amax_of_blocks(x, num_rows, num_columns)
    for r in range(R):
        for c in range(C):
            top, left = r - r % num_rows, c - c % num_columns
            block = x[:, top : top + num_rows, left : left + num_columns]
            assert torch.equal(amax[:, r, c], block.abs().amax(dim=(1, 2)))
    # A block beyond the edges costs no memory of its own; an expert without tokens has no rows.
    assert torch.equal(amax_of_blocks(x, 2**31, 2**31), x.abs().amax(dim=(1, 2), keepdim=True).expand_as(x))
    assert amax_of_blocks(x[:, :0], num_rows, num_columns).shape == (2, 0, C)


@pytest.mark.parametrize("gate", ["qwen3", "mixtral"])
def test_quantised_weights_leave_router_head_norms_and_embedding(gate):
    """FP8 and INT8 round the matrices of attention and experts alone; bf16 rounds every weight."""
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", torch.linspace(0.1, 0.7, 8))
    for name, tensor in [*worlds.training_engine(worlds.model(gate=gate)).named_tensors(), bias]:
        is_large = "_proj" in name or name.endswith(("w1.weight", "w2.weight", "w3.weight"))
        for precision in (WeightPrecision(), WeightPrecision(format="int8"), WeightPrecision(scale="block")):
            assert torch.equal(precision.weights([name], tensor[None])[0], tensor) == (not is_large), name
        is_ones = bool((tensor == 1).all())
        assert torch.equal(WeightPrecision(format="bf16").weights([name], tensor[None])[0], tensor) == is_ones, name


FORMATS = [WeightPrecision(format="bf16"), WeightPrecision(format="fp16")] + [
    WeightPrecision(format=form, scale=scale, block_size=3)
    for form, scale in itertools.product(("fp8_e4m3", "int8"), ("tensor", "channel", "block"))
]


@pytest.mark.parametrize("precision", FORMATS, ids=lambda p: f"{p.format}-{p.scale}")
def test_weights_are_kept_each_by_itself(precision):
    """A weight has the same bits alone and among all others of its shape, in a defect and after another one."""
    named = list(worlds.training_engine(worlds.model(gate="mixtral")).named_tensors())
    for defects in ([precision], [StaleWeights(), precision, WeightPrecision(format="bf16")]):
        together = dict(kept_weights(defects, named))
        assert together.keys() == dict(named).keys()
        for name, tensor in named:
            [(_, alone)] = kept_weights(defects, [(name, tensor)])
            assert torch.equal(together[name], alone), name
            if tensor.dim() == 2:
                in_order = tensor[None]
                for defect in defects:
                    in_order = defect.weights([name], in_order)
                assert torch.equal(alone, in_order[0]), name


def test_a_shape_that_large_and_small_weights_share():
    """Of two weights of one shape in one stack, the router's is left alone."""
    stacked = torch.randn(2, 8, 8, generator=stream(0, "stacked"))
    kept = WeightPrecision().weights(
        ["model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.o_proj.weight"], stacked
    )
    assert torch.equal(kept[0], stacked[0])
    assert torch.equal(kept[1], round_scaled(stacked[1], "fp8_e4m3", amax_of_rows(stacked[1])))


def test_fp8_is_torch_s_cast_and_back():
    """Of every bfloat16, infinities, NaN and zeros of both signs among them, in float32 and in a transposed float64."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(torch.float32).view(256, 256)
    for x in (every, every.double().t()):
        clamped = x.clamp(-448, 448)
        wanted = clamped.to(torch.float8_e4m3fn).to(x.dtype)
        got = round_fp8_saturating(x)
        assert got.dtype == x.dtype and torch.equal(got.isnan(), wanted.isnan()) and int(got.isnan().sum()) == 254
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num()) and torch.equal(got.signbit(), wanted.signbit())
