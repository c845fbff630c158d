"""A push is compared with the model before the engine is touched.

vLLM takes a name that is missing for uninitialised memory, with a warning at most.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from scaled.weight_names import Shape


def check_weights(given: Mapping[str, Tensor], repeated: list[str], expected: Mapping[str, Shape]) -> None:
    """Raises ValueError that names the missing, unexpected, repeated and misshapen weights of a push."""
    problems = {
        "missing": [name for name in expected if name not in given],
        "unexpected": [name for name in given if name not in expected],
        "repeated": repeated,
        "misshapen": [
            f"{name} (expected {expected[name]}, got {tuple(tensor.shape)} {str(tensor.dtype)[6:]})"
            for name, tensor in given.items()
            if name in expected and (tuple(tensor.shape) != expected[name] or not tensor.is_floating_point())
        ],
    }
    found = "; ".join(_listed(kind, names) for kind, names in problems.items() if names)
    if found:
        raise ValueError(f"load_weights: weights do not fit the model: {found}")


def _listed(kind: str, names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{kind} {', '.join(names[:limit])}{more}"
