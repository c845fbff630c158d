"""Laws of the report: it shows what is recorded and nothing else, loads nothing, and a real browser draws all of it."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.records import RunFolder
from lab.report.figures import PLOT_HEIGHT, Scale
from lab.report.run_page import render, write_report
from lab.report.runs import load_runs, shared_prefix
from lab.report.sections import SECTIONS
from lab.report.style import PALETTE, number, spread
from tests.lab.synthetic_runs import DEMO, write_demo
from theory.metrics import REGISTRY

EXPECTED = {
    "reward", "accuracy", "k3-kl", "extreme-fraction", "effective-sample-size", "truncated-fraction",
    "probability-scatter", "extreme-curve", "entropy", "grad-norm", "clip-high", "clip-low", "staleness-kl",
    "response-length", "router-disagreement", "token-disagreement", "topk-agreement", "route-kl", "native-rows",
    "router-difference", "token-level-difference", "sequence-level-difference", "deviation-tails", "ratio-parts",
    "token-difference", "token-map", "predictor-loss",
}  # fmt: skip
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The parts of a page that tests read: balanced tags, ids, addresses, and how often plotly drew in each figure."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.plots: list[tuple[str, int]] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.drawings: dict[str, int] = {}
        self.root: dict[str, str | None] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "html":
            self.root = found
        classes = (found.get("class") or "").split()
        if "id" in found and "drawn" not in classes:
            self.ids.append(found["id"] or "")
        self.addresses += [found[name] or "" for name in ("src", "href", "data", "action") if name in found]
        if "plot" in classes:
            self.plots.append((found["id"] or "", len(self.open)))
            self.drawings[found["id"] or ""] = 0
        if "main-svg" in classes and self.plots:
            self.drawings[self.plots[-1][0]] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Seven finished runs, of which two collapsed."""
    return write_demo(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def html(runs: list[RunFolder]) -> str:
    """Their report."""
    return render(runs)


def payload(html: str) -> dict[str, Any]:
    """The data that the page's script draws."""
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran in Chromium, and every line that it wrote to the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "this test draws the report in a real browser: apt-get install -y chromium"
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=20000 --enable-logging=stderr --dump-dom"
    )
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(html: str, script: str) -> str:
    """The page with a script at its end."""
    return html.replace("</body>", f"<script>{script}</script></body>")


