"""Laws of sandbox/claims/: every claim can be run and decided."""

from __future__ import annotations

import pytest

from sandbox.claims import CLAIMS, REGIMES, chosen_claims, chosen_regimes
from sandbox.ledger.cells import KEPT, cell
from sandbox.ledger.claim import Claim
from theory.metrics import REGISTRY


def test_numbers_and_names_are_distinct() -> None:
    """A claim is found by its number or its name."""
    assert len({claim.number for claim in CLAIMS}) == len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert [claim.number for claim in CLAIMS] == sorted(claim.number for claim in CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_arm_is_a_run_in_every_regime(claim: Claim) -> None:
    """Each arm gives a valid config of 400 updates at most, in each regime, and arms of one name are one arm."""
    for regime in REGIMES:
        for arm in claim.arms:
            config = cell(regime, arm, 0).config
            assert config.num_steps * config.algorithm.batch.num_minibatches <= 400
    assert len({arm.name for arm in claim.arms}) == len(claim.arms)


def test_arms_of_one_name_are_one_arm() -> None:
    """Over the whole ledger, a name stands for one set of changes."""
    arms = {arm for claim in CLAIMS for arm in claim.arms}
    assert len({arm.name for arm in arms}) == len(arms)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_what_a_claim_shows_is_kept(claim: Claim) -> None:
    """The metrics of its figure are in every row, and in the registry; its source names a paper or this project."""
    assert set(claim.shown) <= set(KEPT) <= set(REGISTRY)
    assert "arXiv" in claim.source or claim.source.startswith("here")


def test_claims_are_chosen_by_number_and_name() -> None:
    """Numbers, names and `all` choose claims, each once and in order."""
    assert [c.number for c in chosen_claims(["9", "3", "moe_gap_exceeds_dense"])] == [3, 9]
    assert chosen_claims(["all"]) == CLAIMS
    assert chosen_regimes([]) == REGIMES
    assert [r.name for r in chosen_regimes(["hot"])] == ["hot"]


@pytest.mark.parametrize(
    ("words", "message"),
    [(["99"], "unknown claim '99'"), ([], "missing CLAIM"), (["no_weight"], "did you mean 'no_weight_")],
)
def test_an_unknown_claim_is_named(words: list[str], message: str) -> None:
    """An unknown claim is one line with the nearest name; none at all says how to find them."""
    with pytest.raises(ValueError, match=message):
        chosen_claims(words)
