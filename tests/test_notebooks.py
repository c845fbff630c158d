"""Laws of the notebooks: each runs from top to bottom without a person, and what it says comes from the records."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import nbformat
import pytest

from lab.flow import load_config as load_flow
from lab.flow.config import ErrorBlock
from lab.flow.run import run_of
from lab.records import RunFolder
from sandbox.border.table import runs as border_runs
from sandbox.claims import CLAIMS, REGIMES
from sandbox.ledger.page import explored
from sandbox.ledger.summary import counts_text
from tests.pages import ledger
from tests.pages.notebooks import PLOTLY, ROOT
from tests.pages.notebooks import execute as run
from theory.exact.rates import RATES

FIRST = ROOT / "notebooks" / "00_first_run.ipynb"
FIRST_ORDER = ROOT / "notebooks" / "01_first_order_approximation.ipynb"
DISCREPANCY = ROOT / "notebooks" / "02_training_inference_discrepancy.ipynb"
REPLAY = ROOT / "notebooks" / "03_routing_replay.ipynb"
PREDICTION = ROOT / "notebooks" / "04_prediction.ipynb"
TO_CLUSTER = ROOT / "notebooks" / "05_sandbox_to_cluster.ipynb"
LEDGER = ROOT / "notebooks" / "06_claims_ledger.ipynb"
BORDER = ROOT / "notebooks" / "07_the_border.ipynb"
EXACT_TRAINING = ROOT / "notebooks" / "08_exact_training.ipynb"
DOCTOR = ROOT / "notebooks" / "09_the_doctor.ipynb"
LABELS = ("exact", "none", "r2", "tis", "r3", "minirl")


# Collects the selectors of every dial, then turns each to all of its choices and back.
COLLECT = """
import lab.plots
every_selector, library_dials = [], lab.plots.dials
lab.plots.dials = lambda *given: every_selector.append(library_dials(*given)) or every_selector[-1]
"""
TURN = """
for selector in (each for of_one in every_selector for each in of_one.values()):
    at_first = selector.value
    for _, selector.value in selector.options:
        pass
    selector.value = at_first
