"""Laws of the report's pictures by token: they count what the trace holds, and nothing of what it lacks."""

from __future__ import annotations

import html
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from lab.report.pictures import ROUTING_LEVELS, deviation_tails, ratio_parts
from lab.report.runs import ReportRun, load_runs
from lab.report.scale import MARGIN
from lab.report.tokens import (
    COLUMNS,
    MOST_TOKENS,
    ROW_HEIGHT,
    differences_of,
    mean_by_token,
    token_difference,
    token_map,
)
from lab.traces import Trace
from tests.lab.synthetic_runs import DEMO, write_demo


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ReportRun]:
    return load_runs(write_demo(tmp_path_factory.mktemp("runs"), DEMO, num_steps=3))


def by_hand(trace: Trace) -> dict[int, list[int]]:
    """d of every input token, counted response by response and layer by layer."""
    found = defaultdict(list)
    mu, old = trace.record_mu, trace.record_old
    assert mu is not None and old is not None
    for b in range(len(trace)):
        tokens = trace.tokens[int(trace.offsets[b]) : int(trace.offsets[b + 1])].tolist()
        for s, (row_mu, row_old) in enumerate(zip(mu.rows(b).tolist(), old.rows(b).tolist(), strict=True)):
            if all(layer[0] >= 0 for layer in (*row_mu, *row_old)):
                found[tokens[s]].append(sum(len(set(x) - set(y)) for x, y in zip(row_mu, row_old, strict=True)))
    return found


def test_differences_by_token_are_counted(runs: list[ReportRun]) -> None:
    """The mean of each token is over its places as an input, the last token of a response being none."""
    trace = runs[1].newest_trace
    assert trace is not None
    differences = differences_of(trace)
    assert differences is not None
    wanted = by_hand(trace)
    means = mean_by_token(differences.token_R, differences.d_R)
    assert means == pytest.approx({token: sum(d) / len(d) for token, d in wanted.items()})
    figure = token_difference(runs)
    assert figure is not None
    bars = {trace["meta"]["run"]: trace for trace in figure.data}
    assert set(bars) == {run.index for run in runs} and len(bars[1]["x"]) == MOST_TOKENS
    tops = [max(bar["y"][i] for bar in bars.values()) for i in range(MOST_TOKENS)]
    assert tops == sorted(tops, reverse=True)
    assert len(set(bars[1]["x"])) == MOST_TOKENS


def test_rare_tokens_have_no_mean() -> None:
    """A token on fewer than 0.02% of the rows is left out; one on exactly that share is in."""
    tokens = torch.tensor([0] * 9996 + [1] + [2] * 3)
    d = torch.ones(10_000, dtype=torch.float64)
    assert set(mean_by_token(tokens, d)) == {0, 2}
    assert set(mean_by_token(tokens[1:5001], d[1:5001])) == {0}


def test_missing_rows_are_no_agreement(runs: list[ReportRun]) -> None:
    """A row that either engine lacks at some layer is in no mean; a trace without experts has no picture."""
    trace = runs[1].newest_trace
    assert trace is not None and trace.experts_mu is not None
    experts = trace.experts_mu.clone()
    experts[5, 1] = -1
    holed = Trace(**(vars(trace) | {"experts_mu": experts}))
    found = differences_of(holed)
    assert found is not None and len(found.d_R) == len(experts) - 1
    assert mean_by_token(found.token_R, found.d_R) == pytest.approx(
        {t: sum(d) / len(d) for t, d in by_hand(holed).items()}
    )
    bare = Trace(**(vars(trace) | {"experts_mu": None}))
    assert differences_of(bare) is None


