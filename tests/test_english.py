"""Laws of the project's English that a machine can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("theory", "lab", "sandbox", "scaled", "firstorder", "tests")
HEADLESS = ("What", "How", "When", "Which", "Who", "Whose", "Why")


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below a constant or a field included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def _is_headless(text: str) -> bool:
    """Whether it begins with a clause alone; `Where A is B, C is D` has its main clause behind a comma."""
    first, _, rest = text.partition("\n\n")[0].partition(" ")
    return first in HEADLESS or (first == "Where" and "," not in rest)


def test_a_docstring_begins_with_its_noun() -> None:
    """No docstring begins with a clause that has no head, such as one on what a function does: it names the thing."""
    found = []
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    for path in files:
        texts = _texts(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{path}:{line}: {text[:60]}" for line, text in texts if _is_headless(text)]
    assert len(files) > 500 and found == []


COUNTED = r"\b(?:nats|bytes|experts|choices|scalar|colour|backward|seconds|\|\| \w+\))"
PER = re.compile(COUNTED + r" an? (?:token|step|row|layer|response|prompt|rank|run|seed|second|element|update)\b")


def test_rates_say_per() -> None:
    """No text says a counted noun, then `a token` or `a row`, where a rate is meant: it says `per`."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    files += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    found = [f"{path}: {match[0]}" for path in files for match in PER.finditer(path.read_text(encoding="utf-8"))]
    assert found == []


BLOCKS = {"ModelBlock", "TrainingBlock"}
"""Config blocks that every world has under one key, each with fields of its own."""


def test_a_class_has_a_name_of_its_own() -> None:
    """No two public classes of the packages share a name: one word names one thing (docs/notation.md)."""
    places: dict[str, list[str]] = {}
    for folder in FOLDERS[:-1]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(files) > 1 and name not in BLOCKS}
    assert len(places) > 500 and shared == {}