def test_the_page_is_well_formed_and_whole(html: str) -> None:
    """Tags balance, ids are unique, every expected figure has its place, and plotly.js is inside exactly once."""
    page = Page(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert {figure for figure, _ in page.plots} == EXPECTED
    assert html.count("plotly.js v") == 1


def test_the_page_loads_nothing(html: str) -> None:
    """No element names an address, no style does, and the page forbids itself every load."""
    page = Page(html)
    assert [a for a in page.addresses if not a.startswith(("data:", "#"))] == []
    styles = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in styles and "@import" not in styles
    assert "default-src 'none'" in html


def test_a_browser_draws_every_figure_without_a_word(html: str, tmp_path: Path) -> None:
    """Chromium draws into every figure and writes nothing to the console: no error, no refused load."""
    path = tmp_path / "report.html"
    path.write_text(html)
    dom, console = browse(path, tmp_path)
    page = Page(dom)
    assert console == []
    assert page.root.get("data-drawn") == str(len(EXPECTED))
    assert set(page.drawings) == EXPECTED and min(page.drawings.values()) >= 1


PROBE = """
document.querySelector('.run[data-run="1"]').click();
setTimeout(() => {
  const plots = [...document.querySelectorAll('.plot')];
  const colours = plots.flatMap((p) => p.data).filter((t) => t.meta.run === 0).map((t) => (t.line ?? t.marker).color);
  const wide = document.documentElement;
  parent.postMessage({
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
FRAME = """<!doctype html><html><body><iframe src="report.html" style="width:{width}px;height:900px"></iframe><script>
addEventListener("message", (e) => {{ document.body.dataset.found = JSON.stringify(e.data); }});
</script></body></html>"""


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1280, "dark")])
def test_runs_can_be_hidden_and_the_page_fits(html: str, tmp_path: Path, width: int, scheme: str) -> None:
    """On a phone and on a desk, light and dark: a run hides everywhere at once, nothing overflows, colours follow."""
    (tmp_path / "report.html").write_text(with_script(html, PROBE))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    dom, console = browse(tmp_path / "frame.html", tmp_path, "--window-size=1400,1000", *dark)
    found = json.loads(attribute_in(dom, "data-found"))
    assert console == []
    assert found["hidden"] == [1] and found["shown"] == [0, 2, 3, 4, 5, 6] and found["labels"] == 0
    # The large picture names its lines on a phone too, in fewer words.
    fallen = "r2 ✕" if width == 400 else "r2 ✕ step 3"
    assert len(found["named"]) == 6 and sum(text.startswith(fallen) for text in found["named"]) == 1
    assert found["overflow"] == 0 and found["outside"] == 0
    inks = [ink.line_dark if scheme == "dark" else ink.line for ink in PALETTE[: len(DEMO)]]
    assert found["colours"] == sorted(inks)


def attribute_in(dom: str, name: str) -> str:
    """The value of an attribute in a dumped page."""
    found = re.search(rf'{name}="([^"]*)"', dom)
    assert found is not None
    return found.group(1).replace("&quot;", '"')


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


def test_the_kl_is_smoothed(runs: list[RunFolder], html: str) -> None:
    """The bold KL curve is the trailing mean of the records, a fifteenth of the run wide."""
    (figure,) = (figure for figure in payload(html)["figures"] if figure["id"] == "k3-kl")
    values = [row["rollout_corr/k3_kl"] for row in runs[4].metrics()]
    (line,) = (t for t in figure["data"] if t["meta"] == {"run": 4, "role": "line"})
    expected = [sum(values[max(0, i - 3) : i + 1]) / len(values[max(0, i - 3) : i + 1]) for i in range(60)]
    assert line["y"] == pytest.approx(expected, rel=1e-12)  # rounding of float64 sums


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


def test_no_data_is_absent_and_zero_is_shown(tmp_path: Path) -> None:
    """A metric without values has no figure, one that is 0 has; a run that lacks it is not in the others' figure."""
    first, second = write_demo(tmp_path, (DEMO[0], DEMO[3]), num_steps=5)
    found = {figure["id"]: figure for figure in payload(render([first, second]))["figures"]}
    assert "predictor-loss" not in found and "native-rows" not in found
    assert {trace["meta"]["run"] for trace in found["truncated-fraction"]["data"]} == {1}
    assert found["k3-kl"]["layout"]["yaxis"]["ticktext"].count("0") == 1
    alone = {figure["id"]: figure for figure in payload(render([first]))["figures"]}
    assert alone["k3-kl"]["data"][0]["y"] == [0.0] * 5 and "annotations" not in alone["k3-kl"]["layout"]


def test_every_caption_comes_from_the_registry(html: str) -> None:
    """Each line figure prints the registered formula and source of its metric."""
    text = re.sub(r"</?a\b[^>]*>", "", html)
    text = text.replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&").replace("&#39;", "'")
    for section in SECTIONS:
        for figure in section.figures:
            name = getattr(figure, "name", None)
            if name is not None and figure.id in EXPECTED:
                assert f"<code>{name}</code> {REGISTRY[name].formula}" in text


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


@given(st.lists(st.floats(-50, 300), min_size=1, max_size=12))
@example([100.0, 100.0, 105.0])
@example([60.0, 150.0, 152.0, 61.0, 200.0])
def test_labels_never_overlap(positions: list[float]) -> None:
    """Spread labels keep their order and their distance, stay inside, and move around their own mean, if at all."""
    gap, low, high = 14.0, 0.0, 230.0
    placed = spread(positions, gap, low, high)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    steps = [placed[b] - placed[a] for a, b in itertools.pairwise(order)]
    # 1e-9: pixels after a few additions in float64.
    assert all(step >= gap - 1e-9 for step in steps)
    assert min(placed) >= low - 1e-9 and max(placed) <= high + 1e-9
    free = all(low <= p <= high for p in positions) and all(
        positions[b] - positions[a] >= gap for a, b in itertools.pairwise(order)
    )
    assert not free or placed == positions
    if low + 1e-9 < min(placed) and max(placed) < high - 1e-9:
        assert math.isclose(sum(placed), sum(positions), rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20), st.sampled_from(["linear", "log"]))
