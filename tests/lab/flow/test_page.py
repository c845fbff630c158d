"""Laws of a flow's words and page: they are the rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.audit.table import numbers
from lab.config.load import to_yaml
from lab.flow import FlowConfig, ends
from lab.flow.figures import curves, reward_maps
from lab.flow.page import render
from lab.flow.table import MeanInterval, focus, interval, table_rows, terminal_tables
from lab.flow.words import headline, sentences, turns
from tests.lab.browser import payload, probed, whole

CONFIG = """
name: tiny
backend: exact
problems: {count: 3, num_tokens: 2, length: 2, prompts: 1, openings: 2, lost: 1}
errors: [{kind: fixed, token_kl: 0.1}, {kind: sharper, scale: 0.3}]
objectives:
  - {preset: reinforce, label: none}
  - {preset: reinforce, label: token, correction: {name: token_is, numerator: pi}}
  - {preset: reinforce, label: centred, centred: true}
num_minibatches: [1, 2]
training: {optimizer: sgd, rate: 0.5, num_updates: 4, observe_every: 2}
"""


@pytest.fixture(scope="module")
def html(config: FlowConfig, frame: pd.DataFrame) -> str:
    """The page."""
    return render(config, frame, {"seed": 0, "versions": {"torch": "2"}}, to_yaml(config))


def planted(frame: pd.DataFrame, objective: str, error: str, entropy: float) -> pd.DataFrame:
    """The rows with everyone's entropy at 0.1, and that of one objective under one error at another value."""
    own = (frame["objective"] == objective) & (frame["error"] == error)
    # Problems differ a little, so that intervals have a width.
    return frame.assign(entropy=own.map({True: entropy, False: 0.1}) * (1 + 0.01 * frame["problem"]))


@pytest.mark.parametrize(("entropy", "way"), [(0.02, "collapses"), (0.9, "stays high"), (0.15, None)])
def test_an_entropy_that_leaves_the_others_is_named(frame: pd.DataFrame, entropy: float, way: str | None) -> None:
    """Below half of the others' it collapses, above twice it stays high, between nothing is said; then the number."""
    found = turns(planted(frame, "none", "sharper, scale 0.3", entropy))
    told = headline(planted(frame, "none", "sharper, scale 0.3", entropy))
    if way is None:
        assert found == [] and told == "No objective's entropy ends at twice or at half of the others'"
        return
    (turn,) = found
    assert (turn.error, turn.objective, turn.way) == ("sharper, scale 0.3", "none", way)
    assert turn.end.mean == pytest.approx(1.01 * entropy) and turn.middle == pytest.approx(0.101)
    assert told == f"With none, entropy {way} under sharper, scale 0.3"
    said = sentences(planted(frame, "none", "sharper, scale 0.3", entropy))
    assert said[0].startswith(f"Entropy {way} with none under sharper, scale 0.3 (")


def test_the_highest_reward_is_named_where_problems_agree(frame: pd.DataFrame) -> None:
    """Under an error at which token is above the others in every problem it is highest; at ties nothing is told."""
    rank = frame["objective"].map({"none": 0.1, "token": 0.3, "centred": 0.2})
    other = frame.assign(reward=rank.where(frame["kind"] == "fixed", 0.2) + 0.01 * frame["problem"])
    said = " ".join(sentences(other))
    assert "Reward ends highest under fixed, KL 0.1 with token (0.31 [" in said
    assert "none is lowest, by 0.2 [0.2, 0.2]" in said
    assert "Under sharper, scale 0.3 reward tells no objectives apart" in said


@pytest.mark.parametrize("num", [2, 3, 10])
def test_intervals_of_few_problems_hold_their_level(num: int) -> None:
    """Of 400 draws of a mean of 0 about 5% leave it out, and of the best and the worst of four equal ones fewer."""
    draws = np.random.default_rng(num).normal(size=(400, 4, num))
    means = draws.mean(axis=2)
    alone = [interval(each[0]).leaves_out_0 for each in draws]
    picked = [each[mean.argmax()] - each[mean.argmin()] for each, mean in zip(draws, means, strict=True)]
    # Binomial(400, 0.05) is at most 34 with probability 0.999; the bootstrap has 200 of two and 46 of ten.
    assert 6 <= sum(alone) <= 34 and sum(interval(one, among=6).leaves_out_0 for one in picked) <= 34


def test_rounding_leaves_nothing_out() -> None:
    """An end at 5e-17, printed as 0, is not above 0; 1e-3 is."""
    assert not MeanInterval(9e-3, 5e-17, 0.02, 2).leaves_out_0 and MeanInterval(9e-3, 1e-3, 0.02, 2).leaves_out_0
    assert not MeanInterval(-9e-3, -0.02, -5e-17, 2).leaves_out_0


