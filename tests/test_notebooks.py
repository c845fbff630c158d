"""Laws of the notebooks: each runs from top to bottom without a person, and what it says comes from the records."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import nbformat
import pytest
from nbclient import NotebookClient

from lab.records import RunFolder

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST = ROOT / "notebooks" / "00_first_run.ipynb"
TO_CLUSTER = ROOT / "notebooks" / "05_sandbox_to_cluster.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"
LABELS = ("exact", "fp8", "fp8-minirl", "fp8-minirl-r3", "fp8-minirl-pr3")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for runs; the kernel's own files go beside it."""
    monkeypatch.setenv("FIRSTORDER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run from the repository root; a cell that raises raises here."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def printed(cell: nbformat.NotebookNode) -> str:
    """What the cell wrote to stdout."""
    return "".join(out["text"] for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def figures(notebook: nbformat.NotebookNode) -> list[dict]:
    """The Plotly figures that the notebook drew."""
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return [out["data"][PLOTLY] for out in outputs if PLOTLY in out.get("data", {})]


def mean_kl(runs: Path, name: str) -> float:
    """The mean training-inference KL of the only run of that name."""
    (folder,) = (runs / name).iterdir()
    name = "rollout_corr/k3_kl"
    return fmean(row[name] for row in RunFolder.open(folder).metrics() if name in row)


@pytest.mark.slow
def test_the_first_notebook(runs: Path) -> None:
    """Without runs it trains five tiny ones, once; with demo runs it reads those; its words are their numbers."""
    execute(FIRST)
    assert sorted(path.name for path in runs.iterdir()) == sorted(f"smoke-{label}" for label in LABELS)
    kl = {label: mean_kl(runs, f"smoke-{label}") for label in LABELS}
    # The exact engine is the training engine bit for bit; replay takes the routers' share of FP8's discrepancy away.
    assert kl["exact"] == 0 and 0 < kl["fp8-minirl-r3"] < kl["fp8-minirl"]

    for label in LABELS:
        (runs / f"smoke-{label}").rename(runs / f"demo-{label}")
    notebook = execute(FIRST)
    assert sorted(path.name for path in runs.iterdir()) == sorted(f"demo-{label}" for label in LABELS)
    assert [[trace["name"] for trace in figure["data"]] for figure in figures(notebook)] == [list(LABELS)] * 3
    assert "J = " in printed(next(cell for cell in notebook.cells if cell.id == "objective"))
    seen = printed(notebook.cells[-1])
    assert f"exact {kl['exact']:.1e}, FP8 {kl['fp8-minirl']:.1e}" in seen
    for label in ("fp8-minirl-r3", "fp8-minirl-pr3"):
        change = kl[label] / kl["fp8-minirl"] - 1
        assert f"{label}: KL {kl[label]:.1e}, {abs(change):.0%} {'less' if change < 0 else 'more'}" in seen
    assert "No run solved a held-out problem" in seen


@pytest.mark.slow
def test_from_sandbox_to_cluster(runs: Path) -> None:
    """It trains three seeds once, promotes them with the replay mode that they had, and its plan fits."""
    notebook = execute(TO_CLUSTER)
    assert len(list((runs / "to-cluster-r3").iterdir())) == 3
    cells = {cell.id: printed(cell) for cell in notebook.cells if cell.cell_type == "code"}
    assert "replay.mode: runs R3, target none -> R3" in cells["promote"]
    assert "routing records, int16" in cells["payloads"]
    (memory, discrepancy) = figures(notebook)
    training = sum(trace["x"][0] for trace in memory["data"])
    assert f"A training GPU holds {training:.0f} GiB" in cells["seen"] and "It fits." in cells["seen"]
    assert "Parameters: 30.5B" in cells["seen"]
    assert len(discrepancy["data"]) == 3
    assert "3 seeds, verdicts stable, stable, stable." in cells["seen"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_definitions(path: Path) -> None:
    """A notebook in the repository holds neither results nor algorithms: no output, no function, no class."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id
            assert not any(line.lstrip().startswith(("def ", "class ")) for line in cell.source.splitlines()), cell.id
