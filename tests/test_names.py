"""Every name that code reads is bound somewhere in its file.

ruff's F821 and pyright's check of undefined names are off, as shape annotations ("B T") look like such names to them.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALWAYS = {*dir(builtins), "__file__", "__path__"}
FILES = [path for room in ("theory", "lab", "sandbox", "scaled", "firstorder") for path in (ROOT / room).rglob("*.py")]


@pytest.mark.unchecked
def test_every_name_is_bound() -> None:
    assert len(FILES) > 300
    found = {str(path.relative_to(ROOT)): unbound(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_an_unbound_name_is_found() -> None:
    text = "import a.b, c as d\ndef f(x, *, y: 'B T'):\n    for i in x:\n        print(i, d, a, y, z)\n"
    assert unbound(text) == {"z"}


def unbound(text: str) -> set[str]:
    """The names that a file's code reads and no statement of the file binds, whatever its scope."""
    nodes = [*ast.walk(ast.parse(text))]
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return read - ALWAYS - {name for node in nodes for name in _bound(node)}


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield (other or name).split(".")[0]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