def test_every_value_is_inside_its_axis(values: list[float], axis: str) -> None:
    """Whatever the values, each is drawn between the ends of the plot, and a larger one never lower."""
    values = [value if value > 1e-12 else 0.0 for value in values]
    scale = Scale.of(values, axis)
    pixels = [scale.pixels(value) for value in sorted(values)]
    assert pixels == sorted(pixels) and pixels[0] >= 0 and pixels[-1] <= PLOT_HEIGHT
    ticks = scale.axis().get("tickvals", [])
    assert all(scale.low <= math.log10(tick) <= scale.high for tick in ticks)


@given(st.floats(1e-6, 1e3), st.floats(1.3, 1e6))
def test_a_log_axis_can_be_read(low: float, factor: float) -> None:
    """An axis over any range from a factor of 1.3 on has at least three ticks, and at most one per 12 pixels."""
    assert 3 <= len(Scale.of([low, low * factor], "log").axis()["tickvals"]) <= PLOT_HEIGHT / 12


NUMBERS: list[tuple[float | int | None, str]] = [
    (None, "–"), (0.0, "0"), (3, "3"), (0.8314, "0.831"), (12.345, "12.3"), (3.4e-4, "3.4e-4"), (2e-3, "2e-3"),
    (-0.05, "-0.05"), (123456.7, "1.2e5"), (1234.5, "1234"), (0.99996, "1"),
    (math.nan, "–"), (math.inf, "∞"), (-math.inf, "-∞"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_have_the_digits_they_deserve(value: float | int | None, text: str) -> None:
    """Three significant digits, two for powers of ten, a dash for no data and never for 0; infinity has its sign."""
    assert number(value) == text


PREFIXES: list[tuple[list[str], str]] = [
    (["demo-exact", "demo-none"], "demo-"), (["demo-r3", "demo-r3-tis"], "demo-"), (["a", "b"], ""), (["one"], ""),
    (["demo", "demo-x"], ""),
]  # fmt: skip


@pytest.mark.parametrize(("names", "prefix"), PREFIXES)
def test_labels_leave_out_what_all_names_share(names: list[str], prefix: str) -> None:
    """The shared beginning ends at a hyphen, and something remains of every name."""
    assert shared_prefix(names) == prefix and all(len(name) > len(prefix) for name in names)


CLASHES: dict[str, Callable[[str], str]] = {
    "seeds": lambda config: config.replace("demo-none", "demo-exact"),
    "nothing but the time": lambda config: config.replace("demo-none", "demo-exact").replace("seed: 1", "seed: 0"),
}


@pytest.mark.parametrize("differ_by", CLASHES)
def test_runs_of_one_name_are_told_apart(tmp_path: Path, differ_by: str) -> None:
    """Two runs of one config name never share a label: the seed tells them apart, or else the folder."""
    runs = write_demo(tmp_path, DEMO[:2], num_steps=5)
    config = runs[1].path / "config.yaml"
    config.write_text(CLASHES[differ_by](config.read_text()))
    labels = [run.label for run in load_runs(runs)]
    assert len(set(labels)) == 2 and all(labels)
