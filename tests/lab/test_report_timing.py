"""Laws of the panel of time: shares and rates are ratios of recorded numbers, tables are the records' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.events import append_event
from lab.records import RunFolder
from lab.report.run_page import render
from lab.report.runs import load_runs
from lab.report.timing import Throughput, interruptions, payloads, shares, time_parts
from lab.run_files import StoredEvent
from tests.lab.synthetic_runs import DEMO, write_demo


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Two engines and four ranks; steps of 10 and 20 s."""
    (made,) = write_demo(tmp_path, DEMO[:1], num_steps=2)
    text = (made.path / "config.yaml").read_text()
    made.write_config(text + "rollout: {num_engines: 2}\ntraining: {num_ranks: 4}\n")
    made.write_manifest(made.manifest() | {"planned_bytes": {"transfer/routes_bytes": 8_000_000}})
    for step, seconds in ((3, 10.0), (4, 20.0)):
        row = {"timing_s/step": seconds, "timing_s/gen": 2.0, "timing_s/old_log_prob": 1.0}
        row |= {"timing_s/update_actor": 4.0, "timing_s/cpu_engines": 10.0, "timing_s/cpu_ranks": 20.0}
        row |= {"progress/num_tokens": 100.0, "transfer/routes_bytes": 2e6 * step, "transfer/weights_bytes": 5e6}
        made.append_metrics(step, row)
    return made


def test_shares_are_of_each_steps_own_time(run: RunFolder) -> None:
    """Means over steps of a ratio, by process for processors; a run without times has no figure."""
    figure = shares(load_runs([run]))
    assert figure is not None
    (bars,) = figure.data
    assert bars["x"] == [
        "engines<br>at work",
        "trainer<br>at work",
        "engines'<br>processors",
        "trainer's<br>processors",
    ]
    assert bars["y"] == pytest.approx([0.15, 0.375, 0.375, 0.375], rel=1e-12)  # sums of a few float64 numbers
    bare = RunFolder(run.path.parent)
    bare.write_config("name: bare\n")
    assert shares(load_runs([bare])) is None


def test_waits_for_checkpoints_are_spread_over_all_steps(run: RunFolder) -> None:
    """Waits of 6 and 3 s in five steps are 1.8 s a step; a run that never waited has no such bar."""
    bars = {"sampling": 2.0, "old pass": 1.0, "updates": 4.0}
    assert drawn(run) == bars
    run.append_metrics(5, {"timing_s/step": 10.0, "timing_s/gen": 2.0, "timing_s/save_checkpoint": 6.0})
    run.append_metrics(6, {"timing_s/step": 10.0, "timing_s/gen": 2.0})
    run.append_metrics(7, {"timing_s/step": 10.0, "timing_s/gen": 2.0, "timing_s/save_checkpoint": 3.0})
    assert drawn(run) == bars | {"waiting for<br>checkpoints": 9.0 / 5}


def drawn(run: RunFolder) -> dict[str, float]:
    """The bars of the run's figure of parts, in s."""
    figure = time_parts(load_runs([run]))
    assert figure is not None
    (bars,) = figure.data
    return dict(zip(bars["x"], bars["y"], strict=True))


def test_throughput_is_tokens_over_time(run: RunFolder) -> None:
    """Step by step, and only where both are recorded."""
    (loaded,) = load_runs([run])
    figure = Throughput("throughput", "Tokens per second", "progress/num_tokens")
    assert figure.series(loaded) == [(3, 10.0), (4, 5.0)]


def test_payloads_stand_beside_the_plans_count(run: RunFolder) -> None:
    """Mean over the steps in 1e6 bytes, the manifest's count and their ratio; what was not planned has a dash."""
    table = payloads(load_runs([run]))
    assert table is not None
    cells = {row.cells[0]: row.cells[1:] for row in table.rows}
    assert cells == {"weights, one push": ("5", "–", "–"), "mu's routing records": ("7", "8", "0.875")}


def test_what_ended_is_told(run: RunFolder) -> None:
    """Each event is a row with what was lost; without any there is no table, and a page of an older folder opens."""
    assert interruptions(load_runs([run])) is None and "interruptions" not in render([run])
    append_event(run.path, StoredEvent(process="rank", step=7, resumed=4, seconds=2.5, reason="rank <1> died", index=1))
    append_event(run.path, StoredEvent(process="engine", step=8, resumed=8, seconds=31.04, reason="ended", index=0))
    append_event(run.path, StoredEvent(process="run", step=9, resumed=8, seconds=3.0, reason="it was stopped"))
    table = interruptions(load_runs([run]))
    assert table is not None
    assert [row.cells for row in table.rows] == [
        ("rank 1", "7", "3", "2.5", "rank <1> died"),
        ("engine 0", "8", "0", "31", "ended"),
        ("the run", "9", "1", "3", "it was stopped"),
    ]
    page = render([run])
    assert "rank &lt;1&gt; died" in page and 'id="interruptions"' in page and 'id="payloads"' in page


def test_a_row_names_its_run_where_there_are_several(run: RunFolder, tmp_path: Path) -> None:
    """One run's tables have no column of runs; those of two say in every row whose it is."""
    (other,) = write_demo(tmp_path / "other", DEMO[1:2], num_steps=2)
    tables = [render(runs).partition('id="payloads"')[2].partition("</table>")[0] for runs in ([run], [run, other])]
    assert [table.count('scope="row"') for table in tables] == [0, 2]
    assert [">run</th>" in table for table in tables] == [False, True]
