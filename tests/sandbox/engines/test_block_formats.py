"""Formats with rounded scales are what their definitions say: by hand, by error bounds, and by torch's own dtypes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandbox.engines import BlockPrecision
from sandbox.engines.block_formats import (
    NVFP4_BLOCK,
    e8m0,
    round_fp4,
    round_fp8_ue8m0,
    round_mxfp8,
    round_nvfp4,
)
from sandbox.engines.formats import amax_of_blocks, amax_of_rows, amax_of_tensor, round_fp8_e4m3
from sandbox.kernels.numerics import EXACT, LARGE_PRODUCTS
from theory.streams import stream

SIZES = st.integers(-100, 100).map(lambda exponent: 2.0**exponent)
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The magnitudes of E2M1, in the order of their codes."""


def matrix(size: float = 1.0, rows: int = 3, columns: int = 80) -> Tensor:
    """Gaussian numbers of this size."""
    return size * torch.randn(rows, columns, generator=stream(0, "block formats"))


def is_e4m3(x: Tensor) -> bool:
    """Whether every number is one of FP8 e4m3."""
    return torch.equal(x.to(torch.float8_e4m3fn).float(), x)


def test_scales_are_torchs_e8m0() -> None:
    """e8m0 is torch's float8_e8m0fnu, code by code; beyond its ends it stays at them."""
    codes = torch.arange(255, dtype=torch.uint8)  # 255 is NaN
    assert torch.equal(e8m0(codes.int() - 127), codes.view(torch.float8_e8m0fnu).float())
    assert e8m0(torch.tensor([-200, 200])).tolist() == [2.0**-127, 2.0**127]


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (448.0, 1.0),
        (448.00003, 2.0),
        (449.0, 2.0),
        (447.0, 1.0),
        (224.0, 0.5),
        (225.0, 1.0),
        (1.0, 2**-8),
        (3.5, 2**-7),
    ],
)
def test_ue8m0_takes_the_next_power_of_two(amax: float, scale: float) -> None:
    """The scale is 2^ceil(log2(amax / 448)): half of the scale's step beside amax is kept or lost as that says."""
    step = scale * 2**-9  # e4m3's smallest number, times the scale
    x = torch.tensor([[amax, step, step / 2, 1.5 * step]])
    rounded = round_fp8_ue8m0(x, amax_of_rows(x))[0]
    assert scale == 2.0 ** math.ceil(math.log2(amax / 448))
    assert rounded[1:].tolist() == [step, 0.0, 2 * step]  # ties go to the even code
    assert rounded[0] == (torch.tensor(amax) / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    ("amax", "rounded"), [(448.0, 448.0), (500.0, 448.0), (511.0, 448.0), (512.0, 512.0), (255.0, 224.0), (0.75, 0.75)]
)
def test_mxfp8_saturates_as_the_specification_says(amax: float, rounded: float) -> None:
    """The exponent of amax less 8 is the scale's: from 448 to 512 scales amax becomes 448 of them."""
    x = torch.zeros(1, 40)
    x[0, 3], x[0, 39] = amax, 2.0**-20
    out = round_mxfp8(x)[0]
    # The second block, of 8, has a scale of its own.
    assert out[3] == rounded and out[39] == 2.0**-20 and out.count_nonzero() == 2


def test_fp4_has_eight_magnitudes() -> None:
    """Nearest of E2M1's numbers, ties to the even code, beyond 6 to 6, signs kept: by the table."""
    table = torch.tensor(FP4)
    assert torch.equal(round_fp4(table), table) and torch.equal(round_fp4(-table), -table)
    for code, (low, high) in enumerate(itertools.pairwise(FP4)):
        middle = torch.tensor((low + high) / 2)
        assert round_fp4(middle) == FP4[code + code % 2]
        assert round_fp4(middle * 0.999) == low and round_fp4(middle * 1.001) == high
    assert round_fp4(torch.tensor([6.5, -100.0])).tolist() == [6.0, -6.0]


def test_nvfp4_by_hand() -> None:
    """Blocks whose scales are 448, 1, 1.125 (from 1.1) and too small to be kept."""
    x = torch.zeros(1, 64)
    x[0, :3] = torch.tensor([6.0, 3.1, -0.2]) * 448
    x[0, 16:24] = torch.tensor(FP4)
    x[0, 32:34] = torch.tensor([6.6, 1.0])
    x[0, 48] = 6 * 2.0**-10
    out = round_nvfp4(x, amax_of_tensor(x))[0]
    assert out[:3].tolist() == [6.0 * 448, 3.0 * 448, -0.0] and torch.equal(out[16:24], x[0, 16:24])
    assert out[32:34].tolist() == [6 * 1.125, 1.125] and not out[48:].any()


