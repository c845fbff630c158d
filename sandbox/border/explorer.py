"""The map as a page to click: every run of the border study as a curve, with the command that makes it again."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.colors import to_hex

from lab.config.load import NOT_HASHED
from lab.report.differences import leaves
from lab.report.page import embedded, page
from lab.report.style import number
from lab.strict import validate
from sandbox.border.pictures import COLOURS
from sandbox.border.table import PLACE, places, runs, same_as, where
from sandbox.claims.border_arms import DEGREES, GAP_WORDS, GAPS, NORMS, REMEDY_WORDS, at
from sandbox.config import SandboxRun
from sandbox.ledger.cells import Regime, cell, key, last_step
from sandbox.ledger.claim import Row
from sandbox.ledger.course import evaluations

PRESETS = {
    "grpo": "GRPO", "gspo": "GSPO", "minirl": "MiniRL", "minirl_no_is": "MiniRL without its weight",
    "minirl_lengthnorm": "MiniRL, length-normalised",
}  # fmt: skip
"""Objectives in the order of the page's choice, and their names there."""

ENGINES = GAP_WORDS | {
    "r1.0": "FP8, noise 1.0", "logits1.1": "logit noise 1.1", "logits1.6": "logit noise 1.6",
    "int4": "INT4 weights", "stale": "old weights",
}  # fmt: skip
"""Every engine of the study in words of a few letters, the map's first."""

KL = "rollout_corr/k3_kl"
FIRST_SHOWN = ("grpo", "none", "r0.5", 8)
"""The place that the page opens with: objective, remedy, engine and N."""


def explorer(rows: Mapping[str, Row], regime: Regime) -> str:
    """The page, one HTML file that loads nothing: a table of the places that have runs, and the curves of one."""
    table = runs(rows, regime)
    found = {_id(place): _place(place, table, rows, regime) for place in places(table).to_dict("records")}
    kl = {gap: where(table, preset="grpo", gap=gap, remedy="none")["kl"].to_numpy(dtype=float) for gap in ENGINES}
    data = {
        "presets": {name: words for name, words in PRESETS.items() if name in set(table["preset"])},
        "remedies": REMEDY_WORDS, "degrees": DEGREES, "updates": _updates(regime),
        "first": "/".join(map(str, FIRST_SHOWN)),
        "gaps": {gap: [words, number(float(kl[gap].mean()))] for gap, words in ENGINES.items() if len(kl[gap])},
        "places": found, "same": dict(_twins(found)),
    }  # fmt: skip
    return page(
        "explorer.html.jinja", (), own=Path(__file__).parent / "template", title="Where training breaks, run by run",
        total=len(table), num_collapsed=int(table["collapsed"].to_numpy(dtype=float).sum()), data=embedded(data),
    )  # fmt: skip


def _id(place: Mapping[Any, Any]) -> str:
    return "/".join(str(place[name]) for name in ("preset", "remedy", "gap", "N"))


def _twins(found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Places that have no runs of their own since they equal another by construction, and that other place."""
    for preset in NORMS:
        for gap in GAPS:
            for n in DEGREES:
                for remedy in REMEDY_WORDS:
                    other = f"{preset}/{same_as(gap, n, remedy)}/{gap}/{n}"
                    if (own := f"{preset}/{remedy}/{gap}/{n}") not in found and other in found:
                        yield own, other


def _place(place: Mapping[Any, Any], table: pd.DataFrame, rows: Mapping[str, Row], regime: Regime) -> dict[str, Any]:
    """A place's summary, the command of one of its runs, and its runs from the best to the worst: the middle one is
    the typical one, and is shown first."""
    own = where(table, **{name: place[name] for name in PLACE}).sort_values(["area", "seed"], ascending=[False, True])
    arm = at(place["gap"], place["remedy"], place["N"], place["preset"])
    area, share = float(place["area"]), float(place["collapsed"])
    # The colour scale ends at an accuracy of 0.45, above the highest place.
    fill = to_hex(matplotlib.colormaps[COLOURS](min(1.0, area / 0.45)))
    curves = [_curve(rows[key(regime, arm, line["seed"])], line) for line in own.to_dict("records")]
    return {
        "n": len(own), "fell": round(share * len(own)), "area": f"{area:.2f}", "fill": fill, "light": area < 0.25,
        "mean": f"{area:.3f}" + ("" if math.isnan(place["low"]) else f" ({place['low']:.3f} to {place['high']:.3f})"),
        "command": command(regime, place["gap"], place["remedy"], place["N"], place["preset"]), "runs": curves,
    }  # fmt: skip


def _curve(row: Row, line: Mapping[Any, Any]) -> dict[str, Any]:
    """A run as points (update, value): pi's held-out accuracy, and the k3 KL of mu and old over windows of the run."""
    n, means = line["N"], row["series"].get(KL, [])
    kl = [
        [last_step(window, row["num_steps"], len(means)) * n, float(f"{value:.3g}")]
        for window, value in enumerate(means)
        if value is not None
    ]
    return {
        "seed": line["seed"], "fell": None if math.isnan(line["collapse"]) else int(line["collapse"]),
        "accuracy": [[int(step * n), round(value, 3)] for step, value in evaluations(row)], "kl": kl,
    }  # fmt: skip


def _updates(regime: Regime) -> int:
    return json.loads(regime.stated)["num_steps"]


SEED = "{seed}"
SEEDS = ("seed", "cold_start.seed")


def command(regime: Regime, gap: str, remedy: str, n: int, preset: str) -> str:
    """The command that makes a run of this place again; SEED stands for its seed.

    Its options are the fields in which the run's config differs from the regime's file. It gives the run's bits on
    the machine type of its row; elsewhere rounding differs, and the run is another draw.
    """
    made = cell(regime, at(gap, remedy, n, preset), 0).config
    before = validate(SandboxRun, json.loads(regime.stated), f"regime {regime.name}")
    old, new = (config.model_dump(mode="json", exclude_unset=True) for config in (before, made))
    # A cell lacks the fields that decide no bit, such as its loggers.
    changes = {".".join(path): values[1] for path, values in leaves([old, new]) if path[0] not in NOT_HASHED}
    # Its initial model has the run's own seed, too. `made` has 0 for both.
    seeds = f"--name {made.name.removesuffix('0')}{SEED} --seed {SEED} --cold_start.seed {SEED}"
    words = [f"--{name} {_yaml(value)}" for name, value in changes.items() if name not in SEEDS]
    return " ".join([f"firstorder train configs/claims/{regime.name}.yaml --compile true {seeds}", *words])


def _yaml(value: object) -> str:
    """The value as a word of a shell that YAML reads back."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
