"""The named shapes: as many parameters as their makers publish."""

from __future__ import annotations

import math

import pytest

from scaled.model_shape import SHAPES, load_shape

# All parameters and those of a token, in 1e9, with as many digits as published, and the weights that the second number
# leaves out of ours, which leaves out none.
PUBLISHED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # Model card; "3.3B activated" counts the embedding, and is 3.35 cut and not rounded.
    "qwen3-30b-a3b": ("30.5", "3.3", ()),
    # Model card: "235B in total and 22B activated", with the embedding or without.
    "qwen3-235b-a22b": ("235", "22", ()),
    # Its README_WEIGHTS.md: "671B" and "36.6B (including 0.9B for the output Head)", without the module that predicts
    # the token after the next (11.5B of its own), which is neither trained nor counted here.
    "deepseek-v3": ("671", "36.6", ("embedding",)),
    # Model card: "1T" and "32B"; the tensors of its files have 1,026,408,232,448 numbers, 60 x 384 of them biases of
    # the choice of experts, which are buffers. The report's 1.04T is more than the files hold.
    "kimi-k2": ("1026.408209408", "32", ("embedding",)),
    # Model card: 16B; arXiv 2502.16982: 2.24B activated (of 15.29B), which leaves out embedding and head.
    "moonlight-16b-a3b": ("16", "2.24", ("embedding", "head")),
    # arXiv 2409.02060: 6.9B and 1.3B.
    "olmoe-1b-7b": ("6.9", "1.3", ()),
}


@pytest.mark.parametrize("name", sorted(file.stem for file in SHAPES.glob("*.json")))
def test_parameters_are_those_published(name: str) -> None:
    """Every named shape has its published numbers, rounded or cut to their digits."""
    shape, (whole, active, left_out) = load_shape("nowhere", name), PUBLISHED[name]
    without = sum(math.prod(shape.outer()[part].shape) for part in left_out)
    for number, published in ((shape.num_parameters, whole), (shape.num_active_parameters - without, active)):
        unit = 10 ** (9 - len(published.partition(".")[2]))
        assert round(float(published) * 1e9 / unit) in (round(number / unit), number // unit)
