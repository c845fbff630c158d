"""docs/architecture.md is the one map of the project: it names every folder that there is, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PACKAGES = ("theory", "lab", "sandbox", "scaled", "firstorder")


def named(text: str) -> Iterator[str]:
    """The folders that a tree of the page names: lines that begin with `name/`, inside those above them."""
    above: list[tuple[int, str]] = []
    for indent, name in re.findall(r"^( *)([\w.]+)/(?= |$)", text, re.MULTILINE):
        above = [entry for entry in above if entry[0] < len(indent)]
        above.append((len(indent), name))
        yield "/".join(name for _, name in above)


def section(title: str) -> str:
    """The page's part under that heading."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/architecture.md has no section {title}"
    return found[1]


def folders(place: Path, marker: str) -> set[str]:
    """Every folder below that holds such a file itself, by its path from there."""
    return {str(file.parent.relative_to(place)) for file in place.rglob(marker) if file.parent != place}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_names_every_folder_of_a_package(package: str) -> None:
    """Each package's tree has a line for each of its packages, at every depth, and names none that is not there."""
    assert set(named(section(f"{package}/"))) == folders(ROOT / package, "__init__.py")


def test_the_map_names_what_stands_beside_the_packages() -> None:
    """The folders of recipes, and those of the tests that are about no one package."""
    tree = set(named(section("Beside the packages")))
    recipes = {f"configs/{name}" for name in folders(ROOT / "configs", "*.yaml")}
    own = {f"tests/{name}" for name in folders(ROOT / "tests", "*.py") if name.split("/")[0] not in PACKAGES}
    assert {name for name in tree if name.startswith(("configs/", "tests/"))} == recipes | own


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_lives_there(package: str) -> None:
    """The `__init__` of every folder of code begins with a docstring."""
    for name in (".", *folders(ROOT / package, "__init__.py")):
        file = ROOT / package / name / "__init__.py"
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{file} has no docstring"