"""
RENAME = """
for label in labels:
    (output / f"smoke-{label}").rename(output / f"demo-{label}")
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for runs; the kernel's own files go beside it."""
    return _runs(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One folder for the notebooks that start from the same cold start."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield _runs(tmp_path_factory.mktemp("shared"), monkeypatch)


def _runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRSTORDER_RUNS", str(folder / "runs"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    (folder / "runs").mkdir()
    return folder / "runs"


def execute(path: Path, *, turn: bool = False) -> nbformat.NotebookNode:
    """The notebook with its outputs, run from the repository root; a cell that raises raises here.

    With `turn` every dial is turned to each of its choices in the end, and back.
    """
    notebook = nbformat.read(path, as_version=4)
    if not turn:
        return run(notebook)
    first, last = (nbformat.v4.new_code_cell(source) for source in (COLLECT, TURN))
    notebook.cells = [first, *notebook.cells, last]
    run(notebook)
    notebook.cells = notebook.cells[1:-1]
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """The cell's stdout."""
    return "".join(out["text"] for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def figures(notebook: nbformat.NotebookNode) -> list[dict]:
    """The Plotly figures that the notebook drew."""
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return [out["data"][PLOTLY] for out in outputs if PLOTLY in out.get("data", {})]


def lines_of(notebook: nbformat.NotebookNode, cell_id: str) -> dict[str, dict[Any, float]]:
    """The lines of the figure that the cell drew, by name: x to y. Areas are left out."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    (figure,) = (out["data"][PLOTLY] for out in cell.outputs if PLOTLY in out.get("data", {}))
    return {
        trace["name"]: dict(zip(trace["x"], trace["y"], strict=True))
        for trace in figure["data"]
        if trace.get("mode") != "none"
    }


def texts(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The output of each code cell, by id."""
    return {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}


def mean_kl(runs: Path, name: str) -> float:
    """The mean training-inference KL of the only run of that name."""
    (folder,) = (runs / name).iterdir()
    name = "rollout_corr/k3_kl"
    return fmean(row[name] for row in RunFolder.open(folder).metrics() if name in row)


@pytest.mark.slow
def test_the_first_notebook(runs: Path) -> None:
    """Without runs it trains six tiny ones, once; with demo runs it reads those; its words are their numbers."""
    notebook = nbformat.read(FIRST, as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.id == "runs")
    # In the same kernel, whose start takes longer than the cell: the runs get the names of `make demo`'s.
    again = [nbformat.v4.new_code_cell(source) for source in (RENAME, cell.source)]
    notebook.cells += again
    run(notebook)
    assert all(f"smoke-{label}" in printed(cell) and f"demo-{label}" in printed(again[1]) for label in LABELS)
    assert sorted(path.name for path in runs.iterdir()) == sorted(f"demo-{label}" for label in LABELS)
    kl = {label: mean_kl(runs, f"demo-{label}") for label in LABELS}
    # The exact engine is the training engine bit for bit; replay takes the routers' share of the discrepancy away.
    assert kl["exact"] == 0 and 0 < kl["r3"] < kl["none"]
    assert [[trace["name"] for trace in figure["data"]] for figure in figures(notebook)] == [list(LABELS)] * 3
    for label, series in lines_of(notebook, "discrepancy").items():
        assert label == "exact" or fmean(series.values()) == pytest.approx(kl[label], rel=1e-12)
    said = texts(notebook)
    assert said["objective"].count("J = ") == 2
    assert said["reward"].startswith("All 6 runs are undecided.") and f"{kl['r3']:.2g} with R3" in said["reward"]
    tails = lines_of(notebook, "tails")
    for label in LABELS[2:]:
        change = kl[label] / kl["none"] - 1
        assert f"{label}: mean KL {kl[label]:.2g}, {abs(change):.0%} {'less' if change < 0 else 'more'}" in said["seen"]
        assert f"{tails[label][2.0]:.1%} of the tokens differ" in said["seen"]
    assert f"without a remedy {kl['none']:.2g}, exact 0." in said["seen"]
    assert "No run solved a held-out problem" in said["seen"]


@pytest.mark.slow
def test_first_order_approximation(runs: Path) -> None:
    """The slopes are those predicted, in the drawn lines too; a baseline moves the unweighted mean and no other."""
    notebook = execute(FIRST_ORDER, turn=True)
    measured = re.findall(r"predicted (\d)   measured ([+-]\d\.\d+)", texts(notebook)["rates"])
    assert len(measured) == 2 * len(RATES)
    for predicted, slope in measured:
        assert float(slope) == pytest.approx(float(predicted), abs=0.01)
    for name, points in lines_of(notebook, "slopes").items():
        small = [(math.log(eps), math.log(gap)) for eps, gap in points.items() if eps < 1e-2]
        # The next order adds at most eps of the leading one: 1e-2.
        assert linear_regression(*zip(*small, strict=True)).slope == pytest.approx(RATES[name][0], abs=0.02)

    bias = lines_of(notebook, "baseline")
    for weight in ("token", "prefix", "sequence"):
        assert bias["baseline: none"][weight] == pytest.approx(bias["baseline: mean"][weight], abs=1e-12)
    assert bias["baseline: mean"]["none"] != pytest.approx(bias["baseline: none"]["none"], rel=0.01)
    left = float(texts(notebook)["facts"].split("leaves ")[1])
    assert left < 1e-12
    for length, value in lines_of(notebook, "length")["sequence"].items():
        assert value < 1e-12, length
    sizes = lines_of(notebook, "error")["sequence"]
    # Without bias the error is that of the variance alone.
    assert sizes[64] / sizes[1024] == pytest.approx(4, rel=1e-6)
    seen = texts(notebook)["seen"]
    assert f"{bias['baseline: none']['none']:.3f} to {bias['baseline: mean']['none']:.3f}" in seen
    assert "1,048,576 responses took" in seen


@pytest.mark.slow
def test_training_inference_discrepancy(shared_runs: Path) -> None:
    """The exact engine has no KL; replay takes some of every other one's away; the tail falls with tau."""
    notebook = execute(DISCREPANCY, turn=True)
    (cell,) = (cell for cell in notebook.cells if cell.id == "kl")
    (figure,) = (out["data"][PLOTLY] for out in cell.outputs)
    kl = {bar["name"]: dict(zip(bar["x"], map(float, bar["customdata"]), strict=True)) for bar in figure["data"]}
    assert {name for of_kind in kl.values() for name, value in of_kind.items() if value == 0} == {"exact"}
    for name, value in kl["MoE"].items():
        assert name == "exact" or kl["MoE, replayed"][name] < value, name
    assert all(kl[kind]["weights fp8, by row"] > 10 * kl[kind]["weights bf16"] for kind in kl)
    for name, tail in lines_of(notebook, "tail").items():
        shares = list(tail.values())
        assert shares == sorted(shares, reverse=True) and shares[0] <= 1, name
    noise = lines_of(notebook, "noise")
    # Noise on the router leaves the rest of the model alone: with replayed routes only the gates are off.
    assert all(noise["KL(mu || old), replayed"][std] < kl for std, kl in noise["KL(mu || old), natural"].items())
    seen = texts(notebook)["seen"]
    assert "KL 0 on" in seen and "0% of routers differ" in seen
    assert f"weights bf16: KL {kl['MoE']['weights bf16']:.1e} in the MoE" in seen


@pytest.mark.slow
def test_routing_replay(runs: Path) -> None:
    """R2's replay bias is 0 at the first mini-batch, R3's is not; staleness adds to R2's; none is above its bound."""
    notebook = execute(REPLAY, turn=True)
    bias = lines_of(notebook, "in")
    assert set(bias["none"].values()) == {0.0} and bias["R2"][0] == 0 < bias["R3"][0]
    # With the weights only staleness grows; how much of R3's bias is discrepancy depends on the engine.
    assert bias["R2"][8] > bias["R2"][0] and min(bias["R3"].values()) > 0
    distance = lines_of(notebook, "out")
    assert distance["R2"][0] == pytest.approx(distance["none"][0], rel=1e-9)
    assert all(distance["R3"][n] < distance["none"][n] for n in distance["R3"])
    points = lines_of(notebook, "bound")
    assert all(measured <= bound for mode in ("R2", "R3") for bound, measured in points[mode].items())
    seen = texts(notebook)["seen"]
    assert "problems 0. R3 there" in seen and f"router noise {bias['R3'][0]:.3f}." in seen
    total = re.search(r"The bound holds in (\d+) of (\d+) problems", seen)
    assert total is not None and total[1] == total[2]


@pytest.mark.slow
def test_prediction(shared_runs: Path) -> None:
    """Cached routes go stale over the mini-steps; a linear map explains a part of that; certificates never exceed what
    is so; both bounds hold."""
    notebook = execute(PREDICTION, turn=True)
    agreement = lines_of(notebook, "agreement")
    assert set(agreement) == {
        "cached", "predicted", "gate's own drift", "linear map, same problems", "linear map, other problems",
    }  # fmt: skip
    assert agreement["cached"][0] > agreement["cached"][7]
    assert agreement["linear map, same problems"][7] > agreement["cached"][7]
    same, best, lemma = lines_of(notebook, "lemma").values()
    assert all(lemma[n] <= best[n] <= same[n] for n in same)
    assert all(y <= x for name, points in lines_of(notebook, "regret").items() for x, y in points.items())
    soft = lines_of(notebook, "soft")
    for guess in ("cached", "gate's own drift"):
        assert all(value <= soft[f"{guess}, bound"][x] for x, value in soft[f"{guess}, measured"].items())
    seen = texts(notebook)["seen"]
    first, last = agreement["cached"][0], agreement["cached"][7]
    assert f"agreement {first:.4f} at n = 0, {last:.4f} at n = 7" in seen
    assert "the bounds hold" in seen and "Prop. B.1 holds" in seen
    explained = {name: int(share) for name, share in re.findall(r"In hindsight, (.*): (-?\d+)% of the KL", seen)}
    assert 0 < explained["linear map, other problems"] < explained["linear map, same problems"] <= 100


@pytest.mark.slow
def test_from_sandbox_to_cluster(runs: Path) -> None:
    """It trains three seeds once, promotes them with the replay mode that they had, and its plan fits."""
    notebook = execute(TO_CLUSTER)
    assert len(list((runs / "to-cluster-r3").iterdir())) == 3
    cells = {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert "replay.mode: runs R3, target none -> R3" in cells["promote"]
    assert "mu's routing records, int8" in cells["payloads"]
    (memory, discrepancy) = figures(notebook)
    training = sum(trace["x"][0] for trace in memory["data"])
    assert f"A training GPU holds {training:.0f} GiB" in cells["seen"] and "It fits." in cells["seen"]
    assert "Parameters: 30.5B" in cells["seen"]
    assert len(discrepancy["data"]) == 3
    assert "3 seeds, verdicts stable, stable, stable." in cells["seen"]


def test_the_ledger(runs: Path) -> None:
    """It makes no run, and its verdicts, effects and words are those of the rows that the project keeps."""
    notebook = execute(LEDGER, turn=True)
    assert list(runs.iterdir()) == []
    rows, found, made = ledger.kept(), ledger.found(), ledger.made()
    said = texts(notebook)
    outcomes = [one for finding in found for one in finding.outcomes]
    assert said["setup"].startswith(f"{len(rows)} runs, ")
    num_found = sum(one.effect is not None for one in outcomes)
    assert f"{num_found} of {len(outcomes)} predictions have all their runs" in said["setup"]
    (table,) = (out["data"]["text/html"] for cell in notebook.cells if cell.id == "verdicts" for out in cell.outputs)
    counted, *explored_lines = said["seen"].splitlines()
    assert counted == f"{counts_text(made)}." and all(line.state in table for line in made)
    for line, regime in zip(explored_lines, REGIMES, strict=True):
        words = [explored(claim, regime.name, found).partition(" (")[0] for claim in CLAIMS]
        assert all(f"{words.count(word)} {word}" in line for word in set(words) - {""})
    drawn = lines_of(notebook, "curves")
    assert drawn and all(0.0 < x < 1.0 for points in drawn.values() for x in points)


@pytest.mark.slow
def test_the_border() -> None:
    """It counts the study's runs, draws both pictures, and its last words are the means of the rows."""
    notebook = execute(BORDER, turn=True)
    (regime,) = (one for one in REGIMES if one.name == "border")
    table = border_runs(ledger.kept(), regime)
    said = texts(notebook)
    assert said["setup"].startswith(f"{len(table)} runs, seeds {table['seed'].min()} to {table['seed'].max()}")
    assert (
        sum("image/svg+xml" in out["data"] for c in notebook.cells for out in c.get("outputs", ()) if "data" in out)
        == 2
    )
    own = table[(table["preset"] == "grpo") & (table["gap"] == "r0.5") & (table["N"] == 8) & (table["remedy"] == "R2")]
    assert f"R2 {own['area'].mean():.3f} ({own['collapsed'].sum():.0f} of {len(own)} collapsed)" in said["seen"]


@pytest.mark.slow
def test_exact_training() -> None:
    """Its lines are runs of `lab.flow`: under a sharper engine entropy stays high without a weight alone."""
    notebook = execute(EXACT_TRAINING, turn=True)
    config = load_flow(ROOT / "configs" / "flow" / "small.yaml")
    found = run_of(config, 0, ErrorBlock(kind="sharper", token_kl=0.057), "no weight", 1, math.inf)
    drawn = lines_of(notebook, "run")["sharper, no weight"]
    # 200 updates of Adam carry the rounding of a process along; a digit of the fourth place may differ.
    assert drawn[200] == pytest.approx(found["entropy"][-1], abs=1e-3)
    ends = dict(re.findall(r"sharper, ([\w ]+): entropy (\d\.\d+)", texts(notebook)["seen"]))
    assert ends.keys() == {one.name for one in config.objectives}
    others = [float(entropy) for name, entropy in ends.items() if name != "no weight"]
    assert float(ends["no weight"]) == pytest.approx(drawn[200], abs=1e-3) and drawn[200] > 2 * max(others)


@pytest.mark.slow
def test_the_doctor(shared_runs: Path) -> None:
    """Each planted cause is the strongest, by its file alone, and other weights, whose dump has no experts of old, are
    undecided beside routers; at a KL of 0 only a dump with entropies tells the fault."""
    notebook = execute(DOCTOR, turn=True)
    said = texts(notebook)
    causes = {"NeMo-RL: experts one place on": "wrong_weights", "verl: top-p 0.9, scored": "mask"}
    causes |= {"miles: temperature 0.7, scored": "temperature"}
    drawn = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in figures(notebook)[0]["data"]}
    for name, cause in causes.items():
        assert max(drawn[name], key=lambda one: drawn[name][one]) == cause
        others = " or routing (" if cause == "wrong_weights" else ";"
        assert f"{name}: {cause} ({drawn[name][cause]:.2f}){others}" in said["seen"]
        assert name.upper() in said["verdict"]
    unscored = [line.split()[-1] for line in said["lacks"].splitlines() if line.startswith("top-p 0.9, not scored")]
    assert unscored == ["nothing", "sampler_mask", "nothing"]
    # The darkest cell of each map is 1; it has the KL's worst token.
    (cell,) = (cell for cell in notebook.cells if cell.id == "heat")
    (figure,) = (out["data"][PLOTLY] for out in cell.outputs if PLOTLY in out.get("data", {}))
    assert max(value for row in figure["data"][0]["z"] for value in row if value is not None) == 1.0
