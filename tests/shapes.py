"""The shapes and types of calls, checked a few times a test, under the import hook of pyproject.toml's `addopts`.

jaxtyping and beartype look at every argument and result, which takes longer than a small model's own work. A wrong
annotation is wrong within a few calls: in each test, every function's first calls are checked, and the rest run as they
do outside of pytest.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jaxtyping

CALLS = 3
"""Calls of one function that a test checks."""


class _Now:
    """The test that runs, by its number, and how many calls of each function it checks."""

    test, calls = 0, CALLS


def begin_test(calls: int = CALLS) -> None:
    """From here on, each function's next `calls` calls are checked."""
    _Now.test, _Now.calls = _Now.test + 1, calls


def bound_checks() -> None:
    """Puts `_checked` in the place of the decorator that the import hook writes above each function and class.

    What was imported before has jaxtyping's own.
    """
    jaxtyping.jaxtyped = _decorator


def _decorator(*, typechecker: Any) -> Callable[[Any], Any]:
    return functools.partial(_checked, jaxtyped=functools.partial(_JAXTYPED, typechecker=typechecker))


_JAXTYPED = jaxtyping.jaxtyped


def _checked(it: Any, jaxtyped: Callable[[Any], Any]) -> Any:
    """A function, method or property that checks its first calls in each test; a dataclass whose making does."""
    if isinstance(it, (classmethod, staticmethod)):
        return type(it)(_checked(it.__func__, jaxtyped))
    if isinstance(it, property):
        return property(*(one and _checked(one, jaxtyped) for one in (it.fget, it.fset, it.fdel)))
    if inspect.isclass(it):
        if dataclasses.is_dataclass(it) and not hasattr(it.__init__, "__wrapped__"):
            it.__init__ = _checked(it.__init__, jaxtyped)
        return it
    test = left = 0

    @functools.cache
    def check() -> Callable[..., Any]:
        """Made at the first call that needs it: a process calls few of the functions that it imports."""
        return jaxtyped(it)

    @functools.wraps(it)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        nonlocal test, left
        if test != _Now.test:
            test, left = _Now.test, _Now.calls
        if left == 0:
            return it(*args, **kwargs)
        left -= 1
        return check()(*args, **kwargs)

    return bounded


__all__ = ["CALLS", "begin_test", "bound_checks"]
