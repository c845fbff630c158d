"""Torch files of several frameworks, read without running their code (`weights_only`).

NumPy arrays and scalars of bools, integers and floats are allowed.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.files import RecordError, disk_errors

_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_SCALAR: Any = np.float64(0).__reduce__()[0]


def _scalar(dtype: np.dtype, data: bytes) -> np.generic:
    """NumPy's scalar of these bytes; UnpicklingError if it is no bool, integer or float."""
    # A forged dtype of objects would have `data` stand for an object, or for its address.
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biuf" or not isinstance(data, bytes):
        raise pickle.UnpicklingError(f"expected a number's bytes, got {type(data).__name__} of {dtype}")
    return _SCALAR(dtype, data)


# Unpickling needs only these names: the array and dtype classes, the dtypes' own classes, `_reconstruct` (of arrays)
# and `scalar`, whose module NumPy 1 calls numpy.core.
_SAFE = [
    np.ndarray, np.dtype, *{type(np.dtype(t)) for t in "?bhilqBHILQefd"},
    *((call, f"{module}.multiarray.{name}") for module in ("numpy._core", "numpy.core")
      for call, name in ((_RECONSTRUCT, "_reconstruct"), (_scalar, "scalar"))),
]  # fmt: skip


MOST_SPREAD = 2**28
"""Bytes up to which a tensor may be larger than its storage."""


def content_of(path: Path) -> Mapping[str, Any]:
    """The dictionary in a torch file; ValueError for anything else, and for objects whose code would have to run.

    Its tensors are dense, on the CPU and, beyond MOST_SPREAD, no larger than their storage; ValueError names the entry
    of another.
    """
    try:
        # Opened separately: an OSError inside torch.load is from a torn file (a seek past its end), not from the disk.
        with disk_errors(path, "read"):
            file = path.open("rb")
        # torch 2.14 warns of sparse tensors, which are refused below.
        with file, torch.serialization.safe_globals(_SAFE), warnings.catch_warnings(action="ignore"):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except RecordError:
        raise
    except Exception as error:  # for a torn file torch raises whatever its unpickler runs into
        wanted, got = "a torch file", " ".join(str(error).split())[:80] or type(error).__name__
        if type(error).__module__ in ("_pickle", "pickle"):
            wanted, got = "only tensors, arrays, numbers and text", "other objects: not loaded"
        raise ValueError(f"expected {wanted}, got {got}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"expected slime's samples or rollout_data, or miles's policy loss, got {type(content).__name__}"
        )
    for place, tensor in _tensors(content):
        if (odd := _odd(tensor)) is not None:
            raise ValueError(f"{place}: expected a dense CPU tensor no larger than its storage, got {odd}")
    return content


def _odd(tensor: torch.Tensor) -> str | None:
    """The property of a tensor that keeps its values from being read; None for a plain one."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a nested one" if tensor.is_nested else f"one of layout {tensor.layout}"
    if tensor.device.type != "cpu":
        return f"one on {tensor.device}"
    # Strides of 0 let a file of a few bytes stand for more values than fit into memory; few are a reward given to each
    # token.
    size, stored = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size <= max(stored, MOST_SPREAD):
        return None
    return f"one of {size:,} bytes in {stored:,}; save tensor.contiguous()"


def _tensors(content: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in nested dictionaries and sequences, with its dotted place."""
    # A stack, as a file may nest deeper than Python recurs; `seen`, as a list may hold itself.
    waiting, seen = [("", content)], set[int]()
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield place.removeprefix("."), value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            inner = list(value.items() if isinstance(value, dict) else enumerate(value))
            waiting += ((f"{place}.{key}", each) for key, each in inner[::-1])
