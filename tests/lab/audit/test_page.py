"""Laws of the audit's words and page: they are the rows."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.audit import AuditConfig, medians
from lab.audit.config import CompareBlock
from lab.audit.page import render
from lab.audit.study import study
from lab.audit.table import at_longest, at_middle, numbers, ratios, tidy, where
from lab.audit.words import headline, sentences
from lab.config.load import to_yaml
from lab.report.style import number
from tests.lab.browser import payload, probed, whole

pytestmark = pytest.mark.unchecked


def test_the_summary_is_computed(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Its numbers follow the rows: with the biases of two objectives exchanged, their names change places."""
    said = " ".join(sentences(config, frame))
    assert "every expectation is an exact sum" in said and "least with sequence" in said and "token has less" in said
    swap = {"sequence": "grpo", "grpo": "sequence"}
    other = frame.assign(objective=frame["objective"].map(lambda name: swap.get(name, name)))
    assert "least with grpo" in " ".join(sentences(config, other))
    # The ranking's own rows are named, as its numbers are of these alone.
    (ranking,) = (one for one in sentences(config, frame) if "least with" in one)
    # Only the tabular policies have all four objectives: the 6 cases of the others would count for two of them alone.
    assert ranking.endswith("; medians over 6 cases, at T = 3, KL(mu || old) = 0.01, KL(old || pi) = 3e-3.")
    assert f"{len(frame):,} rows" in said
    # Some groups are finite, in which the length of a step means little.
    nearest = "is nearest to the true gradient in direction and"
    assert headline(frame) == f"Of 4 objectives, sequence {nearest} grpo furthest from it."
    assert headline(other) == f"Of 4 objectives, grpo {nearest} sequence furthest from it."
    infinite = where(frame, frame["group"] == "infinite")
    assert headline(infinite).startswith("Of 4 objectives, sequence is nearest to the true gradient and ")


def test_equal_objectives_share_their_place(config: AuditConfig, frame: pd.DataFrame) -> None:
    """A bound that never binds changes a name alone: both names stand at that end, or none is called nearest."""

    def beside(name: str, wanted: list[str]) -> pd.DataFrame:
        kept = where(frame, frame["objective"].isin(wanted))
        twin = where(kept, kept["objective"] == name).assign(objective="twin")
        return pd.concat([kept, twin])

    plain = config.model_copy(update={"compare": None})
    three = beside("sequence", ["sequence", "grpo"])
    truth = "to the true gradient in direction"
    assert headline(three) == f"Of 3 objectives, sequence and twin are nearest {truth} and grpo furthest from it."
    ranking, errors, *_ = sentences(plain, three)
    assert "least with sequence and twin (" in ranking and "sequence and twin at " in errors
    pair = beside("grpo", ["grpo"])
    assert headline(pair) == f"The 2 objectives are equally near {truth} (within 2%)."
    assert re.match(
        r"The bias is \S+ with grpo and twin; the bias that no rescaling removes is ", sentences(plain, pair)[0]
    )


def test_within_two_percent_nobody_is_furthest(frame: pd.DataFrame) -> None:
    """A twin whose bias is 1.9% larger shares its end, one of 2.1% does not."""
    kept = where(frame, frame["objective"].isin(["sequence", "grpo"]))
    furthest = where(kept, kept["objective"] == "grpo")
    bias = numbers(furthest, "direction_bias")

    def told(factor: float) -> str:
        return headline(pd.concat([kept, furthest.assign(objective="twin", direction_bias=bias * factor)]))

    assert told(1.019).endswith(" and grpo and twin furthest from it.")
    assert told(1.021).endswith(" in direction and twin furthest from it.")


