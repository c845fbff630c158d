"""Laws of the report: it shows what is recorded and nothing else, loads nothing, and a real browser draws all of it."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from lab.records import RunFolder
from lab.report.run_page import render, write_report
from lab.report.runs import load_runs
from lab.report.sections import SECTIONS, metric_words
from lab.report.style import PALETTE
from tests.lab.browser import Page, payload, probed, whole
from tests.lab.synthetic_runs import DEMO, write_demo
from theory.metrics import REGISTRY

EXPECTED = {
    "reward", "accuracy", "k3-kl", "extreme-fraction", "effective-sample-size", "truncated-fraction",
    "probability-scatter", "extreme-curve", "entropy", "grad-norm", "clip-high", "clip-low", "staleness-kl",
    "response-length", "router-disagreement", "token-disagreement", "topk-agreement", "route-kl",
    "router-difference", "token-level-difference", "sequence-level-difference", "deviation-tails", "ratio-parts",
    "token-difference", "token-map", "predictor-loss",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Seven finished runs, of which two collapsed."""
    return write_demo(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def html(runs: list[RunFolder]) -> str:
    """Their report."""
    return render(runs)


def test_the_page_is_well_formed_and_whole(html: str) -> None:
    """Tags balance, ids are unique, every expected figure has its place, and plotly.js is inside exactly once."""
    assert {figure for figure, _ in whole(html).plots} == EXPECTED


def test_the_page_loads_nothing(html: str) -> None:
    """No style names an address, as no element does, and the page forbids itself every load."""
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in styles and "@import" not in styles
    assert "default-src 'none'" in html


PROBE = """
document.querySelector('.run[data-run="1"]').click();
setTimeout(() => {
  const plots = [...document.querySelectorAll('.plot')];
  const colours = plots.flatMap((p) => p.data).filter((t) => t.meta.run === 0).map((t) => (t.line ?? t.marker).color);
  const wide = document.documentElement;
  parent.postMessage({
    drawn: wide.dataset.drawn, figures: plots.filter((p) => p.querySelector('.main-svg')).map((p) => p.id),
    hidden: [...new Set(plots.flatMap((p) => p.data).filter((t) => t.visible === false).map((t) => t.meta.run))],
    shown: [...new Set(plots.flatMap((p) => p.data).filter((t) => t.visible === true).map((t) => t.meta.run))].sort(),
    labels: plots.flatMap((p) => p.layout.annotations).filter((a) => a.visible && a.name.startsWith('run-1')).length,
    named: document.getElementById('reward').layout.annotations.filter((a) => a.visible).map((a) => a.text),
    colours: [...new Set([...colours, ...plots.flatMap((p) => p.data).map((t) => (t.marker ?? t.line).color)])].sort(),
    overflow: wide.scrollWidth - wide.clientWidth,
    outside: plots.filter((p) => p.querySelector('.main-svg').getBoundingClientRect().width > p.clientWidth + 1).length,
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "is_dark"), [(400, False), (1280, True)])
def test_a_browser_draws_every_figure_and_hides_a_run(html: str, tmp_path: Path, width: int, is_dark: bool) -> None:
    """On a phone and on a desk, light and dark: every figure is drawn, without a word on the console (no error, no
    refused load); a run hides everywhere at once, nothing overflows, colours follow."""
    found = probed(html, PROBE, tmp_path, width, is_dark)
    assert found["drawn"] == str(len(EXPECTED)) and set(found["figures"]) == EXPECTED
    assert found["hidden"] == [1] and found["shown"] == [0, 2, 3, 4, 5, 6] and found["labels"] == 0
    # The large picture names its lines on a phone too, in fewer words.
    fallen = "r2 ✕" if width == 400 else "r2 ✕ step 3"
    assert len(found["named"]) == 6 and sum(text.startswith(fallen) for text in found["named"]) == 1
    assert found["overflow"] == 0 and found["outside"] == 0
    inks = [ink.line_dark if is_dark else ink.line for ink in PALETTE[: len(DEMO)]]
    assert found["colours"] == sorted(inks)


def test_figures_are_valid_plotly(html: str) -> None:
    """plotly's own schema accepts every trace and layout, so a misspelt key cannot pass unseen."""
    for figure in payload(html)["figures"]:
        go.Figure(data=figure["data"], layout=figure["layout"])


def test_the_curves_are_the_records(runs: list[RunFolder], html: str) -> None:
    """Each line, or the faint one under a trailing mean, is the recorded steps and values; zeros are on the floor."""
    figures = {figure["id"]: figure for figure in payload(html)["figures"]}
    names = {
        "router-disagreement": "routing/router_disagreement",
        "accuracy": "eval/accuracy",
        "k3-kl": "rollout_corr/k3_kl",
    }
    for figure, name in names.items():
        traces = [trace for trace in figures[figure]["data"] if trace["meta"]["role"] != "collapse"]
        raw = [trace for trace in traces if trace["meta"]["role"] == "raw"] or traces
        assert len(raw) == len(runs)
        for trace in raw:
            records = [r for r in runs[trace["meta"]["run"]].metrics() if name in r]
            assert trace["x"] == [r["step"] for r in records]
            drawn = [y for y, r in zip(trace["y"], records, strict=True) if r[name] != 0 or figure != "k3-kl"]
            assert drawn == [r[name] for r in records if r[name] != 0 or figure != "k3-kl"]


def test_every_curve_has_the_collapse_and_its_rule(runs: list[RunFolder], html: str) -> None:
    """On each line figure a collapsed run's cross stands at its first step, on its curve, and hovering tells the rule.

    The curve is joined linearly in the axis's own terms; 1e-6 of the axis is far less than a pixel.
    """
    figures = {figure["id"]: figure for figure in payload(html)["figures"]}
    for name in ("reward", "accuracy", "k3-kl", "entropy", "router-disagreement"):
        is_log = figures[name]["layout"]["yaxis"].get("type") == "log"
        traces = figures[name]["data"]
        crosses = {t["meta"]["run"]: t for t in traces if t["meta"]["role"] == "collapse"}
        assert sorted(crosses) == [1, 2]
        for run, cross in crosses.items():
            verdict = runs[run].verdict()
            assert verdict is not None and cross["x"] == [verdict["first_step"]]
            assert "collapsed: the KL between mu and old rose" in cross["customdata"][0].replace("<br>", " ")
            (line,) = (t for t in traces if t["meta"] == {"run": run, "role": "line"})
            heights = np.log10(line["y"]) if is_log else np.array(line["y"])
            wanted = np.interp(cross["x"][0], line["x"], heights)
            drawn = math.log10(cross["y"][0]) if is_log else cross["y"][0]
            assert abs(drawn - wanted) < 1e-6


def test_bold_curves_are_means_and_on_a_log_axis_medians(runs: list[RunFolder], html: str) -> None:
    """Either is of the last values of the records, a fifteenth of the run wide, and the note says which."""
    figures = {figure["id"]: figure for figure in payload(html)["figures"]}
    for name, metric, level in (
        ("k3-kl", "rollout_corr/k3_kl", statistics.median), ("entropy", "actor/entropy", statistics.fmean)
    ):  # fmt: skip
        values = [row[metric] for row in runs[4].metrics()]
        (line,) = (t for t in figures[name]["data"] if t["meta"] == {"run": 4, "role": "line"})
        expected = [level(values[max(0, i - 3) : i + 1]) for i in range(60)]
        assert line["y"] == pytest.approx(expected, rel=1e-12)  # rounding of float64 sums
        assert f"bold: trailing {level.__name__.removeprefix('f')} of 4 steps." in _note(html, name)


def test_a_spike_draws_no_plateau_on_a_log_axis(tmp_path: Path) -> None:
    """One gradient norm a thousand times the others moves no bold point to more than the largest of the others."""
    (run,) = write_demo(tmp_path, DEMO[4:5])
    path = run.path / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[30]["actor/grad_norm"] *= 1e3
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    others = [row["actor/grad_norm"] for row in rows[:30] + rows[31:]]
    (figure,) = (figure for figure in payload(render([run]))["figures"] if figure["id"] == "grad-norm")
    raw, line = (next(t for t in figure["data"] if t["meta"]["role"] == role)["y"] for role in ("raw", "line"))
    assert max(raw) == rows[30]["actor/grad_norm"] > 100 * max(others) and max(line) <= max(others)


def _note(html: str, figure: str) -> str:
    """The text under a figure."""
    return re.sub(r"<[^>]+>", "", html.split(f'id="{figure}"')[1].split("</figure>")[0])


def test_the_time_of_a_step_is_shown_where_it_was_taken(tmp_path: Path) -> None:
    """Bars of the mean seconds of the recorded parts, in the order of a step; no panel without any."""
    (run,) = write_demo(tmp_path, DEMO[:1], num_steps=2)
    assert "time-parts" not in render([run])
    for step, seconds in ((3, 2.0), (4, 4.0)):
        row = {"timing_s/step": 3 * seconds, "timing_s/update_actor": 2 * seconds, "timing_s/gen": seconds}
        run.append_metrics(step, row)
    figures = {figure["id"]: figure for figure in payload(render([run]))["figures"]}
    assert figures["step-time"]["data"][0]["y"] == [6.0, 12.0]
    (bars,) = figures["time-parts"]["data"]
    assert (bars["x"], bars["y"]) == (["sampling", "updates"], [3.0, 6.0])


def test_no_data_is_absent_and_zero_is_told(tmp_path: Path) -> None:
    """A metric without values has no figure; one that is 0 in every run is named in one line; a run that lacks a metric
    is not in the others' figure."""
    first, second = write_demo(tmp_path, (DEMO[0], DEMO[3]), num_steps=5)
    html = render([first, second])
    found = {figure["id"]: figure for figure in payload(html)["figures"]}
    assert "predictor-loss" not in found and "native-rows" not in found and "not drawn" not in html
    assert {trace["meta"]["run"] for trace in found["truncated-fraction"]["data"]} == {1}
    assert found["k3-kl"]["layout"]["yaxis"]["ticktext"].count("0") == 1 and "annotations" in found["k3-kl"]["layout"]
    html = render([first])
    assert not {"k3-kl", "extreme-fraction", "extreme-curve"} & {figure["id"] for figure in payload(html)["figures"]}
    (line,) = re.findall(r"not drawn: (.*?)</p>", html.split('id="discrepancy"')[1].split("</section>")[0])
    assert re.sub(r"<[^>]+>", "", line) == (
        "KL between rollout and training engine; Extreme tokens, F(2) and Extreme tokens by threshold."
    )


def test_every_caption_comes_from_the_registry(html: str) -> None:
    """Each line figure prints the registered formula and source of its metric."""
    text = re.sub(r"</?a\b[^>]*>", "", html)
    text = text.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&").replace("&#39;", "'")
    for section in SECTIONS:
        for figure in section.figures:
            name = getattr(figure, "name", None)
            if name is not None and figure.id in EXPECTED:
                assert f"<code>{name}</code> {REGISTRY[name].formula}" in text


def test_a_metric_has_the_reports_words_elsewhere(html: str) -> None:
    """Those of the figure that draws it, with the registered unit; there are none for a metric without a figure."""
    names = ["reward/mean", "rollout_corr/k3_kl", "actor/grad_norm"]
    assert [metric_words(name) for name in names] == [
        "Reward in training [reward]", "KL between rollout and training engine [nats/token]", "Gradient norm [1]",
    ]  # fmt: skip
    assert all(metric_words(name).partition(" [")[0] in html for name in names)
    with pytest.raises(KeyError, match="replay_bias"):
        metric_words("replay_bias")


def test_remarks_on_a_stable_run_are_printed(tmp_path: Path) -> None:
    """After the reasons; a folder of former rules, whose verdict has no remarks, is a page all the same."""
    (run,) = write_demo(tmp_path, DEMO[:1], num_steps=20)
    path = run.path / "verdict.json"
    verdict = json.loads(path.read_text())
    assert verdict["verdict"] == "stable" and verdict["remarks"] == []
    path.write_text(json.dumps(verdict | {"remarks": ["The reward ends at 0.2."]}))
    assert "</b> The reward ends at 0.2.</li>" in render([run])
    former = {name: verdict[name] for name in ("stable", "verdict", "first_step", "reasons", "undecided")}
    path.write_text(json.dumps(former | {"summary": {"num_steps": 20}}))
    assert Page(render([run])).open == [] and load_runs([run])[0].remarks == []


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    """No metrics, no verdict, an engine of another world, markup in a name: still a whole page, nothing injected."""
    (tmp_path / "config.yaml").write_text("name: '<b>x</b></script>'\nengine: {name: vllm}\n")
    page = Page(render([RunFolder(tmp_path)]))
    assert page.open == [] and page.plots == []
    with pytest.raises(ValueError, match="got none"):
        render([])


def test_markup_in_the_records_ends_no_script(tmp_path: Path) -> None:
    """A name with a closing script tag stays text in the table and in the drawn data."""
    runs = write_demo(tmp_path, DEMO[:2], num_steps=5)
    config = runs[0].path / "config.yaml"
    config.write_text(config.read_text().replace("name: demo-exact", "name: '</script><script>alert(1)</script>'"))
    html = render(runs)
    assert "<script>alert" not in html and Page(html).open == []


def test_the_file_is_written_whole(runs: list[RunFolder], html: str, tmp_path: Path) -> None:
    """write_report writes what render returns: the same runs give the same bytes."""
    write_report(runs, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == html
