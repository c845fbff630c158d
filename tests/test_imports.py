"""No import runs in a circle: neither between files nor between the rooms of a folder, imports for types included.

The order of the rooms is import-linter's to check (pyproject.toml).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

PACKAGES = ("theory", "lab", "sandbox", "scaled", "firstorder")


def imports_of(*packages: str) -> dict[str, set[str]]:
    """Each module and the modules that it imports anywhere: at its top, in a function, under TYPE_CHECKING."""
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=False)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def rooms(imports: Mapping[str, Collection[str]]) -> Iterator[dict[str, set[str]]]:
    """For every folder its files and subfolders, and which of them import which, all that is in them counted."""
    for folder in {name.rpartition(".")[0] for name in imports} - {""}:
        depth, found = folder.count(".") + 2, {}
        for name, imported in imports.items():
            if name.startswith(f"{folder}."):
                room = _cut(name, depth)
                inside = {_cut(other, depth) for other in imported if other.startswith(f"{folder}.")}
                found.setdefault(room, set()).update(inside - {room})
        yield found


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth])


def circle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """A circle among them, from a module back to itself; empty where there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return imports_of(*PACKAGES)


def test_no_files_import_each_other(imports: dict[str, set[str]]) -> None:
    """Whatever file one starts from, its imports never lead back to it."""
    assert len(imports) > 300
    assert circle(imports) == []


def test_no_rooms_import_each_other(imports: dict[str, set[str]]) -> None:
    """The same between the files and subfolders of every folder."""
    found = list(rooms(imports))
    assert {"sandbox.kernels", "sandbox.run"} <= {room for one in found for room in one}
    assert [way for one in found if (way := circle(one))] == []


TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}.a\n"


@pytest.mark.parametrize(
    ("files", "between_files"),
    [
        ({"a.py": "import {}.b", "b.py": TYPES}, True),
        ({"a.py": "def f():\n    import {}.b", "b.py": "import {}.a"}, True),
        ({"low/x.py": "import {}.high.y", "low/z.py": "", "high/y.py": "import {}.low.z"}, False),
    ],
)
def test_a_circle_is_found(
    files: dict[str, str], between_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One closed by an import for types, one by an import in a function, and one that only folders make."""
    package = "looped"
    for name, text in files.items():
        path = tmp_path / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{}", package))
        for folder in (path.parent, tmp_path / package):
            (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    imports = imports_of(package)
    assert bool(circle(imports)) == between_files
    assert any(circle(one) for one in rooms(imports))
