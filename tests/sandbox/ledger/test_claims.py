"""Laws of sandbox/claims/: every claim can be run and decided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.audit import audit, load_config, medians
from sandbox import claims
from sandbox.claims import CLAIMS, REGIMES, chosen_claims, chosen_regimes
from sandbox.claims.arms import arm
from sandbox.claims.border_arms import NORMS, at
from sandbox.exact.cases import MoePolicies, SandboxAudit, moe_cases
from sandbox.ledger.cells import KEPT, cell, key
from sandbox.ledger.claim import FRESH, Arm, Claim
from sandbox.ledger.command import SMOKE, Wanted
from sandbox.ledger.figures import DEGREES, maps
from sandbox.ledger.html import mapped_regimes
from theory.metrics import REGISTRY

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(path.stem for path in Path(claims.__file__).parent.glob("c[0-9]*.py"))
TRAINED = [regime for regime in REGIMES if regime.name != "vllm"]


def test_numbers_and_names_are_distinct() -> None:
    """A claim is found by its number or its name, which are those of its file."""
    assert len({claim.number for claim in CLAIMS}) == len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert [claim.number for claim in CLAIMS] == sorted(claim.number for claim in CLAIMS)
    assert [f"c{claim.number:02}_{claim.name}" for claim in CLAIMS] == FILES


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_arm_is_a_run_in_every_regime(claim: Claim) -> None:
    """Each arm gives a valid config in its regimes, of 400 updates at most; claim 70 asks about 4,000."""
    assert claim.home in {regime.name for regime in REGIMES}
    for regime in (r for r in REGIMES if r.name in claim.places):
        for one in claim.arms:
            config = cell(regime, one, 0).config
            most = 4000 if claim.number == 70 else 400
            assert config.num_steps * config.algorithm.batch.num_minibatches <= most


def test_a_smoke_ledger_tries_every_arm() -> None:
    """In `stress`, both seeds of the arms of predictions have cells, and one of the arms of pictures alone."""
    (stress,) = chosen_regimes(["stress"])
    wanted = Wanted(CLAIMS, (stress,), seeds=2, smoke=True)
    made, every = {one.key for one in wanted.cells()}, set()
    for claim in (claim for claim in CLAIMS if "stress" in claim.places):
        for one in claim.arms:
            keys = {key(stress, arm, seed, SMOKE) for arm, seed in claim.runs("stress", 2) if arm == one}
            assert keys & made if claim.is_drawn_alone(one) else keys <= made
            every |= keys
    assert made < every


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
    drawn = maps(CLAIMS)
    assert list(drawn) == ["MiniRL", "MiniRL without clipping", "MiniRL without the weight", "GRPO"]
    for arms in list(drawn.values())[:3]:
        assert arms.keys() == {(mode, n) for mode in ("none", "R2", "R3", "Pr2", "Pr3") for n in DEGREES[1:]} | {
            ("none", 1),
            ("R3", 1),
        }


def test_an_arm_is_drawn_where_it_says() -> None:
    """A preset of a map stands at its mode and N, with and without its trust region; another change has no place."""
    places = {one.name: (title, *place) for title, arms in maps(CLAIMS).items() for place, one in arms.items()}
    assert places["minirl-R3-N4"] == ("MiniRL", "R3", 4)
    assert places["minirl-noclip-Pr2-N8"] == ("MiniRL without clipping", "Pr2", 8)
    assert places["grpo-N2"] == ("GRPO", "none", 2)
    others = [arm("minirl", name="tis", changes=(("a", "b"),)), arm("gspo"), at("r0.5", "none", 8, "minirl")]
    assert all(one.on_map is None for one in others)
    assert arm("minirl") == replace(arm("minirl"), on_map=None)


def test_the_phase_diagrams_show_the_steps_of_the_gap() -> None:
    """Their rows are the regimes of the claim that runs them: not `noisy`, whose gap is that of `hot`."""
    assert [regime.name for regime in mapped_regimes(CLAIMS, REGIMES)] == ["paper", "stress", "hot"]


def test_arms_in_border_have_their_presets_clipping_and_own_models() -> None:
    """An arm of any claim is the border study's arm there, so that no run is made twice; elsewhere it is as it was."""
    border = next(regime for regime in REGIMES if regime.name == "border")
    for preset, replay, n in (("minirl", "R3", 8), ("grpo", "none", 1), ("gspo", "none", 4)):
        config = cell(border, arm(preset, replay, n), 103).config
        assert key(border, arm(preset, replay, n), 103) == key(border, at("r0.5", replay, n, preset), 103)
        assert config.algorithm.optimizer.max_grad_norm == float(NORMS[preset])
        assert config.cold_start is not None and config.cold_start.seed == 103
    own = Arm("own", (("algorithm.optimizer.max_grad_norm", "3.0"),))
    assert cell(border, own, 100).config.algorithm.optimizer.max_grad_norm == 3.0
    assert cell(REGIMES[0], arm("minirl"), 3).config.algorithm.optimizer.max_grad_norm == 1.0
    # Keys of runs that were made before the rule was written.
    kept = {"grpo-r0.5-R3-N8": "ebab5fc98567", "minirl-r0.5-N1": "ae3721af6c3d", "gspo-r0.5-N8": "c2e75292e587"}
    made = (at("r0.5", "R3", 8), at("r0.5", "none", 1, "minirl"), at("r0.5", "none", 8, "gspo"))
    assert {one.name: key(border, one, 100) for one in made} == kept
    assert key(REGIMES[0], arm("minirl"), 0) == "e36f2fe00dc9"


