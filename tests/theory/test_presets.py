"""Laws of the presets' surface: the papers' numbers, what describe prints, and errors that say what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.theory.laws_objectives import fits, tuned
from tests.theory.laws_presets import PRESET_ROWS
from theory.objectives import AGGREGATIONS, PRESETS, correction, preset, ratios
from theory.objectives.trust_regions import CPPO


@pytest.mark.parametrize("name", list(PRESETS))
def test_describe_prints_the_composition(name: str) -> None:
    """describe names every part; the formula holds the numbers that the caller set."""
    objective = PRESETS[name]
    text = objective.describe()
    for part in (objective.name, objective.advantage, objective.ratio.name, objective.trust_region.name,
                 objective.correction.name, objective.aggregation.name, objective.formula):  # fmt: skip
        assert part in text
    if PRESET_ROWS[name].eps is not None:
        assert ("0.75" if PRESET_ROWS[name].shows_widths else "1.75") in preset(name, eps_high=0.75).formula
    if fits(name, "token_tis"):
        assert "min(old_t/mu_t, 3.5)" in preset(name, correction=correction("token_tis"), cap=3.5).formula
    penalised = preset(name, kl_coefficient=0.25, kl_estimator="k2")
    assert "0.25 k2[KL(pi || ref)]" in penalised.formula
    assert penalised.describe().endswith("\n  KL penalty    0.25 x k2 of KL(pi || ref)")


def test_printed_formulas_show_the_whole_weight() -> None:
    """The printed weight is the one used: pi/mu whole, or r_t times old/mu."""
    assert "sg[min(pi_t/mu_t, 5)] A log pi_t" in preset("minirl").formula
    assert "sg[min(old_t/mu_t, 1.1) r_t] A log pi_t" in tuned("minirl", "token_tis").formula
    assert "sg[r_t] A log pi_t" in preset("minirl_no_is").formula
    assert "sg[min(pi_t/mu_t min_(s<t) pi_s/mu_s, 5)] A log pi_t" in preset("minpro").formula
    assert "M_t sg[pi_t/mu_t] A log pi_t" in preset("dppo_tv").formula
    assert preset("reinforce").formula == "J = (1/#responses) sum_i sum_t A log pi_t"


def test_defaults_are_the_papers() -> None:
    """Parts and numbers of the presets are those of the table, as the papers print them."""
    for name, row in PRESET_ROWS.items():
        objective, region = PRESETS[name], PRESETS[name].trust_region
        assert (objective.advantage, objective.aggregation.name) == (row.advantage, row.aggregation)
        assert (vars(region).get("eps_low"), vars(region).get("eps_high")) == (row.eps or (None, None))
        assert objective.correction.numerator == row.numerator
        assert bool(objective.ratio.symbol) == row.ratio
    corrected = {n: o.correction for n, o in PRESETS.items() if o.correction.name != "none"}
    tis, whole = correction("token_tis", numerator="pi", cap=5.0), correction("token_is", numerator="pi")
    assert corrected == {
        "minirl": tis, "minirl_lengthnorm": tis, "minpro": correction("minpro", numerator="pi", cap=5.0),
        "dppo_tv": whole, "dppo_kl": whole, "cppo": whole,
    }  # fmt: skip
    region = PRESETS["cppo"].trust_region
    assert isinstance(region, CPPO)
    assert (region.delta_b, region.w_min) == (0.015, 0.8)
    assert all(o.kl_coefficient == 0 for o in PRESETS.values())


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("minrl", {}, "unknown preset 'minrl': did you mean 'minirl'"),
        ("minirl", {"eps_lo": 0.1}, "unknown override of minirl 'eps_lo': did you mean 'eps_low'"),
        ("reinforce", {"eps_low": 0.1}, "reinforce has no use for eps_low"),
        ("minirl", {"delta_b": 0.1}, "minirl has no use for delta_b"),
        ("grpo", {"clip_ratio_c": 3.0}, "no such number; presets with it: ppo_dual_clip, grpo_dual_clip"),
        ("cppo", {"w_min": 0}, r"w_min: expected 0 < w_min <= 1, got 0\.0"),
        ("cppo", {"delta_b": 1.5}, r"delta_b: expected 0 <= delta_b <= 1, got 1\.5"),
        ("ppo", {"cap": 2.0}, "ppo has no use for cap: its correction none"),
        ("ppo", {"eps_high": -0.1}, r"expected eps_high >= 0, got -0\.1"),
        ("ppo", {"eps_low": 1.5}, r"expected 0 <= eps_low <= 1, got 1\.5"),
        ("dppo_tv", {"eps_low": -0.1}, r"expected eps_low >= 0, got -0\.1"),
        ("ppo", {"eps_low": None}, "ppo: eps_low: expected a number, got None"),
        ("ppo", {"kl_coefficient": -1}, r"expected kl_coefficient >= 0, got -1\.0"),
        ("ppo", {"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        ("ppo", {"advantage": "group_maen"}, "unknown advantage 'group_maen': did you mean 'group_mean'"),
        ("ppo", {"aggregation": "token_men"}, "unknown aggregation 'token_men': did you mean 'token_mean'"),
        ("gspo", {"ratio": "tokn"}, "unknown ratio 'tokn': did you mean 'token'"),
        ("ppo", {"ratio": "none"}, "expected a ratio for the trust region min_clip, got none"),
        ("ppo", {"correction": "icepopp"}, "unknown correction 'icepopp': did you mean 'icepop'"),
        ("ppo", {"correction": 3}, "expected correction to be a name or an object, got 3"),
    ],
)
def test_errors_name_what_came_and_what_was_expected(name: str, overrides: dict, message: str) -> None:
    """A wrong name, an override without a place and a number out of range each give one clear ValueError."""
    with pytest.raises(ValueError, match=message):
        preset(name, **overrides)


@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_the_ratio_is_never_counted_twice(name: str) -> None:
    """A weight that holds pi is refused where the trust region multiplies by pi/old itself."""
    with pytest.raises(ValueError, match="would count twice"):
        preset(name, correction=correction("token_tis", numerator="pi"))


@pytest.mark.parametrize(("name", "numerator"), [("token_tis", "old"), ("seq_mis", "old"), ("token_is", "pi")])
def test_the_engine_gap_is_never_counted_twice(name: str, numerator: str) -> None:
    """A weight is refused beside VESPO's kernel of pi/mu, whichever its numerator; what only rejects is not."""
    with pytest.raises(ValueError, match=rf"vespo: correction: expected none, or .* only rejects, got {name}.* twice"):
        preset("vespo", correction=correction(name, numerator=numerator))
    assert preset("vespo", correction="geo_rs").correction.rejection


