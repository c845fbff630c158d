"""Laws of sandbox/claims/: every claim can be run and decided."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.audit import audit, load_config, medians
from sandbox.audit_cases import MoePolicies, SandboxAudit, moe_cases
from sandbox.claims import CLAIMS, REGIMES, chosen_claims, chosen_regimes
from sandbox.claims.arms import arm
from sandbox.ledger.cells import KEPT, cell
from sandbox.ledger.claim import Claim
from sandbox.ledger.figures import DEGREES, FAMILIES, MODES
from sandbox.ledger.html import mapped_regimes
from theory.metrics import REGISTRY

CONFIGS = Path(__file__).parents[3] / "configs"
TRAINED = [regime for regime in REGIMES if regime.name != "vllm"]


def test_numbers_and_names_are_distinct() -> None:
    """A claim is found by its number or its name."""
    assert len({claim.number for claim in CLAIMS}) == len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert [claim.number for claim in CLAIMS] == sorted(claim.number for claim in CLAIMS)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_arm_is_a_run_in_every_regime(claim: Claim) -> None:
    """Each arm gives a valid config of 400 updates at most in its regimes, and arms of one name are one arm."""
    for regime in (r for r in REGIMES if r.name in claim.regimes):
        for one in claim.arms:
            config = cell(regime, one, 0).config
            assert config.num_steps * config.algorithm.batch.num_minibatches <= 400
    assert len({one.name for one in claim.arms}) == len(claim.arms)


def test_arms_of_one_name_are_one_arm() -> None:
    """Over the whole ledger, a name stands for one set of changes."""
    arms = {one for claim in CLAIMS for one in claim.arms}
    assert len({one.name for one in arms}) == len(arms)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_what_a_claim_shows_is_kept(claim: Claim) -> None:
    """The metrics of its figure are in every row, and in the registry; its source names a paper or this project."""
    assert set(claim.shown) <= set(KEPT) <= set(REGISTRY)
    assert "arXiv" in claim.source or claim.source.startswith("here")


def test_the_phase_diagrams_of_minirl_have_their_runs() -> None:
    """Every replay mode at N = 2, 4 and 8, and none and R3 at N = 1, with all three kinds of MiniRL, is an arm."""
    arms = {one for claim in CLAIMS for one in claim.arms}
    for build, preset in (FAMILIES[name] for name in FAMILIES if name.startswith("MiniRL")):
        assert {build(preset, mode, n) for mode in MODES for n in DEGREES[1:]} <= arms
        assert {build(preset, mode, 1) for mode in ("none", "R3")} <= arms


def test_the_phase_diagrams_show_the_steps_of_the_gap() -> None:
    """Their rows are the regimes of the claim that runs them: not `noisy`, whose gap is that of `hot`."""
    assert [regime.name for regime in mapped_regimes(CLAIMS, REGIMES)] == ["paper", "stress", "hot"]


def test_the_audit_behind_claim_29() -> None:
    """Under each regime's own engine, length normalisation has three times the direction bias of the other weights."""
    config = load_config(CONFIGS / "audit" / "claims.yaml", (), lambda: SandboxAudit)
    (policies,) = config.policies
    assert isinstance(policies, MoePolicies)
    tried = next(claim for claim in CLAIMS if claim.number == 29).regimes
    engines = {r.name: cell(r, arm("minirl"), 0).config.engine for r in TRAINED if r.name in (*tried, "noisy")}
    assert engines.pop("noisy") == engines["hot"] and policies.engines == engines
    short = config.model_copy(update={"policies": (policies.model_copy(update={"lengths": (3,)}),)})
    found = medians(audit(short, {"moe": moe_cases}))
    bias = {(row["engine"], row["objective"]): row["direction_bias"] for row in found.to_dict("records")}
    for engine in engines:
        others = [bias[engine, name] for name in ("minirl", "minirl_no_is", "prefix")]
        assert bias[engine, "minirl_lengthnorm"] > 3 * max(others)


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