def test_one_problem_has_no_interval(config: FlowConfig, frame: pd.DataFrame) -> None:
    """Its means stand alone, and no sentence ranks objectives, however far apart they are; with two it does."""
    far = planted(frame, "none", "sharper, scale 0.3", 0.9)
    rank = frame["objective"].map({"none": 0.1, "token": 0.3, "centred": 0.2})
    far = far.assign(reward=rank + 0.01 * frame["problem"])
    one, two = far[far["problem"] == 1], far[far["problem"] > 0]
    assert len(turns(two)) == 1 and "Reward ends highest under" in " ".join(sentences(two))
    assert turns(one) == [] and headline(one) == "1 problem: no intervals, and no ranking of objectives"
    (scope,) = sentences(one)
    assert scope.startswith(f"{len(ends(one))} runs of exact expected updates on 1 problem, so without intervals")
    assert not interval(numbers(one[:1], "reward")).leaves_out_0
    cells = [text for row in table_rows(one) for text in row["cells"]]
    assert "0.31" in cells and not any("[" in text for text in cells)
    assert all("[" in row["cells"][0] for row in table_rows(two))
    assert [str(table.title).split("; ")[1] for table in terminal_tables(one)] == ["ends of runs on 1 problem"] * 2
    one.attrs = dict(frame.attrs)
    text = render(config, one, {"seed": 0}, "")
    assert "95% intervals of the mean over problems" not in text and "nan" not in json.dumps(payload(text)).lower()


def test_curves_and_maps_are_means_over_problems(frame: pd.DataFrame) -> None:
    """A line's point is the mean over problems of its rows, within its interval; a map's cell that of the ends."""
    part = focus(frame).query("kind == 'fixed'")
    points = dict(curves(part, "reward")["token"])
    own = part[part["objective"] == "token"]
    for update, one in points.items():
        values = own[own["update"] == update]["reward"]
        assert one.mean == pytest.approx(values.mean(), rel=1e-12) and one.num == 3
        assert one.mean - one.low == pytest.approx(one.high - one.mean) and one.low <= values.mean() <= one.high
    (heat,) = reward_maps(frame, 1.0)[1].data
    cell = ends(frame).query("objective == 'token' and kind == 'sharper' and N == 2")["reward"].mean()
    assert heat["text"][heat["y"].index("sharper, scale 0.3")][heat["x"].index("2")] == f"{cell:.3f}"
    assert reward_maps(frame[frame["N"] == 1], 1.0) == []


def test_the_page_is_whole_and_loads_nothing(html: str, frame: pd.DataFrame) -> None:
    """Tags balance, ids are unique, plotly.js is inside once, no element names an address; the words stand first."""
    ids = {figure for figure, _ in whole(html).plots}
    assert {"first-entropy-0", "first-reward-1", "portrait-1", "map-2", "entropy", "drift"} <= ids
    assert headline(frame).replace("'", "&#39;") in html


def test_the_first_picture_is_on_one_scale(html: str) -> None:
    """Panels of a row share their axis, so that engine errors can be compared; entropy's is logarithmic."""
    figures = {figure["id"]: figure for figure in payload(html)["figures"]}
    for name in ("entropy", "reward"):
        first, second = (figures[f"first-{name}-{i}"]["layout"]["yaxis"] for i in (0, 1))
        assert first["range"] == second["range"] and (first.get("type") == "log") == (name == "entropy")


def test_without_a_second_objective_or_n_the_page_is_there(config: FlowConfig, frame: pd.DataFrame) -> None:
    """One objective and one N: no comparison, no map, and a page as ever."""
    alone = frame.query("objective == 'none' and N == 1")
    alone.attrs = dict(frame.attrs)
    text = render(config, alone, {"seed": 0}, "")
    assert 'id="maps"' not in text and 'id="portrait-0"' in text and math.isfinite(alone["reward"].sum())


PROBE = """
const pick = document.querySelector('select.slice');
pick.value = "1"; pick.dispatchEvent(new Event("change"));
setTimeout(() => {
  const wide = document.documentElement;
  const plots = [...document.querySelectorAll('.plot')].filter((p) => !p.closest('figure').hidden);
  parent.postMessage({
    shown: plots.filter((p) => p.querySelector('.main-svg')).length, all: plots.length,
    rows: document.querySelectorAll('tbody tr:not([hidden])').length,
    overflow: wide.scrollWidth - wide.clientWidth,
    outside: plots.filter((p) => p.querySelector('.main-svg').getBoundingClientRect().width > p.clientWidth + 1).length,
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1280, False)])
def test_a_browser_shows_the_chosen_error(html: str, tmp_path: Path, width: int, is_dark: bool) -> None:
    """Another engine error redraws curves and table without a word on the console; nothing overflows."""
    found = probed(html, PROBE, tmp_path, width, is_dark)
    assert found["shown"] == found["all"] > 8 and found["rows"] == 3
    assert found["overflow"] == 0 and found["outside"] == 0