def test_objectives_are_ranked_by_the_cases_that_they_share(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Biases of 1 in cases that another objective lacks make nobody worse; one without a shared case is left out."""
    alone = where(frame, frame["policy"].str.startswith("bigram"))
    worse = pd.concat([where(frame, frame["kind"] == "tabular"), alone.assign(bias=1.0, direction_bias=1.0)])
    shared, ranked = (sentences(config, one)[0] for one in (frame, worse))
    assert shared.partition("; medians")[0] == ranked.partition("; medians")[0]
    apart = pd.concat([
        where(frame, (frame["kind"] == "tabular") & (frame["objective"] != "grpo")),
        alone.assign(objective=alone["objective"].replace("token", "grpo")),
    ])  # fmt: skip
    told = sentences(config, apart)[0]
    assert told.endswith("KL(old || pi) = 3e-3, without grpo, which have other cases.") and "grpo (" not in told
    assert headline(apart).startswith("Of 3 objectives, sequence ")


def test_shares_are_of_the_cells_with_an_interval(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Two bigram policies have ratios alone: without them the shares are the same, and the words say so."""
    tabular = where(frame, frame["kind"] == "tabular")
    mixed, alone = (
        next(s for s in sentences(config, part) if s.startswith("With baseline mean")) for part in (frame, tabular)
    )
    assert " with an interval and more in " in mixed and "with an interval" not in alone
    shares = [re.findall(r"\d+%", one) for one in (mixed, alone)]
    assert shares[0] == shares[1] != ["0%", "0%"]


def test_few_policies_have_no_interval(config: AuditConfig, frame: pd.DataFrame) -> None:
    """The ratio alone, in words and in the study, with five policies; intervals with six."""
    assert config.compare is not None
    five = where(frame, frame["seed"] < 5)
    (said, *_) = (one for one in sentences(config, five) if one.startswith("With groups of 2"))
    assert said.endswith("fewer than 6 policies have no interval.") and "%" not in said
    assert "] |" not in study(config, five) and "** [" in study(config, frame)
    table = ratios(five, "token", "none")
    assert set(table["low"]) == {0.0} and set(table["high"]) == {math.inf}


def test_an_exact_objective_is_compared_in_words(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Against an objective without bias the median ratio is infinite or 0, and the maps' colours are at their ends."""
    part = where(frame, (frame["group"] == "infinite") & (frame["kind"] == "tabular"))
    for pair, ratio in ((("none", "sequence"), "∞"), (("sequence", "none"), "0")):
        compare = CompareBlock(first=pair[0], second=pair[1])
        exact = config.model_copy(update={"compare": compare})
        said = [one for one in sentences(exact, part) if "median ratio" in one]
        assert len(said) == 2 and all(one.endswith(f"The median ratio is {ratio}.") for one in said)
        maps = [f for f in payload(render(exact, part, {"seed": 0}, ""))["figures"] if f["id"].startswith("map-")]
        assert maps and all(abs(z) == 2 for f in maps for z in np.ravel(f["data"][0]["z"]))
        assert f"{ratio} [{ratio}, {ratio}]" in study(exact, part).replace("**", "")


def test_every_number_of_the_study_is_in_the_tables(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Its ratio cells are those of `ratios` at the middle staleness, bold exactly where the interval leaves out 1."""
    text = study(config, frame)
    table = ratios(frame, "token", "none")
    cells = re.findall(r"(\*\*)?([\d.e-]+)(?:\*\*)? \[([\d.e-]+), ([\d.e-]+)\]", text)
    # The two bigram policies have a ratio, and no interval.
    part = table[(table["asked_staleness"] == 3e-3) & table["policy"].str.startswith("tabular")]
    wanted = sorted((number(r["ratio"]), number(r["low"]), number(r["high"])) for r in part.to_dict("records"))
    assert sorted(tuple(c[1:]) for c in cells) == wanted
    assert sum(bool(c[0]) for c in cells) == ((part["high"] < 1) | (part["low"] > 1)).sum()
    with pytest.raises(ValueError, match="compare: expected two objectives"):
        study(config.model_copy(update={"compare": None}), frame)


@pytest.fixture(scope="module")
def html(config: AuditConfig, frame: pd.DataFrame) -> str:
    """The page."""
    return render(config, frame, {"seed": 0, "versions": {"torch": "2"}}, to_yaml(config))


FIGURES = {"bias-overview", "bias-kl", "direction-kl", "bias-length", "error-n", "split", "trade-off"}


def test_the_page_is_whole_and_loads_nothing(html: str) -> None:
    """Tags balance, ids are unique, plotly.js is inside once, and no element names an address."""
    figures = {figure for figure, _ in whole(html).plots}
    assert figures >= FIGURES and len(figures - FIGURES) == 12  # 2 policies x 2 rewards x 3 groups


def test_the_curves_are_the_medians(html: str, frame: pd.DataFrame) -> None:
    """The line of an objective on the bias figure has the medians at the middle staleness of the longest responses."""
    figure = next(f for f in payload(html)["figures"] if f["id"] == "bias-kl" and f["slice"] == "0/0/1")
    line = next(t for t in figure["data"] if t["name"] == "token" and t["meta"]["role"] == "line")
    found = medians(frame).query(
        "policy == 'tabular, 2 tokens' and length == 3 and reward == 'sparse' and group == 'infinite' "
        "and baseline == 'mean' and objective == 'token' and asked_staleness == 3e-3"
    )
    assert line["x"] == sorted(found["kl_mu_pi"]) and sorted(line["y"]) == sorted(found["bias"])


def test_the_picture_is_sorted_and_computed(html: str, frame: pd.DataFrame) -> None:
    """Dots are the medians over cases of each objective's bias, lines the quartiles, the least biased on top."""
    figure = next(f for f in payload(html)["figures"] if f["id"] == "bias-overview")
    found = at_middle(at_longest(medians(frame)))
    dots = {t["name"]: t for t in figure["data"] if t["meta"]["role"] == "line" and t["mode"] == "markers"}
    lines = {t["name"]: t for t in figure["data"] if t["mode"] == "lines"}
    each = {name: part["bias"].to_numpy() for name, part in found.groupby("objective")}
    for name, values in each.items():
        low, centre, high = (tidy(float(q)) for q in np.quantile(values, (0.25, 0.5, 0.75)))
        assert not centre or dots[name]["x"] == [centre]
        assert lines[name]["x"][1] == high and (not low or lines[name]["x"][0] == low)
    order = figure["layout"]["yaxis"]["categoryarray"]
    assert order == sorted(each, key=lambda name: -tidy(float(np.median(each[name]))))


PROBE = """
const pick = [...document.querySelectorAll('select.slice')];
pick[0].value = "1"; pick[0].dispatchEvent(new Event("change"));
setTimeout(() => {
  const wide = document.documentElement;
  const plots = [...document.querySelectorAll('.plot')].filter((p) => !p.closest('figure').hidden);
  parent.postMessage({
    drawn: wide.dataset.drawn, shown: plots.filter((p) => p.querySelector('.main-svg')).length,
    rows: document.querySelectorAll('tbody tr:not([hidden])').length,
    names: [...document.querySelectorAll('.run')].filter((b) => !b.hidden).map((b) => b.textContent.trim()),
    overflow: wide.scrollWidth - wide.clientWidth,
    outside: plots.filter((p) => p.querySelector('.main-svg').getBoundingClientRect().width > p.clientWidth + 1).length,
    cut: [...document.querySelectorAll('.xtitle, .ytitle')].filter((title) => {
      const own = title.getBoundingClientRect(), all = title.closest('.plot').getBoundingClientRect();
      return own.left < all.left || own.right > all.right || own.top < all.top || own.bottom > all.bottom;
    }).map((title) => title.textContent),
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1280, False)])
def test_a_browser_shows_one_slice_at_a_time(html: str, tmp_path: Path, width: int, is_dark: bool) -> None:
    """Choosing other policies redraws figures, table and legend without a word on the console; nothing is cut off."""
    found = probed(html, PROBE, tmp_path, width, is_dark)
    # The bigram policies have one length, so no figure over lengths, and two objectives at four pairs of distances.
    assert int(found["drawn"]) == found["shown"] == len(FIGURES) - 1 + 12
    assert found["names"] == ["none", "token"] and found["rows"] == 8
    assert found["overflow"] == 0 and found["outside"] == 0 and found["cut"] == []
