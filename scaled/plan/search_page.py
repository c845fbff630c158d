"""A search of layouts as a table and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scaled.config import ScaledRun
from scaled.plan import compute
from scaled.plan.search import FittingLayout, Search
from scaled.plan.tables import titled_table

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 10
"""Layouts that a table shows."""


LEGEND = (
    "GiB of a GPU: in an update, kept by ranks while engines are awake, and of an engine. Seconds of a step: rollout, "
    "training, and push with turns."
)
"""The numbers of the table's last columns, in words."""


def search_table(config: ScaledRun, made: Search) -> Table:
    """The quickest layouts, one per row."""
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    title = f"{config.name}: {len(made.found)} of {made.num_tried} layouts fit {gpus} {config.cluster.gpu}"
    if len(made.found) > SHOWN:
        title += f"; the {SHOWN} quickest"
    table = titled_table(
        title, "ranks", "TP CP PP EP", "recompute", "engines", "seqs", "GiB: update kept engine", "step s", "GPU h"
    )
    for found in made.found[:SHOWN]:
        table.add_row(*_row(found, gpus))
    return table


def _row(found: FittingLayout, gpus: int) -> list[str]:
    training, rollout = found.config.training, found.config.rollout
    kept = "-" if found.kept_gib is None else f"{found.kept_gib:.1f}"
    offload = "" if training.offload is None else ", offload"
    share = f" at {rollout.gpu_memory_utilization:g}" if found.config.cluster.placement == "colocated" else ""
    return [
        f"{training.num_ranks} {found.config.cluster.placement}{offload}",
        f"{training.tensor_parallel} {training.context_parallel} {training.pipeline_parallel} "
        f"{training.expert_parallel}",
        training.recompute,
        f"{rollout.num_engines} x {rollout.tensor_parallel}{share}",
        str(rollout.max_num_seqs),
        f"{found.update_gib:.1f} {kept} {found.rollout_gib:.1f}",
        f"{found.step_s:,.0f} = {found.rollout_s:,.0f} + {found.training_s:,.0f} + {_push(found):,.0f}",
        f"{gpus * found.step_s / 3600:,.1f}",
    ]


def _push(found: FittingLayout) -> float:
    return found.step_s - compute.together_seconds(found.config, found.rollout_s, found.training_s)


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
        "reasons": [{"what": reason.what, "count": reason.count, "least": reason.least} for reason in made.reasons],
    }
