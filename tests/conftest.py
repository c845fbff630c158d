"""Shared by every test: how hard Hypothesis looks, one thread per process, and what is not looked at again.

Those are the shapes of long repetitions, and imports, which no collection of garbage has to go through.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.shapes import CALLS, begin_test, bound_checks

# dev: a quick look while working; what failed is tried first again. ci: the same examples every time, so a red run can
# be repeated from its printed blob. thorough: for a night; one seed for the whole session, printed at its end.
# No deadlines: the first call under the shape checks is slow by nature.
settings.register_profile("dev", max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=10_000, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
settings.load_profile(PROFILE)

torch.set_num_threads(1)
bound_checks()
gc.disable()  # until all is imported: of what imports make, next to nothing is garbage


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draws the seed of a thorough session, unless it was given, before Hypothesis and the workers read it."""
    if PROFILE == "thorough" and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().getrandbits(32))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Notebooks, the longest tests, come first: at the end of a session no worker waits for the other's."""
    items.sort(key=lambda item: item.path.name != "test_notebooks.py")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Hides the imports, some 700,000 objects, from later collections, also where xdist's workers do the tests."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets the end of the process find them, without which libraries report leaks."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Within a test marked `unchecked`, its fixtures included, annotated functions run as they do outside of pytest.

    Tests that repeat what others call with checks, for hundreds of updates, do without; no mutant of tests/mutants is
    left to those checks.
    """
    begin_test(0 if item.get_closest_marker("unchecked") else CALLS)
    try:
        return (yield)
    finally:
        begin_test()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how to repeat a session whose examples were drawn from one seed."""
    if config.option.hypothesis_seed is not None:
        again = f"HYPOTHESIS_PROFILE={PROFILE} and --hypothesis-seed={config.option.hypothesis_seed}"
        terminalreporter.write_line(f"the examples of this session: {again}")