def test_the_map_is_of_the_response_that_differs_most(runs: list[ReportRun]) -> None:
    """The map begins with that response's prompt, in rows of COLUMNS, the colour rising with d."""
    figure = token_map(runs)
    assert figure is not None
    (cells,) = figure.data
    trace = runs[cells["meta"]["run"]].newest_trace
    assert trace is not None
    differences = differences_of(trace)
    assert differences is not None
    d_R, b_R = differences.d_R, differences.response_R
    means = [float(d_R[b_R == b].mean()) for b in range(len(trace))]
    b = means.index(max(means))
    assert f"response {b}," in figure.note
    d = d_R[b_R == b].tolist()[: len(cells["x"])]
    assert cells["y"] == [-(i // COLUMNS) for i in range(len(d))]
    assert [round(0.05 + 0.75 * x / max(d), 3) for x in d] == cells["marker"]["opacity"]
    names = [text.split(" (")[0] for text in cells["customdata"]]
    first = trace.tokens[int(trace.offsets[b])].item()
    shown = html.escape(trace.texts.get(first, f"⟨{first}⟩").replace(" ", "␣").replace("\n", "↵"), quote=False)
    assert names[0] == shown


def test_the_map_is_as_high_as_its_rows(runs: list[ReportRun]) -> None:
    """Every row of cells takes the same height, whatever their number, and nothing is left below the last one."""
    figure, trace = token_map(runs), runs[1].newest_trace
    assert figure is not None and trace is not None
    rows = len(set(figure.data[0]["y"]))
    low, high = figure.layout["yaxis"]["range"]
    assert rows == 3 and high - low == pytest.approx(rows + 0.2) and low < -(rows - 1)
    inside = figure.height - MARGIN["t"] - figure.layout["margin"]["b"]
    assert inside / (high - low) == pytest.approx(ROW_HEIGHT, rel=0.01)  # whole pixels


def in_turns(trace: Trace, b: int, gap: tuple[int, ...]) -> Trace:
    """The trace with observations at the places `gap` of response b, which alone differs and lacks mu's row 20."""
    num_prompt, S = int(trace.num_prompt[b]), int(trace.offsets[b + 1] - trace.offsets[b])
    is_response = trace.is_response.clone()
    is_response[[b * (S - num_prompt) + t - num_prompt for t in gap]] = False
    assert trace.experts_mu is not None and trace.experts_old is not None
    mu, old = trace.experts_mu.clone(), trace.experts_mu.clone()
    old[b * (S - 1) : (b + 1) * (S - 1)] = trace.experts_old[b * (S - 1) : (b + 1) * (S - 1)]
    mu[b * (S - 1) + 20] = -1
    return Trace(**(vars(trace) | {"is_response": is_response, "experts_mu": mu, "experts_old": old}))


def test_observations_are_framed_and_no_token_is_moved(runs: list[ReportRun], tmp_path: Path) -> None:
    """The map says of each token where it comes from, also behind a lost row; observations alone are framed."""
    trace = runs[1].newest_trace
    assert trace is not None
    b, gap = 3, (16, 17, 30)
    turns = in_turns(trace, b, gap)
    (folder,) = write_demo(tmp_path, DEMO[1:2], num_steps=1)
    folder.save_trace(2, turns)
    figure = token_map(load_runs([folder]))
    assert figure is not None and f"response {b}," in figure.note and "framed" in figure.note
    cells, frames = figure.data
    start, num_prompt = int(turns.offsets[b]), int(turns.num_prompt[b])
    S = int(turns.offsets[b + 1]) - start
    positions = [s for s in range(S - 1) if s != 20]
    sources = ["prompt" if s < num_prompt else "answered by the task" if s in gap else "sampled" for s in positions]
    assert [re.findall(r"\(([a-z ]+)\): ", text)[0] for text in cells["customdata"]] == sources
    assert [text.startswith("<b>") for text in cells["text"]] == [source == "sampled" for source in sources]
    letters = [turns.texts.get(int(turns.tokens[start + s]), "") for s in positions]
    for letter, text in zip(letters, cells["text"], strict=True):
        assert html.unescape(text.removeprefix("<b>").removesuffix("</b>")) == (
            letter[:2].replace(" ", "␣").replace("\n", "↵") or "□"
        )
    framed = list(zip(frames["x"], frames["y"], strict=True))
    places = list(zip(cells["x"], cells["y"], strict=True))
    assert framed == [places[i] for i, source in enumerate(sources) if source == "answered by the task"]


def test_histograms_are_shares(runs: list[ReportRun]) -> None:
    """At each of R3's levels the shares of a run sum to one; an exact engine has all of them at 0."""
    for level in ROUTING_LEVELS:
        figure = level(runs)
        assert figure is not None
        for bars in figure.data:
            assert sum(y or 0.0 for y in bars["y"]) == pytest.approx(1)
        assert figure.data[0]["y"][0] == 1


def test_tails_and_parts_are_the_records(runs: list[ReportRun]) -> None:
    """Deviations are those of the last step of each run that replays; parts are means over its steps."""
    figure = deviation_tails(runs)
    assert figure is not None and {bars["meta"]["run"] for bars in figure.data} == {2, 4, 6}
    last = runs[2].metrics[-1]
    assert figure.data[0]["y"][:2] == [last["routing/zero_deviation"], last["routing/one_deviation"]]
    assert sum(figure.data[0]["y"]) == pytest.approx(1)
    parts = ratio_parts(runs)
    assert parts is not None and len(parts.data) == len(runs)
    values = [row["actor/k3_kl_mu_pi"] for row in runs[2].metrics]
    assert parts.data[2]["y"][2] == pytest.approx(sum(values) / len(values))
    assert parts.data[0]["y"][0] is None  # an exact engine: a log axis has no place for 0
