"""The doctor names what was planted nine times of ten, and docs/doctor.md says so and what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.doctor.importers import rows, verl
from lab.doctor.reliability import BINS
from tests.pages import layers
from tests.pages.courses import COURSES
from tests.pages.doctor import FIRST_DRAW, NUM_DRAWS, SMALL, WARDS, formats, intro
from tests.pages.doctor_plants import PLANTS
from tests.pages.doctor_tables import decided, every, num_right
from tests.pages.ward import Ward, findings

pytestmark = pytest.mark.unchecked

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
SOME = [
    "exact engine", "weights bf16", "weights fp8", "activations fp8", "cache bf16", "router noise 0.03",
    "router noise 0.1", "1 version behind", "4 versions behind", "4 behind, half new, cache recomputed",
    "nothing arrives", "experts never arrive", "experts one place on", "gate and up swapped", "routed sum times 0.4",
    "top-p 0.9, scored", "temperature 0.7, scored", "top-p 0.9", "temperature 0.7", "log old a token early, fp8",
    "end token's log mu is 0, bf16", "half of log mu is 0, fp8", "end tokens cut off", "log mu of other responses",
    "record_is_a_row_late", "last_stage_overwrites_the_first",
]  # fmt: skip
"""At least one plant of every cause; the page has them all, on more draws."""


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    cache = str(tmp_path_factory.mktemp("cold_start"))
    return Ward("configs/arithmetic.yaml", [*SMALL, "--cold_start.cache", cache], num_steps=4)


@pytest.mark.slow
def test_nine_of_ten_planted_causes_are_named(ward: Ward) -> None:
    """On a model that no threshold was set on, 90% of what is named is right, and 80% of traces name one cause."""
    assert {PLANTS[name].cause for name in SOME} == {plant.cause for plant in PLANTS.values()}
    found = every(findings(ward, SOME, [FIRST_DRAW]))
    named = decided(found)
    assert num_right(named) >= 0.9 * len(named), [one for one in named if one.named != one.planted]
    assert len(named) >= 0.8 * len(found), [one for one in found if one not in named]


def test_the_page_has_every_plant_and_is_right_as_often_as_the_test_asks() -> None:
    """Each table of one step has all plants, and 90% of both models' are right; that of runs has all courses."""
    counts = [line.split() for line in PAGE.splitlines() if line.endswith("named are right.")]
    assert len(counts) == len(WARDS) and all(f"### {title}\n" in PAGE for title in WARDS)
    assert 10 * sum(int(words[0]) for words in counts) >= 9 * sum(int(words[2]) for words in counts)
    of_steps, rest = PAGE.split("## Over the steps of a run")
    of_runs, of_layers = rest.split("## Where: the layer")
    assert all(of_layers.count(f"| {name} |") == 1 for name in layers.PLANTS)
    assert layers.INTRO.split("\n", 1)[1] in of_layers and layers.NOTE in of_layers
    assert all(of_steps.count(f"| {name} |") == len(WARDS) for name in PLANTS)
    assert all(of_runs.count(f"| {name} |") == 1 for name in COURSES)
    assert all(f"| {right / num:.2f} |" in of_steps.split("### What a strength means")[1] for _, right, num in BINS)
    assert "runs without a fault that spans steps, 0 were reported to have one" in of_runs


def test_the_page_names_every_field() -> None:
    """The page names the fields that a row needs, and those that verl's dump has to be given."""
    assert formats() in PAGE and PAGE.startswith(intro(NUM_DRAWS))
    needed = [name for name, field in rows.ResponseRow.model_fields.items() if field.is_required()]
    assert needed == ["tokens", "num_prompt", "logp_mu", "logp_old"] and all(f"`{name}`" in PAGE for name in needed)
    assert all(f'"{name}"' in PAGE for name in verl.NAMES)
