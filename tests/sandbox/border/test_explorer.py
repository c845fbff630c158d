"""The page of the map to click has every run once, and its commands make those runs."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab.config.load import NOT_HASHED, load
from sandbox.border.explorer import SEED, command, explorer
from sandbox.border.table import runs
from sandbox.claims import REGIMES
from sandbox.claims.border_arms import GAPS, NORMS, REMEDIES, at
from sandbox.config import SandboxRun
from sandbox.ledger.cells import cell, key
from sandbox.ledger.course import collapse_step, collapsed
from tests.lab.browser import probed
from tests.pages.study import ROOT

(BORDER,) = (one for one in REGIMES if one.name == "border")
SEEDS = (104, 105, 106)


@pytest.mark.parametrize("preset", NORMS)
def test_a_command_makes_the_run_of_its_cell(preset: str) -> None:
    """Its options, read as the command line reads them, give the config of the ledger's cell, compiled."""
    # A config refuses Pr3 beside stale weights, so that place has no runs.
    known = [(gap, remedy) for gap in GAPS for remedy in REMEDIES if (gap, remedy) != ("stale", "Pr3")]
    for (gap, remedy), n in itertools.product(known, (1, 8)):
        program, verb, file, *words = shlex.split(command(BORDER, gap, remedy, n, preset).replace(SEED, "117"))
        assert (program, verb) == ("firstorder", "train")
        made = load(ROOT / file, words, {"sandbox": SandboxRun})
        asked = cell(BORDER, at(gap, remedy, n, preset), 117)
        fields = [one.model_dump(exclude={"compile", *NOT_HASHED}) for one in (made, asked.config)]
        assert fields[0] == fields[1] and made.name == asked.config.name and made.compile is True


def test_the_page_has_every_run_once() -> None:
    rows = {row["cell"]: row for row in _rows()}
    data = _data(explorer(rows, BORDER))
    assert len(runs(rows, BORDER)) == len(rows)
    shown = [(id_, run["seed"]) for id_, place in data["places"].items() for run in place["runs"]]
    assert sorted(shown) == sorted((id_, seed) for id_ in ("grpo/none/r0.5/8", "grpo/R3/r0.5/4") for seed in SEEDS)
    for row in rows.values():
        n = 8 if row["arm"].endswith("N8") else 4
        place = data["places"][f"grpo/{'none' if n == 8 else 'R3'}/r0.5/{n}"]
        (run,) = (one for one in place["runs"] if one["seed"] == row["seed"])
        start = collapse_step(row)
        assert run["fell"] == (None if start is None else start * n)
        assert run["accuracy"] == [[step * n, value] for step, value in row["evaluations"]]
        assert run["kl"] == [[80 * (i + 1), 0.25] for i in range(5)]
        fell = sum(collapsed(other) for other in rows.values() if other["arm"] == row["arm"])
        assert (place["n"], place["fell"]) == (len(SEEDS), fell)


def test_cells_that_equal_another_by_construction_show_it() -> None:
    rows = {row["cell"]: row for row in _rows(n=1)}
    data = _data(explorer(rows, BORDER))
    assert {data["same"][f"grpo/{name}/r0.5/1"] for name in ("R2", "Pr2")} == {"grpo/none/r0.5/1"}
    assert data["same"]["grpo/Pr3/r0.5/1"] == "grpo/R3/r0.5/1"
    assert not data["same"].keys() & data["places"].keys()


STEPS = """
const press = (words) => {
  const found = [...document.querySelectorAll("#remedies button, #places td button")];
  const button = found.find((one) => one.textContent === words || one.title.startsWith(words));
  button.focus();
  button.click();
};
const seen = () => ({
  address: location.hash, said: document.querySelector("#runs .said").textContent,
  command: document.querySelector("#command").textContent, lines: document.querySelectorAll("#accuracy .hit").length,
  chosen: document.activeElement.textContent, falls: document.querySelectorAll("#accuracy .falls").length,
});
const found = [seen()];
press("R3");
found.push(seen());
document.querySelectorAll("#accuracy .hit")[2].dispatchEvent(new Event("click"));
found.push(seen());
press("FP8, noise 0.5, N = 1:");
found.push(seen());
parent.postMessage(found, "*");
"""


def test_a_reader_chooses_a_remedy_a_run_and_a_cell(tmp_path: Path) -> None:
    """In a browser, by the keyboard: each choice changes the address, the words, the curves and the command, and keeps
    its place. An address that names nothing opens the first place."""
    made = _rows() + _rows(n=1)
    page = explorer({row["cell"]: row for row in made}, BORDER)
    broken = page.replace("<script>", "<script>location.hash = '#%';</script><script>", 1)
    first, remedy, run, cell = probed(broken, STEPS, tmp_path, 1200, is_dark=False)
    assert first["said"].startswith("GRPO") and "N = 8: 1 of 3 runs collapsed" in first["said"]
    assert (first["lines"], first["falls"]) == (3, 1) and "--seed" in first["command"]
    assert remedy["address"] == "#grpo/R3/r0.5/4" and (remedy["lines"], remedy["falls"]) == (3, 0)
    assert "N = 4: 0 of 3 runs collapsed" in remedy["said"] and remedy["chosen"] == "R3"
    seed = run["address"].removeprefix("#grpo/R3/r0.5/4/")
    assert int(seed) in SEEDS and f"--seed {seed} " in run["command"] != remedy["command"]
    assert cell["address"] == "#grpo/R3/r0.5/1" and "N = 1: " in cell["said"]
    assert cell["chosen"].endswith("0/3")


def test_a_swatch_stays_with_its_words() -> None:
    """Each pair is one element of the row that wraps; words beside it would be broken off on a narrow screen."""
    page = explorer({row["cell"]: row for row in _rows()}, BORDER)
    ((key,),) = [re.findall(r'<p class="key">(.*?)</p>', page)]
    pairs = re.findall(r'<span[^>]*><i class="line \w+"></i>([^<]+)</span>', key)
    assert pairs == ["did not collapse", "collapsed, × from here on", "no remedy, same engine and N"]
    assert re.sub(r"<span.*?</span>", "", key).strip() == ""


def _data(page: str) -> dict[str, Any]:
    ((text,),) = [re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)]
    return json.loads(text)


def _rows(n: int | None = None) -> list[dict[str, Any]]:
    """Made-up rows of two places, three seeds each: one of those of the first place collapses, at its last quarter."""
    found = []
    for remedy, degree in (("none", n or 8), ("R3", n or 4)):
        arm = at("r0.5", remedy, degree)
        steps = 400 // degree
        for seed in SEEDS:
            late = 0.0 if remedy == "none" and seed == SEEDS[1] else 0.25
            found.append({
                "cell": key(BORDER, arm, seed), "regime": "border", "arm": arm.name, "seed": seed, "num_steps": steps,
                "evaluations": [[i * steps // 4, 0.25 if i < 3 else late] for i in range(5)],
                "first": {}, "series": {"rollout_corr/k3_kl": [0.25] * 5},
            })  # fmt: skip
    return found
