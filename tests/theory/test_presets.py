"""Laws of the presets' surface: the papers' numbers, what describe prints, and errors that say what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.theory.objective_batches import tuned
from theory.objectives import AGGREGATIONS, PRESETS, correction, preset, ratios


@pytest.mark.parametrize("name", list(PRESETS))
def test_describe_prints_the_composition(name: str) -> None:
    """describe names every part; the formula holds the numbers that the caller set."""
    objective = PRESETS[name]
    text = objective.describe()
    for part in (objective.name, objective.advantage, objective.ratio.name, objective.trust_region.name,
                 objective.correction.name, objective.aggregation.name, objective.formula):  # fmt: skip
        assert part in text
    if name != "reinforce":
        assert "1.75" in preset(name, eps_high=0.75).formula
    assert "min(old_t/mu_t, 3.5)" in preset(name, correction=correction("token_tis"), cap=3.5).formula
    assert "0.25 k2[KL(pi || ref)]" in preset(name, kl_coefficient=0.25, kl_estimator="k2").formula


def test_printed_formulas_show_the_whole_weight() -> None:
    """The printed weight is the one used: pi/mu whole, or r_t times old/mu."""
    assert "sg[min(pi_t/mu_t, 5)] A log pi_t" in preset("minirl").formula
    assert "sg[min(old_t/mu_t, 1.1) r_t] A log pi_t" in tuned("minirl", "token_tis").formula
    assert "sg[r_t] A log pi_t" in preset("minirl_no_is").formula
    assert preset("reinforce").formula == "J = (1/#responses) sum_i sum_t A log pi_t"


def test_defaults_are_the_papers() -> None:
    """The numbers of the presets, as the papers print them."""
    eps = {n: (o.trust_region.eps_low, o.trust_region.eps_high) for n, o in PRESETS.items() if n != "reinforce"}
    assert eps == {
        "minirl": (0.2, 0.27), "minirl_lengthnorm": (0.2, 0.27), "minirl_no_is": (0.2, 0.27), "ppo": (0.2, 0.2),
        "grpo": (0.2, 0.2), "grpo_dapo": (0.2, 0.27), "dr_grpo": (0.2, 0.2), "cispo": (1.0, 4.0), "gspo": (3e-4, 4e-4),
    }  # fmt: skip
    normed = {n for n, o in PRESETS.items() if o.advantage == "group_norm"}
    assert normed == {"grpo", "grpo_dapo", "cispo", "gspo"}
    assert {n for n, o in PRESETS.items() if o.correction.name != "none"} == {"minirl", "minirl_lengthnorm"}
    assert all(o.kl_coefficient == 0 for o in PRESETS.values())


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("minrl", {}, "unknown preset 'minrl': did you mean 'minirl'"),
        ("minirl", {"eps_lo": 0.1}, "unknown override of minirl 'eps_lo': did you mean 'eps_low'"),
        ("reinforce", {"eps_low": 0.1}, "reinforce has no use for eps_low"),
        ("ppo", {"cap": 2.0}, "ppo has no use for cap: its correction none"),
        ("ppo", {"eps_high": -0.1}, r"expected eps_high >= 0, got -0\.1"),
        ("ppo", {"eps_low": 1.5}, r"expected 0 <= eps_low <= 1, got 1\.5"),
        ("ppo", {"eps_low": None}, "ppo: eps_low: expected a number, got None"),
        ("ppo", {"kl_coefficient": -1}, r"expected kl_coefficient >= 0, got -1\.0"),
        ("ppo", {"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        ("ppo", {"advantage": "group_maen"}, "unknown advantage 'group_maen': did you mean 'group_mean'"),
        ("ppo", {"aggregation": "token_men"}, "unknown aggregation 'token_men': did you mean 'token_mean'"),
        ("ppo", {"correction": "icepopp"}, "unknown correction 'icepopp': did you mean 'icepop'"),
        ("ppo", {"correction": 3}, "expected correction to be a name or such an object, got 3"),
    ],
)
def test_errors_name_what_came_and_what_was_expected(name: str, overrides: dict, message: str) -> None:
    """A wrong name, an override without a place and a number out of range each give one clear ValueError."""
    with pytest.raises(ValueError, match=message):
        preset(name, **overrides)


@pytest.mark.parametrize("name", ["ppo", "grpo", "grpo_dapo", "dr_grpo", "gspo", "cispo"])
def test_the_ratio_is_never_counted_twice(name: str) -> None:
    """A weight that holds pi is refused where the trust region multiplies by pi/old itself."""
    with pytest.raises(ValueError, match="would count twice"):
        preset(name, correction=correction("token_tis", numerator="pi"))


def test_a_bound_needs_a_ratio() -> None:
    """A trust region over no ratio is refused: its bounds could never bind."""
    with pytest.raises(ValueError, match="expected a ratio for the trust region min_clip, got none"):
        replace(PRESETS["ppo"], ratio=ratios.none)


def test_shapes_must_agree() -> None:
    """Shapes that would broadcast silently are refused with both shapes, also where shape checks are off."""
    from theory.objectives.objective import _require_shapes

    x, mask, A = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    with pytest.raises(ValueError, match=r"logp_mu_BT: expected the shape of logp_pi_BT, \(2, 3\), got \(2, 1\)"):
        _require_shapes(x, x, x[:, :1], A, mask, None)
    with pytest.raises(ValueError, match=r"advantages_B: expected shape \(2,\), got \(2, 1\)"):
        _require_shapes(x, x, x, A[:, None], mask, None)


def test_int_overrides_and_objects() -> None:
    """Whole numbers are numbers, and an aggregation may be given as an object."""
    assert preset("minirl", cap=5) == PRESETS["minirl"]
    assert preset("grpo", aggregation=AGGREGATIONS["token_mean"]) == preset("grpo", aggregation="token_mean")
    assert preset("minirl", correction="none").formula == preset("minirl_no_is").formula
