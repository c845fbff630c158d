"""The plan of a config as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.doctor.words import counted
from scaled.plan import division
from scaled.plan.host_memory import in_memory
from scaled.plan.memory import GIB
from scaled.plan.summary import Plan

if TYPE_CHECKING:
    from rich.table import Table

MB = 1e6


def tables(plan: Plan) -> list[Table]:
    """The plan as rich tables: layout, memory of GPU and machine, payloads and compute."""
    return [_layout(plan), _memory(plan), _host(plan), _payloads(plan), _compute(plan)]


def titled_table(title: str, *columns: str) -> Table:
    """An empty table: the first column flush left, the others flush right; in an item-value table both flush left."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or columns == ("item", "value") else "right")
    return table


def _layout(plan: Plan) -> Table:
    config, shape = plan.config, plan.shape
    training, rollout, cluster = config.training, config.rollout, config.cluster
    table = titled_table(f"{config.name}: layout", "item", "value")
    table.add_row(
        "model", f"{shape.num_parameters / 1e9:.2f}B weights, {shape.num_active_parameters / 1e9:.2f}B per token"
    )
    have = cluster.num_nodes * cluster.gpus_per_node
    table.add_row(
        "cluster", f"{cluster.num_nodes} x {cluster.gpus_per_node} {plan.gpu.name}, {cluster.placement}; "
        f"{division.gpus_needed(config)} of {have} used",
    )  # fmt: skip
    table.add_row(
        "training", f"{training.num_ranks} ranks: TP {training.tensor_parallel}, CP {training.context_parallel}, "
        f"{division.pipeline_words(training)} x "
        f"{training.virtual_pipeline}, EP {training.expert_parallel}, ETP {training.expert_tensor_parallel}, "
        f"DP {training.data_parallel}",
    )  # fmt: skip
    batch = config.algorithm.batch
    budget = training.max_tokens_per_micro_batch
    size = f"of {training.micro_batch_size}" if budget is None else f"of at most {budget} tokens"
    table.add_row(
        "update", f"{batch.num_prompts} x {batch.num_responses} responses in "
        f"{counted(batch.num_minibatches, 'mini-batch', 'es')}; "
        f"{counted(plan.compute.num_micro, 'micro-batch', 'es')} {size} per rank",
    )  # fmt: skip
    table.add_row("rollout", f"{counted(rollout.num_engines, 'engine')} of {counted(rollout.tensor_parallel, 'GPU')}")
    for rank in plan.ranks:
        runs = ", ".join(f"{chunk[0]} to {chunk[-1]}" for chunk in rank.layers)
        experts = f"{rank.num_local_experts} experts per MoE layer; " if rank.num_local_experts else ""
        table.add_row(f"built, rank {rank.rank}", f"layers {runs}; {experts}{rank.num_parameters / 1e9:.4f}B weights")
    return table


def _memory(plan: Plan) -> Table:
    names = {"training": "training", "resident": "training, engines awake", "rollout": "rollout"}
    budgets = plan.budgets
    table = titled_table("Memory of one GPU, GiB", "part", *(names[name] for name in budgets))
    pools = [budget.memory.parts for budget in budgets.values()]
    for name in dict.fromkeys(part for parts in pools for part in parts):
        table.add_row(name, *(f"{parts[name] / GIB:.2f}" if name in parts else "" for parts in pools))
    table.add_section()
    table.add_row("total", *(f"{budget.memory.total / GIB:.2f}" for budget in budgets.values()))
    table.add_row("limit", *(f"{budget.limit / GIB:.2f}" for budget in budgets.values()))
    table.add_row("", *("fits" if budget.fits else "does not fit" for budget in budgets.values()))
    return table


def _host(plan: Plan) -> Table:
    cluster, pools = plan.config.cluster, (plan.host, plan.loading)
    title = f"CPU memory of the fullest machine, GiB; {_full_length(plan)}"
    table = titled_table(title, "part", "a step", "loading a checkpoint")
    for name in dict.fromkeys(part for pool in pools for part in pool.parts):
        table.add_row(name, *(f"{pool.parts[name] / GIB:.2f}" if name in pool.parts else "" for pool in pools))
    totals = [in_memory(plan.config, pool).total / GIB for pool in pools]
    table.add_section()
    capped = f", at most {cluster.object_store_gib:g} in the object store" if cluster.address is None else ""
    table.add_row(f"total{capped}", *(f"{total:.2f}" for total in totals))
    if cluster.host_gib is not None:
        table.add_row("limit", *(f"{cluster.host_gib:.2f}" for _ in pools))
        table.add_row("", *("fits" if total <= cluster.host_gib else "does not fit" for total in totals))
    return table


def _payloads(plan: Plan) -> Table:
    table = titled_table(f"Payloads of a global step; {_full_length(plan)}", "payload", "MB (1e6)", "GiB")
    for name, size in plan.payloads.items():
        table.add_row(name, f"{size / MB:,.1f}", f"{size / GIB:.2f}")
    return table


def _compute(plan: Plan) -> Table:
    step = plan.compute
    table = titled_table("Compute of a global step", "stage", "tokens", "PFLOP", "seconds")
    table.add_row("rollout", f"{step.tokens:,}", f"{step.rollout_flops / 1e15:,.0f}", f"{step.rollout_s:,.0f}")
    scored, updated = f"{step.score_tokens:,}", f"{step.update_tokens:,}"
    table.add_row(f"{_scores(plan)} pass, padded", scored, f"{step.score_flops / 1e15:,.0f}", "")
    table.add_row("updates, padded (seconds of both lines)", updated, f"{step.update_flops / 1e15:,.0f}",
                  f"{step.training_s:,.0f}")  # fmt: skip
    table.add_row("push", "", "", f"{step.push_s:,.0f}")
    if step.turn_s:
        table.add_row("optimizer states to the host and back", "", "", f"{step.turn_s:,.0f}")
    table.add_section()
    beside = ", rollout beside training" if plan.config.schedule.steps_off > 0 else ""
    table.add_row(f"total{beside}", "", f"{step.total_flops / 1e15:,.0f}", f"{step.step_s:,.0f}")
    table.add_row("GPU hours of the cluster", "", "", f"{step.gpu_hours:,.1f}")
    return table


def _full_length(plan: Plan) -> str:
    return f"{plan.config.rollout.max_model_len:,} tokens a sequence"


def _scores(plan: Plan) -> str:
    """The kinds of passes without gradients; the tokens are those of one."""
    objective = plan.config.algorithm.build().objective
    names = ["old", *["reference"] * (objective.kl_coefficient > 0), *["look-ahead"] * objective.looks_ahead]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


__all__ = ["tables", "titled_table"]
