"""Torch files of several frameworks, read without running their code (`weights_only`); NumPy arrays are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.files import RecordError, disk_errors

# Unpickling an array needs only these names: the array and dtype classes, `_reconstruct`, and the dtype's own class.
_SAFE = [np.ndarray, np.dtype, np.empty(0).__reduce__()[0], *{type(np.dtype(t)) for t in "bhilqBHILQfd"}]


def content_of(path: Path) -> Mapping[str, Any]:
    """The dictionary in a torch file; ValueError for anything else, and for objects whose code would have to run."""
    try:
        # Opened separately: an OSError inside torch.load is from a torn file (a seek past its end), not from the disk.
        with disk_errors(path, "read"):
            file = path.open("rb")
        with file, torch.serialization.safe_globals(_SAFE):
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
    return content