def test_shapes_must_agree() -> None:
    """Shapes that would broadcast silently are refused with both shapes, also where shape checks are off."""
    from theory.objectives.objective import _require_shapes

    x, A = torch.zeros(2, 3), torch.zeros(2)
    _require_shapes(x, A, logp_old_BT=x, logp_ref_BT=None)
    with pytest.raises(ValueError, match=r"^logp_mu_BT: expected the shape of logp_pi_BT, \(2, 3\), got \(2, 1\)$"):
        _require_shapes(x, A, logp_old_BT=x, logp_mu_BT=x[:, :1])
    with pytest.raises(ValueError, match=r"advantages_B: expected shape \(2,\), got \(2, 1\)"):
        _require_shapes(x, A[:, None], logp_old_BT=x)


def test_int_overrides_and_objects() -> None:
    """Whole numbers are numbers, an aggregation may be given as an object, and a ratio by its name."""
    token = ratios.sequence_geometric_token
    assert preset("gspo", ratio="sequence_geometric_token") == replace(PRESETS["gspo"], ratio=token)
    assert preset("minirl", cap=5) == PRESETS["minirl"]
    assert preset("grpo", aggregation=AGGREGATIONS["token_mean"]) == preset("grpo", aggregation="token_mean")
    assert preset("minirl", correction="none").formula == preset("minirl_no_is").formula
