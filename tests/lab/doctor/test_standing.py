"""Laws of the doctor's comparison with published figures: the formulas are the sources', the words follow the order."""

from __future__ import annotations

import math

import pytest

from lab.doctor.importers import rows
from lab.doctor.published import CHI2, EXTREME, K1, K3, LOGP_GAP, PEARSON, PROB_GAP, ROUTERS
from lab.doctor.standing import GROUPS, figures_of, lines, place, reported
from tests.lab.doctor.patients import draw_rows, trace_of

ROWS = draw_rows(num_prompts=4)


def test_equal_engines_have_no_gap() -> None:
    """Where both sides agree, every distance is 0 and the correlation 1; without experts routers have no figure."""
    figures = figures_of(trace_of(ROWS, lambda logp, b: logp))
    assert ROUTERS not in figures
    assert figures.pop(PEARSON) == pytest.approx(1.0, abs=1e-12)
    assert all(value == 0 for value in figures.values())


def test_a_constant_ratio_has_the_figures_of_its_formulas() -> None:
    """rho = e^c on every token: k1 = -c, k3 = e^c - 1 - c, chi2 = e^2c - 1, |log rho| = |c|, F(2) by |c| > log 2."""
    for c in (0.1, 0.8):
        figures = figures_of(trace_of(ROWS, lambda logp, b, c=c: [x - c for x in logp]))
        assert figures[K1] == pytest.approx(-c, rel=1e-5)
        assert figures[K3] == pytest.approx(math.exp(c) - 1 - c, rel=1e-4)
        assert figures[CHI2] == pytest.approx(math.exp(2 * c) - 1, rel=1e-5)
        assert figures[LOGP_GAP] == pytest.approx(c, rel=1e-5)
        assert figures[EXTREME] == float(c > math.log(2))
        probs = [math.exp(x) for row in ROWS for x in row["logp_old"]]
        assert figures[PROB_GAP] == pytest.approx((1 - math.exp(-c)) * sum(probs) / len(probs), rel=1e-5)


@pytest.mark.parametrize("group", GROUPS)
def test_the_words_follow_the_order(group: str) -> None:
    """Twice the largest is above every figure, half the least below, and both ends are within."""
    known = reported(K3, group)
    assert len(known) >= 2
    assert "above every figure" in (place(K3, 2 * known[-1], group) or "")
    assert "below every figure" in (place(K3, known[0] / 2, group) or "")
    assert all("within" in (place(K3, end, group) or "") for end in (known[0], known[-1]))


def test_reports_of_a_fault_are_no_norm() -> None:
    """xtuner#2044's 8.69e-3 and prime-rl#2671's 0.03 are in no range; one value is no range."""
    assert not {8.691058e-3, 0.03} & {value for group in GROUPS for value in reported(K3, group)}
    assert place(ROUTERS, 0.5, "bf16 against bf16") is None
    assert "above every figure reported for bf16 against bf16 at 30B (5e-4 to 1.5e-3" in lines({K3: 0.02})[0]


def test_values_that_are_not_finite_are_not_compared() -> None:
    """One NaN, and there is no figure; a single token has no correlation."""
    assert figures_of(trace_of(ROWS, lambda logp, b: [math.nan, *logp[1:]] if b == 0 else logp)) == {}
    one = {"tokens": [1, 2], "num_prompt": 1, "logp_mu": [-1.0], "logp_old": [-1.5]}
    assert PEARSON not in figures_of(rows.trace([one]))
