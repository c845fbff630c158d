"""A search of layouts as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scaled.config import ScaledRun
from scaled.plan import compute, division
from scaled.plan.search import FittingLayout, Search
from scaled.plan.tables import titled_table

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 10
"""Layouts that a table shows."""

LEGEND = (
    "Engines x GPUs of each, at their share of a colocated GPU. GiB: ranks in an update, what they keep while engines "
    "are awake, and an engine. Below the seconds of a step: rollout, training (the longer one where sampling runs "
    "ahead), and push with turns."
)
"""The numbers of the table, in words."""


def search_table(config: ScaledRun, made: Search) -> Table:
    """The quickest layouts, two lines each; at most 80 columns wide."""
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    title = f"{config.name}: {len(made.found)} of {made.num_tried} layouts fit {gpus} {config.cluster.gpu}"
    if len(made.found) > SHOWN:
        title += f"; the {SHOWN} quickest"
    table = titled_table(title, "ranks", "engines", "GiB of a GPU", "seconds of a step")
    table.leading = 1
    for found in made.found[:SHOWN]:
        table.add_row(*_row(found))
    return table


def _row(found: FittingLayout) -> list[str]:
    training, rollout, placement = found.config.training, found.config.rollout, found.config.cluster.placement
    offload = "" if training.offload is None else ", offload"
    share = f" at {rollout.gpu_memory_utilization:g}" if placement == "colocated" else ""
    kept = "" if found.kept_gib is None else f", {found.kept_gib:.1f} kept"
    push_s = found.step_s - compute.together_seconds(found.config, found.rollout_s, found.training_s)
    both = f"{found.rollout_s:,.0f}", f"{found.training_s:,.0f}"
    together = " + ".join(both) if found.config.schedule.steps_off == 0 else f"max({', '.join(both)})"
    return [
        f"{training.num_ranks}: TP {training.tensor_parallel} CP {training.context_parallel} "
        f"{division.pipeline_words(training)} EP {training.expert_parallel}\n"
        f"{placement}, {training.recompute}{offload}",
        f"{rollout.num_engines} x {rollout.tensor_parallel}{share}\n{rollout.max_num_seqs} seqs",
        f"{found.update_gib:.1f}{kept}\n{found.rollout_gib:.1f} engine",
        f"{found.step_s:,.0f}\n{together} + {push_s:,.0f}",
    ]


def to_json(made: Search) -> dict[str, Any]:
    """The whole search under plain names."""
    return {
        "num_tried": made.num_tried,
        "found": [
            {
                "options": found.options,
                "step_s": found.step_s,
                "rollout_s": found.rollout_s,
                "training_s": found.training_s,
                "gib": {"update": found.update_gib, "kept": found.kept_gib, "engine": found.rollout_gib},
            }
            for found in made.found
        ],
        "reasons": [asdict(reason) for reason in made.reasons],
    }