def test_homes_are_those_of_the_rule() -> None:
    """Decision 0007: the gap itself and routes in `paper`, collapse and score in `border`, and who decides how."""
    # A second trial has its first one's home, by a law of its own.
    firsts = [claim for claim in CLAIMS if claim.repeats is None]
    homes = {regime.name: {claim.number for claim in firsts if claim.home == regime.name} for regime in REGIMES}
    assert homes["paper"] == {8, 9, 10, 11, 17, 18, *range(21, 27), 28}
    assert (homes["hot"], homes["vllm"], homes["stress"], homes["noisy"]) == ({29}, {31}, set(), set())
    for claim in CLAIMS:
        measures = {prediction.measure.name for prediction in claim.predictions}
        assert not measures & {"survival", "eval/accuracy@0.75-1"}
        assert claim.deciding().start == max(FRESH, claim.first_seed, claim.fresh_from)


def test_a_second_trial_has_its_claims_predictions_and_seeds_that_no_claim_has_used() -> None:
    """Decision 0007: the same predictions at home, once, from seed 300 on, on runs that no earlier claim had used."""
    by_number, by_name = {claim.number: claim for claim in CLAIMS}, {claim.name: claim for claim in CLAIMS}
    again = [claim for claim in CLAIMS if claim.repeats is not None]
    # The file's name says which claim is tried again: c51_cold_starts_end_alike_again tries claim 8.
    suffix = "_again"
    said = {stem: by_name[stem[4:].removesuffix(suffix)].number for stem in FILES if stem.endswith(suffix)}
    assert {f"c{claim.number:02}_{claim.name}": claim.repeats for claim in again} == said and len(said) >= 5
    assert len({claim.repeats for claim in again}) == len(again)
    for claim in again:
        first = by_number[claim.repeats or 0]
        assert first.repeats is None and (claim.predictions, claim.home) == (first.predictions, first.home)
        assert set(claim.runs(claim.home)) == {(arm, seed) for arm in claim.arms for seed in claim.deciding()}
        # Claim 69's exact engine had runs of the seeds 300 to 335 already, so it has later ones.
        assert min(claim.deciding()) == (558 if claim.number == 69 else 300)
        firsts = (one for one in CLAIMS if one.repeats is None and one.home == claim.home)
        runs = set(claim.runs(claim.home))
        # The clipped runs of claim 59 are claim 55's, which had been seen: decision 0007 says so.
        shared = {one.number for one in firsts if runs & set(one.runs(one.home))}
        assert shared == ({59} if claim.number == 55 else set())
    # What a sentence does not say, its second trial says, too.
    assert all(claim.remarks == by_number[claim.repeats or 0].remarks for claim in again)
    assert "not a collapse" in by_number[54].remarks["border"]


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
