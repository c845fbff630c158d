"""Laws of the learning rate beside the border, and of the papers' settings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sandbox.border.fit import expected
from sandbox.border.papers import SETTINGS, PaperSetting, SmallWorld, answer, length_power, rate_power, small, table
from sandbox.border.rates import LEVEL, at_most, counted, least_power, markdown, remedies
from sandbox.border.study import BorderStudy
from sandbox.claims.border_arms import slower
from tests.sandbox.border.made import BORDER, rows
from tests.sandbox.border.test_fit import planted


def test_at_most_is_the_binomial_where_all_shares_are_equal() -> None:
    assert at_most(2, np.full(7, 0.3)) == pytest.approx(stats.binom.cdf(2, 7, 0.3))
    assert at_most(1, np.array([1.0, 0.5])) == pytest.approx(0.5) and at_most(0, np.zeros(3)) == 1.0


def test_the_least_power_makes_the_count_just_likely_enough() -> None:
    """20 runs with KL x N = 3.2 and no collapse: at the power, all of them hold with a probability of LEVEL."""
    fast = planted(60, border=0.8, steepness=4.0).assign(rate=2e-3, remedy="none")
    slow = fast[fast["N"] == 16].iloc[:20].assign(kl=0.2, rate=1e-3, collapsed=0.0)
    power = least_power(fast, slow)
    alike = slow.assign(kl=0.2 / 2**power)
    share = expected("KL x N", fast, alike) / len(slow)
    assert 0.5 < power < 4 and (1 - share) ** 20 == pytest.approx(LEVEL, rel=1e-6)
    # As many collapses as KL x N expects ask for no power.
    assert least_power(fast, slow.assign(collapsed=1.0)) == 0.0


def test_the_paragraph_has_what_each_number_expects() -> None:
    """At half the rate, KL x N x rate expects what KL x N does of runs with half the KL, and the square a quarter."""
    fast = planted(40, border=0.8, steepness=4.0).assign(rate=2e-3, remedy="none")
    slow = fast[fast["N"] == 8].assign(rate=1e-3, collapsed=0.0)
    said = " ".join(markdown(fast, slow).split())
    asked = [expected("KL x N", fast, slow.assign(kl=slow["kl"] / 2**power)) for power in (0, 1, 2)]
    assert f"0 of {len(slow)} runs collapse, where `KL x N` alone expects {asked[0]:.1f}." in said
    assert f"With the rate as a factor the number expects {asked[1]:.1f}, with its square {asked[2]:.1f};" in said
    assert markdown(fast, slow.assign(remedy="R3")) == "" and counted(slow.assign(kl=0.0)).empty


def test_the_remedies_stand_at_both_rates() -> None:
    """Collapses and accuracy at half the rate beside the map's own, and what each remedy changes within a seed."""
    fast = rows("r0.5", "none", 8, 4, 4) | rows("r0.5", "R3", 8, 3)
    slow = rows("r0.5", "none", 8, 4, 1, changed=slower) | rows("r0.5", "R3", 8, 3, changed=slower)
    study = BorderStudy(fast | slow, BORDER)
    assert remedies(study.grpo, study.slowed) == ""  # no run under the weight
    study = BorderStudy(fast | slow | rows("r0.5", "tis", 8, 2, 2, changed=slower), BORDER)
    said = " ".join(remedies(study.grpo, study.slowed).split())
    assert "| 8 | no remedy | 1 of 4 | 0.225 (-0.014 to 0.464) | 0.000 (-0.000 to 0.000) |" in said
    assert "| 8 | R3 | 0 of 3 | 0.300 (0.300 to 0.300) | 0.300 (0.300 to 0.300) |" in said
    assert "| 8 | token TIS | 2 of 2 | 0.000 (-0.000 to 0.000) | – |" in said and "| 1 |" not in said
    # Seeds 104 and 105 have both: 0 - 0 and 0 - 0.3; seeds 104 to 106: 0.3 - 0, 0.3 - 0.3 twice.
    assert "Within a seed token TIS changes the accuracy at half the rate by -0.150 (-2.056 to 1.756) at N = 8." in said
    assert "R3 changes the accuracy at half the rate by 0.100 (-0.330 to 0.530) at N = 8." in said


OWN = SmallWorld(border=0.8, length=20.0, rate=2e-3, kl=0.3)
ONE = PaperSetting("a paper", 1e-3, 8, 2000, 2e-6)


def test_powers_put_a_setting_on_the_border() -> None:
    """x over x* is 1 / 100 in KL x N; the length is 100 times as large, the rate 1,000 times smaller."""
    assert length_power(ONE, OWN) == pytest.approx(1.0)
    assert length_power(ONE, OWN, 1.0) == pytest.approx(1 + 1.5) and length_power(ONE, OWN, 2.0) == pytest.approx(4.0)
    for p in (1.0, 2.5, 4.0):
        q = rate_power(ONE, OWN, p)
        x = ONE.kl * ONE.n * (ONE.length / OWN.length) ** p * (ONE.rate / OWN.rate) ** q
        assert x == pytest.approx(OWN.border)


@pytest.mark.parametrize(
    ("of_length", "of_rate", "words"),
    [(0.1, 0.0, "length alone does not make up"), (1.7, 4.0, "do not say why"), (1.7, 0.5, "is reason enough")],
)
def test_the_answer_follows_from_the_powers(of_length: float, of_rate: float, words: str) -> None:
    """R3's setting needs a power of the length above 0.1, and below 1.7 unless the rate counts with a power of 4."""
    said = " ".join(answer(OWN, of_length, of_rate).split())
    ends = ("length alone does not make up", "do not say why", "is reason enough")
    assert [end for end in ends if end in said] == [words]
    one = SETTINGS[0]
    assert f"lies at {one.kl * one.n / OWN.border:.3g} of x*" in said and f"has {OWN.kl / one.kl:.3g} times" in said


def test_the_settings_are_shares_of_the_border() -> None:
    lines = table({"KL x N": 0.8, "KL x length x N": 16.0}, 2e-3).splitlines()
    one = SETTINGS[0]
    shares = [float(cell) for cell in lines[2].split("|")[6:9]]
    x = one.kl * one.n
    assert shares == pytest.approx([x / 0.8, x * one.length / 16.0, x * one.rate / (0.8 * 2e-3)], rel=0.05)


def test_the_studys_side_has_the_largest_mean_kl() -> None:
    runs = planted(3, 0.8, 4.0).assign(rate=2e-3)
    runs["gap"] = runs["f2"].astype(str)
    found = small(runs, 0.8)
    largest = runs[runs["f2"] == runs["f2"].max()]["kl"].mean()
    assert (found.border, found.rate) == (0.8, 2e-3) and math.isclose(found.length, 21.0)
    assert found.kl == pytest.approx(largest)
