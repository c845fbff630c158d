"""Run folders with plausible made-up series, written through RunFolder itself: what the report is tested with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from lab.records import RunFolder, manifest
from lab.traces import Trace
from lab.verdict import judge

FP8 = "engine: {defects: [{kind: weight_precision, format: fp8_e4m3, scale: channel}]}"
BF16 = "engine: {defects: [{kind: kv_precision, format: bf16}]}"
EXACT = "engine: {defects: []}"
WORDS = {FP8: "FP8 weights, scaled per channel", BF16: "BF16 KV cache", EXACT: "exact"}
"""The words of each engine in its run's manifest."""


@dataclass(frozen=True)
class Recipe:
    """One made-up run: how large its engine gap is, how much of it is routing, and whether it falls apart."""

    name: str
    kl: float
    disagreement: float
    preset: str = "grpo"
    mode: str = "none"
    correction: str = "null"
    collapses_at: int | None = None
    engine: str = FP8
    num_minibatches: int = 4


DEMO = (
    Recipe("demo-exact", 0.0, 0.0, engine=EXACT),
    Recipe("demo-none", 4e-3, 0.12, collapses_at=38),
    Recipe("demo-r2", 3e-3, 0.1, mode="R2", collapses_at=30),
    Recipe("demo-tis", 3e-3, 0.1, correction="{name: token_tis, cap: 2.0}"),
    Recipe("demo-r3", 4e-4, 0.08, mode="R3"),
    Recipe("demo-minirl", 3e-3, 0.1, preset="minirl"),
    Recipe("demo-pr3", 3e-4, 0.05, mode="Pr3"),
)
"""The six runs of the demo, and one with a predictor."""


def write_demo(root: Path, recipes: tuple[Recipe, ...] = DEMO, num_steps: int = 60) -> list[RunFolder]:
    """The run folders of these recipes, finished, each with one trace."""
    return [write_run(root, recipe, seed, num_steps) for seed, recipe in enumerate(recipes)]


def write_run(root: Path, recipe: Recipe, seed: int, num_steps: int) -> RunFolder:
    """One finished run folder."""
    run = RunFolder.create(root, recipe.name, f"{seed:08x}", datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC))
    run.write_config(
        f"name: {recipe.name}\nseed: {seed}\nbackend: sandbox\nnum_steps: {num_steps}\n"
        f"algorithm:\n  objective: {{preset: {recipe.preset}, correction: {recipe.correction}}}\n"
        f"  replay: {{mode: {recipe.mode}}}\n"
        f"  batch: {{num_prompts: 16, num_responses: 8, num_minibatches: {recipe.num_minibatches}}}\n{recipe.engine}\n"
    )
    run.write_manifest(manifest(seed) | {"engine": WORDS[recipe.engine.split("\n")[0]]})
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, num_steps + 1):
        run.append_metrics(step, metrics_at(recipe, step, num_steps, generator))
    run.save_trace(num_steps, made_up_trace(recipe, num_steps, generator))
    run.write_verdict(judge(run.metrics()).to_json())
    return run


def metrics_at(recipe: Recipe, step: int, num_steps: int, generator: torch.Generator) -> dict[str, float]:
    """The metrics of one step under their registered names; what the recipe has no data for is absent."""
    noise = torch.randn(8, generator=generator, dtype=torch.float64).tolist()
    since = 0 if recipe.collapses_at is None else max(0, step - recipe.collapses_at)
    reward = 0.42 + 0.45 * (1 - math.exp(-step / 25)) - 0.05 * since
    kl = recipe.kl * math.exp(step / 60 + 0.25 * noise[1] + 0.3 * since)
    metrics = {
        "reward/mean": min(1.0, max(0.0, reward + 0.05 * noise[0])),
        "response_length/mean": 48 + 4 * noise[2] + 8 * step / num_steps,
        "rollout_corr/k3_kl": kl,
        "rollout_corr/extreme_frac_tau2": min(1.0, round(3 * kl, 4)),
        "rollout_corr/eff_sample_size": 1 / (1 + 2 * kl),
        "actor/entropy": 0.5 * math.exp(-1.2 * step / num_steps - 0.25 * since + 0.08 * noise[3]),
        "actor/grad_norm": 0.8 * math.exp(0.3 * noise[4] + 0.2 * since),
        "actor/pg_clipfrac_high": 0.012 * math.exp(0.3 * noise[5]),
        "actor/pg_clipfrac_low": 0.008 * math.exp(0.3 * noise[6]),
        "staleness/k3_kl": 2e-3 * math.exp(0.3 * noise[7]),
        "routing/router_disagreement": recipe.disagreement * (1 + step / 120),
        "routing/token_disagreement": min(1.0, 3 * recipe.disagreement * (1 + step / 120)),
    }
    metrics["actor/k3_kl_mu_pi"] = kl + metrics["staleness/k3_kl"]
    if step == 1 or step % 10 == 0:
        metrics["eval/accuracy"] = min(1.0, max(0.0, reward - 0.04 + 0.01 * noise[2]))
    if recipe.preset == "minirl" or recipe.correction != "null":
        metrics["rollout_corr/truncated_fraction"] = min(1.0, kl / 4)
    if recipe.mode != "none":
        metrics["routing/topk_agreement"] = (0.97 if recipe.mode == "Pr3" else 0.92) - 0.02 * step / num_steps
        metrics["routing/zero_deviation"] = metrics["routing/topk_agreement"] - 0.02
        metrics["routing/one_deviation"] = 0.98 * (1 - metrics["routing/zero_deviation"])
        metrics["routing/route_kl"] = (3e-3 if recipe.mode == "Pr3" else 2e-2) * math.exp(0.2 * noise[5])
        metrics["routing/native_rows"] = 0.0
    if recipe.mode == "Pr3":
        metrics["predictor/loss"] = 0.02 * math.exp(-step / 30 + 0.1 * noise[6])
    return metrics


def made_up_trace(recipe: Recipe, step: int, generator: torch.Generator) -> Trace:
    """A trace of 32 responses whose engine gap is the recipe's, K = 2 of 16 experts in 3 layers."""
    B, S, prompt, L, K, E = 32, 60, 12, 3, 2, 16
    A, R = B * (S - prompt), B * (S - 1)
    logp_mu = -(torch.rand(A, generator=generator) ** 3) * 5
    gap = math.sqrt(2 * recipe.kl) * torch.randn(A, generator=generator)
    scores = torch.rand(R, L, E, generator=generator)
    moved = scores + recipe.disagreement * torch.rand(R, L, E, generator=generator)
    mu, old = (s.topk(K).indices.sort().values.to(torch.int8) for s in (scores, moved))
    return Trace(
        step=step,
        tokens=torch.randint(0, 50, (B * S,), generator=generator, dtype=torch.int32),
        offsets=torch.arange(B + 1) * S,
        num_prompt=torch.full((B,), prompt),
        is_response=torch.ones(A, dtype=torch.bool),
        logp_mu=logp_mu,
        logp_old=(logp_mu + gap).clamp(max=0),
        rewards=torch.randint(0, 2, (B,), generator=generator).float(),
        experts_mu=mu,
        experts_old=old,
        layer_numbers=tuple(range(L)),
        num_experts=E,
        texts={i: chr(48 + i) for i in range(40)} | {40: "\n", 41: " the", 42: " therefore"},
    )
