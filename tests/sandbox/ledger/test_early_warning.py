"""Laws of sandbox/ledger/early_warning.py: which windows count, what the area is, that a planted signal is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sandbox.ledger.cells import NUM_WINDOWS
from sandbox.ledger.course import collapse_step
from sandbox.ledger.early_warning import LEAD, SIGNALS, shares, warnings, windows

KL, REWARD = "rollout_corr/k3_kl", "reward/mean"
numbers = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=12)


def _row(first: int | None, regime: str = "hot", **series: Sequence[float | None]) -> dict[str, Any]:
    """A run of NUM_WINDOWS windows whose accuracy collapses at step `first`: there its level is a third of the peak."""
    end = 10 * NUM_WINDOWS
    found = [[0, 0.4], [end, 0.4]] if first is None else [[0, 0.4], [first - 1, 0.0], [first, 0.0]]
    return {"evaluations": found, "num_steps": end, "series": series, "regime": regime, "verdict": "stable"}


@given(numbers, numbers)
def test_the_area_is_mann_and_whitneys(before: list[float], quiet: list[float]) -> None:
    """The mean share is U / (n m), ties counted half; a weight of 2 is a run that stands there twice, and 0 none."""
    u = stats.mannwhitneyu(before, quiet, alternative="two-sided", method="asymptotic").statistic
    signals, others, once = np.array(before), np.array(quiet), np.ones((len(quiet), 1))
    found = shares(signals, others, once)
    assert found.mean() == pytest.approx(u / (len(before) * len(quiet)))
    assert found[:, 0] == pytest.approx(np.mean([0.5 * ((signals > q) + 0.0 + (signals >= q)) for q in quiet], axis=0))
    twice = shares(signals, np.append(others, others[0]), np.append(once, [[1.0]], axis=0))
    assert shares(signals, others, once + np.eye(len(quiet), 1)) == pytest.approx(twice)
    for quiet_too, weight in ((0.0, 0.0), (np.nan, 1.0)):
        aside = shares(signals, np.append(others, quiet_too), np.append(once, [[weight]], axis=0))
        assert (aside == found).all()
    assert np.isnan(shares(signals, others, 0.0 * once)).all()


def test_windows_are_before_a_collapse_or_quiet_or_neither() -> None:
    """The last LEAD windows before the collapse warn, those earlier are quiet, those after count for nothing."""
    rising: list[float | None] = [float(2**w) for w in range(NUM_WINDOWS)]
    found = windows(_row(101, **{KL: rising}), KL)  # it collapses in window 10
    base = math.log(1.5)
    assert [(one.place, one.ahead) for one in found] == [(w, max(0, 10 - w) * (w >= 10 - LEAD)) for w in range(2, 10)]
    assert [one.signal for one in found] == pytest.approx([w * math.log(2) - base for w in range(2, 10)])
    found = windows(_row(None, **{KL: rising}), KL)
    # The windows that follow the last ones are unknown.
    assert [(one.place, one.ahead) for one in found] == [(w, 0) for w in range(2, NUM_WINDOWS - LEAD)]


def test_what_falls_warns_where_falling_is_feared() -> None:
    """The direction of a metric is that of its fear: a falling reward is a positive signal."""
    falling: list[float | None] = [1.0 / (w + 1) for w in range(NUM_WINDOWS)]
    found = windows(_row(151, **{REWARD: falling}), REWARD)
    assert all(one.signal > 0 for one in found) and SIGNALS[REWARD] == -1


def test_a_run_without_a_beginning_has_no_signal() -> None:
    """Without a positive value in the first two windows there is nothing to compare with."""
    for series in ([None, None, 1.0], [0.0, 0.0, 1.0], []):
        assert windows(_row(None, **{KL: series}), KL) == []


def test_windows_are_compared_in_their_own_regime_and_place() -> None:
    """A KL that rises in every run alike, and runs of another regime, say nothing of a collapse."""
    rising: list[float | None] = [1.0 + w for w in range(NUM_WINDOWS)]
    rows = [_row(61, **{KL: rising})] + [_row(None, **{KL: rising}) for _ in range(5)]
    calm = [_row(None, "paper", **{KL: [1.0] * NUM_WINDOWS}) for _ in range(5)]
    for given_rows in (rows, rows + calm):
        (one,) = warnings(given_rows)
        assert (one.auc, one.hits, one.num_before, one.num_collapsed) == (0.5, 0.0, LEAD, 1)
    assert warnings(rows[:1] + calm) == []  # no quiet window of its regime


def test_how_far_ahead_a_metric_warns() -> None:
    """A KL that doubles in the last window alone warns one window ahead and not two."""
    flat, late = [1.0] * NUM_WINDOWS, [1.0] * 5 + [2.0] + [1.0] * (NUM_WINDOWS - 6)
    rows = [_row(61, **{KL: late}), *(_row(None, **{KL: flat}) for _ in range(5))]
    (one,) = warnings(rows)
    assert one.by_lead == (1.0, *[0.5] * (LEAD - 1))
    assert one.hits == pytest.approx(1 / LEAD)


def test_a_planted_signal_is_found_and_noise_is_not() -> None:
    """A KL that doubles before each collapse has an area near 1 whose interval is above 0.9; noise has 0.5 inside."""
    draws, rows = np.random.default_rng(3), []
    for i in range(40):
        # Not among the last windows: what is quiet there is not known, so there is nothing to compare with.
        first = int(draws.integers(80, 170)) if i % 2 else None
        kl = draws.uniform(1.0, 1.3, NUM_WINDOWS)
        if first is not None:
            end = (first - 1) * NUM_WINDOWS // (10 * NUM_WINDOWS)
            kl[end - LEAD : end] *= 2.0
        rows.append(_row(first, **{KL: kl.tolist(), "actor/grad_norm": draws.uniform(1.0, 1.3, NUM_WINDOWS).tolist()}))
    found = {one.metric: one for one in warnings(rows)}
    assert set(found) == {KL, "actor/grad_norm"}
    assert found[KL].auc > 0.99 and found[KL].low > 0.9 and found[KL].hits > 0.95
    assert found["actor/grad_norm"].low < 0.5 < found["actor/grad_norm"].high
    assert found["actor/grad_norm"].hits < 0.25  # 5% and what 20 quiet runs leave of a quantile
    assert warnings(rows)[0].metric == KL
    assert found[KL].num_before == sum(collapse_step(row) is not None for row in rows) * LEAD


def test_without_a_collapse_there_is_nothing_to_warn_of() -> None:
    """Stable runs alone give no area."""
    assert warnings([_row(None, **{KL: [1.0] * NUM_WINDOWS})]) == []


def test_runs_too_short_for_a_verdict_say_nothing() -> None:
    """A run of a tenth of the updates is no quiet run: with any number of them the area stays what it was."""
    rising: list[float | None] = [float(2**w) for w in range(NUM_WINDOWS)]
    flat: list[float | None] = [1.0 + w / 100 for w in range(NUM_WINDOWS)]
    long = [_row(101, **{KL: rising}), _row(None, **{KL: flat}), _row(None, **{KL: rising[::-1]})]
    short = [_row(None, **{KL: [x * 3 for x in rising]}) | {"verdict": "undecided"}] * 5
    unknown = [_row(None, **{KL: [x * 3 for x in rising]}) | {"evaluations": []}] * 5
    assert warnings(long + short + unknown) == warnings(long)


def test_the_verdict_has_no_part_in_a_collapse() -> None:
    """A rule on the KL fires in a run whose accuracy holds: its windows stay quiet, or the KL would predict itself."""
    rising: list[float | None] = [1.0 + w for w in range(NUM_WINDOWS)]
    row = _row(None, **{KL: rising})
    judged = row | {"verdict": "collapsed", "first_step": 101, "rules": ["kl_blowup"]}
    assert windows(judged, KL) == windows(row, KL) != []
