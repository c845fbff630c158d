"""Laws of the demo: a run differs from the one without a remedy in what its name says, and what is named is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from firstorder.worlds import Schemas
from lab.config.load import load

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs/demo"
DIFFERENCES: dict[str, set[str]] = {
    "exact": {"engine.defects"},
    "r2": {"algorithm.replay.mode"},
    "tis": {"algorithm.objective.correction"},
    "r3": {"algorithm.replay.mode"},
    "minirl": {"algorithm.objective.preset", "algorithm.optimizer.max_grad_norm"},
}


def fields(block: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names and values of a config's fields; a correction and a list of defects are one field each."""
    found = {}
    for key, value in block.items():
        name = f"{prefix}{key}"
        inside = isinstance(value, dict) and name != "algorithm.objective.correction"
        found |= fields(value, f"{name}.") if inside else {name: value}
    return found


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_demo_run_differs_in_what_its_name_says(name: str) -> None:
    """From `none` in its remedy alone, so that what differs between two curves is the remedy or chance."""
    ours, none = (fields(load(DEMO / f"{one}.yaml", [], Schemas()).model_dump()) for one in (name, "none"))
    assert {field for field in ours if ours[field] != none.get(field)} == {"name"} | DIFFERENCES[name]
    assert ours["name"] == f"demo-{name}"


def test_a_seed_changes_all_but_the_cold_start() -> None:
    """`--seed` is the run's alone: the runs of every seed begin with the weights of one cold start."""
    one = fields(load(DEMO / "none.yaml", ["--seed", "1"], Schemas()).model_dump())
    none = fields(load(DEMO / "none.yaml", [], Schemas()).model_dump())
    assert {field for field in one if one[field] != none[field]} == {"seed"}


def test_make_demo_runs_all_of_them() -> None:
    """The Makefile's list, whose order is that of the report, has every config of the folder once."""
    listed = re.findall(r"^DEMO := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    assert sorted(listed) == sorted({path.stem for path in DEMO.glob("*.yaml")} - {"base"})
    assert set(listed) == {"none", *DIFFERENCES}


def test_every_config_that_is_named_is_there() -> None:
    """The README and the commands' help name no config that was renamed or deleted."""
    texts = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "firstorder").glob("*.py"))]
    named = {name for text in texts for name in re.findall(r"configs/[\w/]+\.yaml", text)}
    assert named and all((ROOT / name).is_file() for name in named)
