"""Mutants: bugs that the field has had, put into our own code in memory, so that a law can be shown to find them.

An edit recompiles one function with one exact piece of its text replaced and gives the function that code. Whoever
imported the function earlier therefore calls the mutant too, and shape checks around it stay as they are.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType


class StaleMutantError(Exception):
    """A mutant no longer fits the code it was written for; it would be the original under another name."""


@dataclass(frozen=True)
class Edit:
    """In the function `target` ("module:Class.function") the text `old`, which is there exactly once, becomes `new`."""

    target: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """The edited source. StaleMutantError where the text is not there, or there twice."""
        count = source.count(self.old)
        if count != 1:
            raise StaleMutantError(f"{self.target}: expected the text {self.old!r} once, got it {count} times")
        return source.replace(self.old, self.new)


@contextmanager
def edited(target: str, edits: Sequence[Edit]) -> Iterator[None]:
    """Inside, the function runs its code with these edits. StaleMutantError where they no longer fit or do nothing."""
    function = find(target)
    original = function.__code__
    function.__code__ = compiled(function, edits)
    try:
        yield
    finally:
        function.__code__ = original


def compiled(function: FunctionType, edits: Sequence[Edit]) -> CodeType:
    """The function's code with these edits, fit to be put in place of its own."""
    source = textwrap.dedent(inspect.getsource(function))
    changed = source
    for edit in edits:
        changed = edit.apply(changed)
    before, after = ast.parse(source).body[0], ast.parse(changed).body[0]
    assert isinstance(before, ast.FunctionDef)
    assert isinstance(after, ast.FunctionDef)
    if ast.dump(before.args) != ast.dump(after.args):
        raise StaleMutantError(f"{function.__qualname__}: an edit cannot change the signature")
    if _body(before) == _body(after):
        raise StaleMutantError(f"{function.__qualname__}: expected edits that change something in what runs")
    return _code(after, function)


def _body(definition: ast.FunctionDef) -> list[str]:
    """The statements, without the docstring: neither it nor the annotations are anything that runs."""
    has_docstring = ast.get_docstring(definition) is not None
    return [ast.dump(statement) for statement in definition.body[has_docstring:]]


def _code(definition: ast.FunctionDef, function: FunctionType) -> CodeType:
    # Variables of enclosing scopes (`__class__`, for super()) stay free ones if they are arguments of a maker.
    free = function.__code__.co_freevars
    definition.decorator_list = []
    maker = ast.parse(f"def make({', '.join(free)}):\n    return {definition.name}").body[0]
    assert isinstance(maker, ast.FunctionDef)
    maker.body.insert(0, definition)
    module = ast.fix_missing_locations(ast.Module([maker], type_ignores=[]))
    flags = __future__.annotations.compiler_flag
    namespace: dict[str, FunctionType] = {}
    exec(compile(module, f"<mutant of {function.__qualname__}>", "exec", flags, dont_inherit=True), namespace)
    code = namespace["make"](*free).__code__
    if code.co_freevars != free:
        raise StaleMutantError(f"{function.__qualname__}: expected the free variables {free}, got {code.co_freevars}")
    return code


def find(target: str) -> FunctionType:
    """The plain function under that name, without the decorators, descriptors and shape checks around it."""
    module, _, path = target.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    function = inspect.unwrap(found)  # type: ignore[arg-type]
    if not isinstance(function, FunctionType):
        raise StaleMutantError(f"{target}: expected a function, got {function!r}")
    return function


@dataclass(frozen=True)
class Mutant:
    """One historic bug, as it would be in our code.

    `row` is its row in the catalogue (B5.1 to B5.26 for replay, E for exact training, C for the others), `bug` what
    went wrong in one sentence, `killer` the law that must find it, and `also` further laws that the test suite runs on
    it.
    """

    name: str
    row: str
    bug: str
    reference: str
    edits: tuple[Edit, ...]
    killer: str
    also: tuple[str, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, our code has the bug."""
        targets = dict.fromkeys(edit.target for edit in self.edits)
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(edited(target, [edit for edit in self.edits if edit.target == target]))
            yield


@dataclass(frozen=True)
class Absent:
    """A historic bug that has no place in our code to be in, and why."""

    row: str
    bug: str
    reference: str
    reason: str