@given(SIZES)
def test_errors_are_within_what_the_formats_have(size: float) -> None:
    """FP8: half of the last of 4 bits, or of the scale's step; MXFP8: an eighth where it saturates; FP4: a fifth."""
    x, tiny = matrix(size), 1 + 1e-6
    amax = amax_of_rows(x)
    scale = 2.0 ** torch.ceil(torch.log2(amax.double() / 448)).clamp(-127)
    assert ((round_fp8_ue8m0(x, amax) - x).abs() <= (x.abs() * 2**-4).maximum(scale * 2**-10) * tiny).all()
    block = amax_of_blocks(x, 1, 32).double()
    scale = 2.0 ** (torch.floor(torch.log2(block)) - 8)
    largest = torch.where(x.abs() > 448 * scale, 2**-3, 2**-4)
    assert ((round_mxfp8(x) - x).abs() <= (x.abs() * largest).maximum(scale * 2**-10) * tiny).all()
    # A block's scale is off by 2^-4 of itself at most; relative to it a number has a step of 1/2, 1 or 2.
    scale = amax_of_blocks(x, 1, NVFP4_BLOCK) / 6 * (1 + 2**-4)
    assert ((round_nvfp4(x, amax_of_tensor(x)) - x).abs() <= (x.abs() / 5).maximum(scale / 4) * tiny).all()


@given(SIZES)
def test_rounding_twice_is_rounding_once(size: float) -> None:
    """decode(encode(x)) is kept as it is, and round(-x) = -round(x); a power of two goes through."""
    x = matrix(size)
    ue8m0 = round_fp8_ue8m0(x, amax_of_rows(x))
    assert torch.equal(round_fp8_ue8m0(ue8m0, amax_of_rows(ue8m0)), ue8m0)
    assert torch.equal(round_mxfp8(round_mxfp8(x)), round_mxfp8(x))
    nvfp4 = round_nvfp4(x, amax_of_tensor(x))
    # The float32 scale is no power of two: quotients carry a rounding.
    assert torch.allclose(round_nvfp4(nvfp4, amax_of_tensor(nvfp4)), nvfp4, rtol=1e-6, atol=0)
    for once in (
        lambda x: round_fp8_ue8m0(x, amax_of_rows(x)),
        round_mxfp8,
        lambda x: round_nvfp4(x, amax_of_tensor(x)),
    ):
        assert torch.equal(once(-x), -once(x)) and torch.equal(once(4 * x), 4 * once(x))
        assert not once(torch.zeros(2, 40)).any()


def test_what_is_kept_is_an_element_times_a_scale() -> None:
    """Divided by a power of two a block is in e4m3; float scales lose a value that UE8M0 keeps, and the other way."""
    x = matrix()
    scale = 2.0 ** torch.ceil(torch.log2(amax_of_rows(x) / 448))
    assert is_e4m3(round_fp8_ue8m0(x, amax_of_rows(x)) / scale)
    scale = 2.0 ** (torch.floor(torch.log2(amax_of_blocks(x, 1, 32))) - 8)
    assert is_e4m3(round_mxfp8(x) / scale)
    fp8 = round_fp8_e4m3(x, amax_of_rows(x))
    assert not torch.equal(fp8, round_fp8_ue8m0(x, amax_of_rows(x)))


@pytest.mark.parametrize(
    ("form", "width", "outlier"), [("fp8_ue8m0", 128, 1e6), ("mxfp8", 32, 1e6), ("nvfp4", 16, 500.0)]
)
def test_a_block_is_as_wide_as_its_format_says(form: str, width: int, outlier: float) -> None:
    """An outlier among activations changes the numbers of its block alone (NVFP4's largest number is elsewhere).

    With powers of two as scales most keep their bits until they are subnormal: there the outlier has to be large.
    """
    x = matrix(columns=256)
    x[0, -1] = 2 * outlier
    other = x.clone()
    other[1, width] = outlier
    inputs = BlockPrecision(format=form, of="activations").numerics(torch.Generator())
    changed = (inputs.activation(x, "qkv") != inputs.activation(other, "qkv")).nonzero()
    assert set(changed[:, 0].tolist()) == {1}
    assert width <= int(changed[:, 1].min()) and int(changed[:, 1].max()) < 2 * width and len(changed) > width // 2
    assert all(torch.equal(inputs.activation(x, site), x) == (site not in LARGE_PRODUCTS) for site in ("o", "router"))
    batched = inputs.activation(x.reshape(1, 3, 256), "qkv")
    assert torch.equal(batched[0], inputs.activation(x, "qkv"))


def test_what_is_kept_in_the_format_is_chosen() -> None:
    """`of` says whether weights, activations or both are rounded; a matrix's float32 scale is its own."""
    name, W = ["model.layers.0.self_attn.o_proj.weight"] * 2, torch.stack([matrix(), matrix(100.0)])
    for form in ("fp8_ue8m0", "mxfp8", "nvfp4"):
        alone = torch.cat([BlockPrecision(format=form).weights(name[:1], W[i : i + 1]) for i in range(2)])
        assert torch.equal(BlockPrecision(format=form).weights(name, W), alone) and not torch.equal(alone, W)
        assert BlockPrecision(format=form, of="activations").weights(name, W) is W
        assert BlockPrecision(format=form, of="weights").numerics(torch.Generator()) is EXACT
    tiles = BlockPrecision(format="fp8_ue8m0").weights(name, W)
    assert torch.equal(tiles, round_fp8_ue8m0(W, amax_of_blocks(W, 128, 128)))
    assert BlockPrecision(format="nvfp4").words == "block precision nvfp4"
    assert BlockPrecision(of="weights").words == "block precision mxfp8 weights"
