"""Formulas of the site are set as TeX would set them."""

from __future__ import annotations

import pytest

from tests.pages.mathml import spelled_out


@pytest.mark.parametrize(
    ("source", "spelled"),
    [
        (r"\prod_t r_t", r"\prod\limits_t r_t"),
        (r"\sum_{t=1}^T x", r"\sum\limits_{t=1}^T x"),
        (r"\sum_t \nabla\log\pi_t", r"\sum\limits_t \nabla\,\log\,\pi_t"),
        (r"r - 1 - \log r", r"r - 1 - \log\,r"),
        (r"\log\frac{a}{b}", r"\log\,\frac{a}{b}"),
        (r"\log\left(a\right)", r"\log\left(a\right)"),
        (r"\summa_t \logic", r"\summa_t \logic"),
    ],
)
def test_limits_and_spaces_are_those_of_tex(source: str, spelled: str) -> None:
    """A limit stands below its operator, a thin space beside a function's name, but before no bracket."""
    assert spelled_out(source) == spelled
