"""Torch files of several frameworks, read without running code from them (`weights_only`); NumPy arrays are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.files import RecordError, disk_errors

# An unpickled array needs these two functions and its type, and no other name.
_SAFE = [np.ndarray, np.dtype, np.empty(0).__reduce__()[0], *{type(np.dtype(t)) for t in "bhilqBHILQfd"}]


def content_of(path: Path) -> Mapping[str, Any]:
    """The dictionary in a torch file; ValueError for any other thing, and for objects whose code would have to run."""
    try:
        # Opened apart: an OSError of torch's own is about a torn file, which seeks to nowhere.
        with disk_errors(path, "read"):
            file = path.open("rb")
        with file, torch.serialization.safe_globals(_SAFE):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except RecordError:
        raise
    except Exception as error:  # of a torn file torch raises whatever its unpickler stumbles over
        wanted, got = "a torch file", " ".join(str(error).split())[:80] or type(error).__name__
        if type(error).__module__ in ("_pickle", "pickle"):
            wanted, got = "tensors, arrays, numbers and text alone", "other objects: not loaded"
        raise ValueError(f"expected {wanted}, got {got}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"expected slime's samples or rollout_data, or miles's policy loss, got {type(content).__name__}"
        )
    return content
