"""The laws of block formats and of products in FP8."""

from __future__ import annotations

import torch

from tests.mutants.law import Law, times
from tests.sandbox.engines import test_block_formats as formats
from tests.sandbox.engines import test_defect_chain as chain

SIZES = ({"size": 1.0}, {"size": 2.0**-40}, {"size": 2.0**60})
BLOCKS = ({"form": "mxfp8", "width": 32, "outlier": 1e6}, {"form": "nvfp4", "width": 16, "outlier": 500.0})


def _fp8_trainer() -> None:
    chain.test_an_fp8_trainer_is_an_fp8_engine(chain.make_world(), "fp32")


FORMATS = tuple(
    Law(name, check, dtype=torch.float32)
    for name, check in {
        "scales_are_e8m0": times(formats.test_scales_are_torchs_e8m0),
        "ue8m0_is_the_next_power_of_two": times(
            formats.test_ue8m0_takes_the_next_power_of_two, {"amax": 449.0, "scale": 2.0}, {"amax": 448.0, "scale": 1.0}
        ),
        "mxfp8_is_the_specifications": times(
            formats.test_mxfp8_saturates_as_the_specification_says,
            {"amax": 500.0, "rounded": 448.0},
            {"amax": 0.75, "rounded": 0.75},
        ),
        "fp4_has_eight_magnitudes": times(formats.test_fp4_has_eight_magnitudes),
        "nvfp4_is_as_by_hand": times(formats.test_nvfp4_by_hand),
        "format_errors_are_bounded": times(formats.test_errors_are_within_what_the_formats_have, *SIZES),
        "rounding_twice_is_once": times(formats.test_rounding_twice_is_rounding_once, *SIZES),
        "blocks_have_their_width": times(formats.test_a_block_is_as_wide_as_its_format_says, *BLOCKS),
        "matrices_are_kept_each_by_itself": times(formats.test_what_is_kept_in_the_format_is_chosen),
        "fp8_trainer_is_the_fp8_engine": _fp8_trainer,
    }.items()
)
