"""A law as mutants meet it: a test of the suite by name, on a few fixed examples, and its verdict.

Nothing is asserted anew here. Hypothesis's tests are called with examples of ours (their inner function), so that a
verdict is the same every time and takes milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _pytest.outcomes import OutcomeException


@dataclass(frozen=True)
class Law:
    """A named check that raises where the law does not hold. `dtype` is the default one that its test runs in."""

    name: str
    check: Callable[[], object]
    dtype: torch.dtype = torch.float64


class Scripted:
    """Stands where Hypothesis's `data` stands: draws these values, one after the other, whatever is asked for."""

    def __init__(self, *values: Any) -> None:
        self._values = iter(values)

    def draw(self, _: Any) -> Any:
        return next(self._values)


def times(test: Callable[..., object], *examples: dict[str, Any]) -> Callable[[], None]:
    """The test on each of these examples (once without arguments if there are none)."""
    function = test.hypothesis.inner_test if hasattr(test, "hypothesis") else test  # type: ignore[attr-defined]

    def check() -> None:
        for example in examples or ({},):
            # Scripted values are used up; a callable makes them afresh.
            function(**{k: v() if k == "data" else v for k, v in example.items()})

    return check


def verdict(law: Law) -> str | None:
    """None where the law holds, else the first line of why not. Warnings are errors, as they are in the suite."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(law.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            law.check()
    # A `pytest.raises` that saw nothing raises what is no Exception.
    except (Exception, OutcomeException) as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        torch.set_default_dtype(before)
    return None
