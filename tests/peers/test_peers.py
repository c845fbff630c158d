"""Value and gradient of our objectives, and our weights, masks and advantages, against verl's and TRL's own functions.

Each runs where its peer is installed (`make test-peers`); docs/peers.md has the largest differences.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.peers import trl_code, verl_code
from tests.peers.cases import Case
from tests.peers.trl_cases import TRL
from tests.peers.verl_cases import VERL

pytestmark = pytest.mark.usefixtures("wide")
PAGE = Path(__file__).parents[2] / "docs" / "peers.md"


def require_equal(case: Case, code: object) -> None:
    moved = False
    for seed in range(5):
        for what, (ours, theirs) in case.run(code, seed).items():
            # verl adds 1e-8 to the length that it divides by, and to a variance.
            torch.testing.assert_close(ours, theirs, rtol=2e-8, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")
            moved |= bool((ours != ours.reshape(-1)[0]).any()) or bool(ours.any())
    assert moved, "both sides were 0 on every batch"


@verl_code.needs_verl
@pytest.mark.parametrize("case", VERL, ids=lambda case: case.name)
def test_ours_is_verls(case: Case, code: tuple[ModuleType, ModuleType]) -> None:
    """On five ragged batches with holes, ours is verl's to its own rounding."""
    require_equal(case, code)


@trl_code.needs_trl
@pytest.mark.parametrize("case", TRL, ids=lambda case: case.name)
def test_ours_is_trls(case: Case) -> None:
    """On five ragged batches with holes, ours is TRL's to its own rounding."""
    require_equal(case, None)


def test_the_page_has_every_comparison() -> None:
    """docs/peers.md has a row for each case of each peer, in their order."""
    rows = [line.split(" | ")[0].strip("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = [row for row in rows if row not in ("compared", "---")]
    assert named == [case.name for case in [*VERL, *TRL]]
