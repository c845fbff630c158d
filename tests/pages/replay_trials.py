"""Diagnoses of planted faults with the replay trial and without, on models on which no threshold was set.

`python -m tests.pages.replay_trials run` plants every fault that leaves a gap, writes results/replay_trials.csv and the
table of docs/how-to/diagnose-a-dump.md; without `run` it writes the page's parts alone. `... demo RUN` tries the demo's
run without a remedy (`make demo`), from the weights of its checkpoint at step 49, for the page's example.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from firstorder.cli import main as firstorder
from lab.doctor.diagnosis import diagnose
from lab.doctor.replay_trial import ReplayTrial, try_replay
from lab.markdown import markdown_table
from lab.traces import Trace
from sandbox.engines import RouterNoise
from sandbox.measure.layers import DecoderReference
from tests.pages.doctor_plants import PLANTS, Plant
from tests.pages.study import ROOT, Part
from tests.pages.ward import Ward

FILE = ROOT / "results/replay_trials.csv"
TABLE = Part(ROOT / "docs/how-to/diagnose-a-dump.md", "replay trials")
DEMO_FILE, DEMO = ROOT / "results/replay_trial_demo.json", Part(TABLE.page, "demo trial")
WIDE = ("--algorithm.batch.num_prompts", "16", "--seed", "25", "--model.hidden_size", "96")
DEEP = (
    "--algorithm.batch.num_prompts", "16", "--seed", "26", "--model.hidden_size", "36", "--model.num_heads", "3",
    "--model.num_kv_heads", "3", "--model.num_layers", "3", "--model.num_experts", "16",
)  # fmt: skip
DRAWS = (500, 501, 502)
FORMATS_OF_THE_TRAINER = ("trainer fp8", "both fp8, the engine's from a bf16 export")
"""Plants whose trainer computes in a format that no reference has: the model does not score as old does."""
TRIED: dict[str, Plant] = {
    name: plant
    for name, plant in PLANTS.items()
    if plant.cause in ("precision", "routing", "stale", "switched", "wrong_weights", "mask", "temperature")
    and name not in FORMATS_OF_THE_TRAINER
} | {f"router noise {std:g}": Plant("routing", RouterNoise(std=std)) for std in (0.5, 1.0)}
ROUTERS_LAST = "routers never arrive"
"""Old weights, but those of the routers alone: replay is right to blame the routers."""


def trials() -> Iterator[dict[str, Any]]:
    """One row per model, plant and draw: the diagnosis from the trace alone, and with the trial."""
    for words in (WIDE, DEEP):
        ward = Ward("configs/arithmetic.yaml", words, 6)
        reference = DecoderReference(ward.bench.trainer.model)
        for name, plant in TRIED.items():
            for draw in DRAWS:
                trace = ward.trace(plant, draw)
                alone, tried = diagnose(trace), diagnose(trace, reference)
                if tried.trial is None:
                    continue  # the two sides are equal to the bit
                yield {
                    "width": words[words.index("--model.hidden_size") + 1],
                    "plant": name,
                    "cause": plant.cause,
                    "draw": draw,
                    "removed": round(tried.trial.removed, 4),
                    "alone": alone.named[0].name,
                    "tried": tried.named[0].name,
                }


def table() -> str:
    """A line per group of plants: traces, share removed, and diagnoses from the trace alone → with the trial."""
    rows = pd.read_csv(FILE)
    groups = {
        "router noise": rows[rows.cause == "routing"],
        ROUTERS_LAST: rows[rows.plant == ROUTERS_LAST],
        "all others": rows[(rows.cause != "routing") & (rows.plant != ROUTERS_LAST)],
    }
    lines = []
    for name, own in groups.items():
        cells = [name, str(len(own)), f"{own.removed.min():.2f} to {own.removed.max():.2f}"]
        for wanted in (own.cause, "undecided", "routing"):
            before, after = ((own[way] == wanted).sum() for way in ("alone", "tried"))
            cells.append(f"{before} → {after}")
        lines.append(cells)
    titles = ("planted", "traces", "replay removes", "named rightly", "undecided", "named *routing*")
    return markdown_table(titles, lines)


def demo_trial(run: Path) -> dict[str, Any]:
    """The trial on the demo's run: step 50, scored by the weights of step 49; and the processor that trained it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        if firstorder(["export", str(run), "--step", "49", "--to", str(model)]) != 0:
            raise ValueError(f"{run}: expected a run with a checkpoint of step 49")
        found = try_replay(Trace.load(run / "rollouts/step-000050.safetensors"), DecoderReference.load(model))
    (processor, *_) = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {"processor": processor, **asdict(found)}


def demo() -> str:
    """The doctor's sentence on the demo's run, and where it was made."""
    kept = json.loads(DEMO_FILE.read_text(encoding="utf-8"))
    processor = kept.pop("processor")
    return f"On an {processor} it says: *{ReplayTrial(**kept).sentence}*\n"


def main(words: list[str]) -> None:
    """Runs the trials, if asked, and writes the page's parts."""
    if words[:1] == ["run"]:
        pd.DataFrame(trials()).to_csv(FILE, index=False)
    if words[:1] == ["demo"]:
        DEMO_FILE.write_text(json.dumps(demo_trial(Path(words[1])), indent=1) + "\n", encoding="utf-8")
    TABLE.write(table())
    DEMO.write(demo())


if __name__ == "__main__":
    main(sys.argv[1:])
