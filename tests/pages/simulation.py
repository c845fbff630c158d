"""The comparison in docs/how-to/plan-a-cluster.md of simulated with measured stages, from results/simulation.

`python -m tests.pages.simulation` writes it; `python -m tests.pages.simulation NAME RUN_FOLDER` first stores a run's
stages in results/simulation/measured.json. One run gives the rates, which predict the others.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from firstorder.worlds import Schemas
from lab.config.load import config_hash, load
from lab.markdown import markdown_table
from lab.records import RunFolder
from lab.report.style import number
from scaled.config import ScaledRun
from scaled.model_shape import load_shape
from scaled.plan.hardware import gpu_named
from scaled.plan.measured import PARTS, Measured, measured, rates_of, simulated
from tests.pages.study import Part

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/simulation"
PART = Part(ROOT / "docs/how-to/plan-a-cluster.md", "simulation")
RATES = "rates"


@dataclass(frozen=True)
class Run:
    """A run of the cluster demo's first config: its description on the page, and its options."""

    words: str
    options: tuple[str, ...]

    @property
    def config(self) -> ScaledRun:
        """The run's config."""
        found = load("configs/demo_scaled/bf16_r3.yaml", list(self.options), Schemas())
        assert isinstance(found, ScaledRun)
        return found


RUNS = {
    RATES: Run("as shipped, whose rates the others take", ()),
    "again": Run("another seed, 12 steps", ("--seed", "1", "--num_steps", "12")),
    "half": Run(
        "half the prompts, a checkpoint every 3 steps",
        ("--algorithm.batch.num_prompts", "16", "--num_steps", "12", "--checkpoint.every", "3"),
    ),
    "off": Run("one step off", ("--schedule.steps_off", "1", "--num_steps", "12")),
}


def read() -> dict[str, Measured]:
    """The stored stages, by run name."""
    path = RESULTS / "measured.json"
    rows = json.loads(path.read_text()) if path.is_file() else {}
    return {
        name: Measured(row["num_steps"], row["median"], row["distance"], (row["tokens"][0], row["tokens"][1]))
        for name, row in rows.items()
    }


def add(name: str, folder: Path) -> None:
    """Stores the run's stages; ValueError if the folder belongs to another config."""
    wanted = config_hash(RUNS[name].config)
    if not folder.name.endswith(wanted):
        raise ValueError(f"{folder}: expected a run of {name}, whose hash is {wanted}, got another")
    rows = {key: asdict(value) for key, value in read().items()}
    rows[name] = asdict(measured(RunFolder.open(folder), RUNS[name].config))
    ordered = {key: rows[key] for key in RUNS if key in rows}
    (RESULTS / "measured.json").write_text(json.dumps(ordered, indent=1) + "\n")


def predictions() -> dict[str, dict[str, float]]:
    """Seconds of each stage of every run, predicted from the first run's rates and lengths alone."""
    shape, gpu = load_shape(str(RESULTS / "model"), None), gpu_named("H100-80GB")
    first = read()[RATES]
    rates = rates_of(RUNS[RATES].config, shape, gpu, first)
    return {name: simulated(run.config, shape, gpu, first.tokens, rates) for name, run in RUNS.items()}


def page() -> str:
    """The tables between the marks."""
    found, predicted = read(), predictions()
    rows = []
    for name, run in RUNS.items():
        for part in PARTS:
            told, seen = predicted[name][part], found.get(name)
            if seen is None or part not in seen.median:
                cells = (number(told), "–", "–")
            else:
                middle, distance = seen.median[part], seen.distance[part]
                # `or`: -0.0, whose sign may be that of a last bit.
                error = round(told / middle - 1, 2) or 0.0
                cells = (number(told), f"{number(middle)} ± {number(distance)}", f"{error:+.0%}")
            rows.append((run.words if part == PARTS[0] else "", part, *cells))
    return markdown_table(("run", "stage", "simulated, s", "measured, s", "error"), rows)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        add(sys.argv[1], Path(sys.argv[2]))
    PART.write(page())


__all__ = ["PART", "RUNS", "add", "page", "predictions", "read"]
