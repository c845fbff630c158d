"""Laws of a flow: its rows are exact runs, case by case, and a mistake in its config is one line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab import casebook
from lab.audit.table import parts
from lab.casebook import Rows
from lab.flow import FlowConfig, ends, flow, load_config
from lab.flow.records import read, write
from lab.flow.run import run_of
from lab.flow.table import CELL, difference, interval, table_rows
from lab.records import RunFolder
from lab.report.style import number
from lab.strict import ConfigError
from sandbox.exact.flow import SandboxFlow

CONFIG = """
name: tiny
backend: exact
problems: {count: 2, num_tokens: 2, length: 2, prompts: 1, openings: 2, lost: 1}
errors: [{kind: fixed, token_kl: 0.1}, {kind: exact}]
objectives: [{preset: reinforce, label: none}, {preset: reinforce, label: centred, centred: true}]
num_minibatches: [1, 2]
batch_sizes: [8, .inf]
training: {optimizer: sgd, rate: 0.5, num_updates: 4, observe_every: 2}
"""


def test_rows_are_the_runs(config: FlowConfig, frame: pd.DataFrame) -> None:
    """A row per observed update of each run; it holds that run's own numbers, and KL(mu || pi) starts where asked."""
    assert len(frame) == 2 * 2 * 2 * 2 * 2 * 3 and len(ends(frame)) == 32
    row = frame.query("problem == 1 and kind == 'fixed' and objective == 'none' and N == 2 and B == 8 and update == 4")
    again = run_of(config, 1, config.errors[0], "none", 2, 8.0)
    assert row["reward"].item() == again["reward"][-1] and row["entropy"].item() == again["entropy"][-1]
    first = frame.query("kind == 'fixed' and update == 0")
    assert np.allclose(first["kl_mu_pi"], 0.1, rtol=1e-6)
    # Under an exact engine there is no drift to take off, so both objectives make one run where there is no noise.
    exact = frame.query("kind == 'exact' and N == 1 and B == @math.inf")
    none, centred = (exact[exact["objective"] == name]["reward"].to_numpy() for name in ("none", "centred"))
    assert np.allclose(none, centred, atol=1e-12)


def test_a_flow_goes_on(config: FlowConfig, frame: pd.DataFrame) -> None:
    """Given the rows of the first cases it makes the others alone, and the frame is the same."""
    kept: list[Rows] = []
    whole = flow(config, keep=kept.append)
    rest: list[Rows] = []
    again = flow(config, former=kept[:3], keep=rest.append)
    assert len(kept) == 4 and len(rest) == 1 and again.equals(whole) and whole.equals(frame)


def test_records_keep_what_is_not_finite(frame: pd.DataFrame, tmp_path: Path) -> None:
    """Infinities and nan come back bit for bit from strict JSON, and from the cases that a killed flow kept."""
    odd = frame.assign(kl_old_mu=[math.inf, *frame["kl_old_mu"][1:]], bias=[*frame["bias"][:-1], -math.inf])
    assert np.isnan(odd["entropy_lost"]).any() and np.isinf(odd["B"]).any()
    path = write(RunFolder(tmp_path), odd)
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    pd.testing.assert_frame_equal(read(path), odd, check_exact=True, check_dtype=False)
    assert read(path).attrs == frame.attrs
    casebook.keep_case(RunFolder(tmp_path), odd.to_dict("records"))
    (kept,) = casebook.kept_cases(RunFolder(tmp_path))
    pd.testing.assert_frame_equal(pd.DataFrame(kept), odd, check_exact=True)


def test_older_records_are_read(frame: pd.DataFrame, tmp_path: Path) -> None:
    """A null stood for every infinity: B's and that of kl_old_mu, which is nan only where its row's KL the other way is
    nan, too."""
    odd = frame.assign(kl_old_mu=[math.inf, math.nan, *frame["kl_old_mu"][2:]])
    odd["kl_mu_old"] = [odd["kl_mu_old"][0], math.nan, *odd["kl_mu_old"][2:]]
    path = write(RunFolder(tmp_path), odd)
    nulls = path.read_text().replace('"inf"', "null")
    assert '"B": [8.0,' in nulls and nulls != path.read_text()
    path.write_text(nulls)
    pd.testing.assert_frame_equal(read(path), odd, check_exact=True, check_dtype=False)


