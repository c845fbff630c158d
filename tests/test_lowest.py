"""The constraints of `make test-lowest` are the bounds that pyproject.toml states."""

from __future__ import annotations

from packaging.requirements import Requirement

from tests.lowest import PYPROJECT, lowest

PROJECT = """
[project]
dependencies = ["torch>=2.11,<2.14", "numpy>=2", "huggingface_hub"]
[project.optional-dependencies]
dev = ["pytest>=8.4", "ruff==0.17.*", "mine[data]"]
data = ["numpy>=2.10", "datasets>=4.6"]
reproduce = ["numpy>=2.9"]
"""


def test_of_several_bounds_the_highest_holds() -> None:
    assert lowest(PROJECT) == {"numpy": "2.10", "pytest": "8.4", "datasets": "4.6"}


def test_every_release_named_is_one_that_the_project_allows() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    bounds = lowest(text)
    lines = [line for line in text.splitlines() if line.startswith('    "') and ">=" in line]
    stated = [Requirement(line.split('"')[1]) for line in lines]
    assert {one.name for one in stated} - {"torch"} <= bounds.keys()
    assert all(bounds[one.name] in one.specifier for one in stated if one.name in bounds)
