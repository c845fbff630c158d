"""The comparison of a push with the model, before the engine is touched.

vLLM leaves a missing weight uninitialised, with a warning at most.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lab.hf import misfits, misshapen
from scaled.vllm_engine.quantize import Sent


def check_weights(given: Mapping[str, Tensor], repeated: list[str], expected: Mapping[str, Sent]) -> None:
    """Raises ValueError that names the missing, unexpected, repeated and misshapen tensors of a push."""
    wrong = (_misfit(name, expected[name], tensor) for name, tensor in given.items() if name in expected)
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "repeated": repeated,
        "misshapen": [told for told in wrong if told],
    }
    if found := misfits(problems):
        raise ValueError(f"load_weights: weights do not fit the model: {found}")


def _misfit(name: str, expected: Sent, tensor: Tensor) -> str | None:
    if expected.dtype is None:
        return misshapen(name, expected.shape, tensor)
    if tuple(tensor.shape) == tuple(expected.shape) and tensor.dtype == expected.dtype:
        return None
    wanted, got = (f"{tuple(one.shape)} {str(one.dtype)[6:]}" for one in (expected, tensor))
    return f"{name} (expected {wanted}, got {got})"