@pytest.mark.filterwarnings("error")
def test_a_cell_without_a_direction_has_a_dash(frame: pd.DataFrame) -> None:
    """Where every cosine is nan the table has a dash, without a warning; where some are, the mean of the others."""
    last = table_rows(frame.assign(cosine=math.nan))
    assert {row["cells"][-1] for row in last} == {"–"}
    cosine = frame["cosine"].where(frame["problem"] == 0)
    for row, (_, part) in zip(table_rows(frame.assign(cosine=cosine)), parts(ends(frame), CELL), strict=True):
        assert row["cells"][-1] == number(float(part[part["problem"] == 0]["cosine"].item()))


def test_a_difference_pairs_the_runs_of_a_problem(frame: pd.DataFrame) -> None:
    """It is the mean over problems of the gap between two objectives' ends, and its interval is that of the gaps."""
    cell = {"kind": "fixed", "N": 1, "B": math.inf}
    found = difference(frame, "entropy", cell | {"objective": "none"}, cell | {"objective": "centred"})
    part = (
        ends(frame).query("kind == 'fixed' and N == 1 and B == @math.inf").pivot(index="problem", columns="objective")
    )
    gaps = (part["entropy"]["none"] - part["entropy"]["centred"]).to_numpy()
    assert found.mean == pytest.approx(gaps.mean())
    wanted = stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
    assert (found.low, found.high) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="expected finite values of at least 1 problem"):
        interval(np.array([math.nan]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["--errors", "[{kind: fixd, scale: 1}]"], "fixd"),
        (["--errors", "[{kind: fixed}]"], "fixed: expected one of token_kl and scale, got neither"),
        (["--errors", "[{kind: top_p, token_kl: 0.1}]"], "top_p: expected scale, got token_kl"),
        (["--problems.lost", "2"], "lost: expected fewer than openings (2), got 2"),
        (["--num_minibatches", "[1, 1]"], "num_minibatches: expected distinct values, got '1' 2 times"),
        (["--training.optimizer", "adamw"], "optimizer"),
    ],
)
def test_bad_configs_are_refused(override: list[str], message: str, tmp_path: Path) -> None:
    """An unknown kind or optimizer, no dial or the wrong one, no open context, a value twice: one line."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "tiny.yaml", override)
    assert message in str(caught.value) and "\n" not in str(caught.value)


SANDBOX = """
name: tiny
backend: sandbox
problems: {count: 1, num_tokens: 2, length: 1, prompts: 1, openings: 2, lost: 1}
errors: [{kind: exact}, {kind: engine, scale: 1, engine: {defects: [DEFECT]}}]
objectives: [{preset: reinforce}]
training: {temperature: T}
"""


@pytest.mark.parametrize(
    ("defect", "temperature", "expected"),
    [
        ("{kind: stale_weights, versions: 4}", 1, "none that keeps earlier weights (old weights are training.lag)"),
        ("{kind: partial_weights}", 1, "none that keeps earlier weights (old weights are training.lag)"),
        ("{kind: sampling_mismatch, top_p: 0.9}", 1, "an engine that scores the distribution of its draws"),
        ("{kind: sampling_mismatch}", 0.5, "an engine that scores the distribution of its draws"),
        ("{kind: sampling_mismatch, top_p: 0.9, score: processed}", 1, ""),
        ("{kind: stale_weights, versions: 0}", 1, ""),
    ],
)
def test_engines_of_one_rollout(defect: str, temperature: float, expected: str, tmp_path: Path) -> None:
    """An engine that needs earlier hand-overs, or does not score its draws, is refused before the first case."""
    path = tmp_path / "tiny.yaml"
    path.write_text(SANDBOX.replace("DEFECT", defect).replace("T}", f"{temperature}}}"))
    if not expected:
        assert load_config(path, sandbox=lambda: SandboxFlow).errors
        return
    with pytest.raises(ConfigError) as caught:
        load_config(path, sandbox=lambda: SandboxFlow)
    said = str(caught.value)
    assert f"errors.1.engine.defects: expected {expected}, got " in said and "\n" not in said


@pytest.mark.parametrize("path", sorted(Path("configs/flow").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_flow_config_loads(path: Path) -> None:
    """Each file under configs/flow/ is a config of this version."""
    assert load_config(path, sandbox=lambda: SandboxFlow).name
