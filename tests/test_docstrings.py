"""House style of docstrings: each begins with a noun or states a law, so that it is a sentence without its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORLDS = ("theory", "lab", "sandbox", "scaled", "firstorder", "tests")
HEADLESS = re.compile(r"(What|How|Which|Who|Whose|Why|When)\b")
"""Words whose clause needs a main clause that a docstring does not have."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, those below a field or a constant included."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        values = (one.value for one in node.body if isinstance(one, ast.Expr))
        yield from ((x.lineno, str(x.value).strip()) for x in values if isinstance(x, ast.Constant))


def faults(source: str) -> list[tuple[int, str]]:
    """Docstrings that begin with a headless clause; `Where A, B` is a law, `Where A` alone is none."""
    found = ((line, text.partition("\n\n")[0]) for line, text in docstrings(source))
    return [one for one in found if HEADLESS.match(one[1]) or (one[1].startswith("Where ") and "," not in one[1])]


def test_no_docstring_is_a_headless_clause() -> None:
    """No docstring of the project begins with What, How, Which and their like, or with Where and no main clause."""
    files = sorted(path for world in WORLDS for path in (ROOT / world).rglob("*.py"))
    assert len(files) > 500
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path in files for line, text in faults(path.read_text())]
    assert not found, "\n".join(found)


def test_faults_are_seen_in_every_place() -> None:
    """A headless docstring is seen below a module, a class, a function and a field, and a law with Where passes."""
    below = '    """Whose it is."""\n    def f(self):\n        """Where it is."""'
    bad = f'"""What."""\nx = 1\n"""How many."""\nclass A:\n{below}'
    assert [line for line, _ in faults(bad)] == [1, 3, 5, 7]
    assert not faults('"""Where A is B, C is D."""\ndef f():\n    """Whether A is B."""\n    x = "What"')
