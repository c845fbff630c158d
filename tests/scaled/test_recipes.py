"""Every recipe in configs/scaled: it loads, holds what its paper prints, divides and fits, and Megatron builds it."""

from __future__ import annotations

import shutil
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from scaled.cluster import groups
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.transfer import Meter
from scaled.model_shape import SHAPES
from scaled.plan.host_memory import stored_bytes
from scaled.plan.summary import Plan, dry_run_layout, make_plan
from scaled.vllm_engine import engine
from tests.scaled.plan_world import forked_builds, loaded
from theory.contracts import Sampling

FOLDER = Path("configs/scaled")
RECIPES = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))


@cache
def plan_of(name: str) -> Plan:
    return make_plan(loaded(name))


ALG, OBJ, BATCH, REPLAY = "algorithm", "algorithm.objective", "algorithm.batch", "algorithm.replay"
RATE, MULTIPLIER = "algorithm.optimizer.learning_rate", "algorithm.replay.predictor.learning_rate_multiplier"

M, M44 = "MiniRL (arXiv 2512.01374) sec. 4.2", "MiniRL (arXiv 2512.01374) sec. 4.4"
MINIRL = [
    (f"{OBJ}.preset", "minirl", "MiniRL Eq. 7"),
    (f"{OBJ}.eps_low", 0.2, M),
    (f"{OBJ}.eps_high", 0.27, M),
    (f"{OBJ}.cap", 5.0, M),
    (f"{BATCH}.num_responses", 16, M),
    (f"{ALG}.sampling.max_tokens", 32_768, M),
    ("training.precision", "bf16", M),
    ("rollout.precision.weights", "fp8_block", M),
    ("evaluation.num_samples", 32, M),
    ("evaluation.max_prompts", 90, M),
]


def off_policy(N: int, num_prompts: int, where: str) -> list[tuple[str, Any, str]]:
    return [(f"{BATCH}.num_minibatches", N, where), (f"{BATCH}.num_prompts", num_prompts, where)]


S, T12 = "R3 (arXiv 2510.11370) sec. 5.1", "R3 (arXiv 2510.11370) Table 12"
R3 = [
    (f"{BATCH}.num_prompts", 256, T12),
    (f"{BATCH}.num_responses", 8, T12),
    ("task.max_prompt_tokens", 2048, T12),
    (f"{ALG}.sampling.max_tokens", 30_720, T12),
    (f"{ALG}.optimizer.weight_decay", 0.1, T12),
    (f"{ALG}.optimizer.betas", (0.9, 0.999), T12),
    (f"{ALG}.optimizer.eps", 1e-8, T12),
    (f"{ALG}.optimizer.warmup_steps", 0, T12),
    (f"{ALG}.optimizer.max_grad_norm", 1.0, T12),
    (f"{ALG}.dynamic_sampling.enabled", True, S),
    ("evaluation.every", 5, S),
    ("rollout.precision.weights", "same", "MiniRL (arXiv 2512.01374) footnote 5"),
]
GRPO = [(f"{OBJ}.preset", "grpo", S), (f"{OBJ}.eps_low", 0.2, T12), (f"{OBJ}.eps_high", 0.27, T12)]
GSPO = [(f"{OBJ}.preset", "gspo", S), (f"{OBJ}.eps_low", 3e-4, T12), (f"{OBJ}.eps_high", 4e-4, T12)]
TIS = [(f"{OBJ}.correction.name", "token_tis", S), (f"{OBJ}.correction.cap", 2.0, T12)]
NO_TIS = [(f"{OBJ}.correction", None, S)]


def mini(steps: int, rate: float, last: int, where: str = S) -> list[tuple[str, Any, str]]:
    return [
        (f"{BATCH}.num_minibatches", steps, where),
        (RATE, rate, where),
        ("num_steps", last, "R3 Table 1 or App. E"),
    ]


def mode(name: str, where: str) -> list[tuple[str, Any, str]]:
    return [(f"{REPLAY}.mode", name, where)]


E1, F = "Pr2 (arXiv 2606.00395) App. E.1", "Pr2 (arXiv 2606.00395) App. F"
PR2 = [
    (f"{OBJ}.preset", "grpo_dapo", "Pr2 Eq. 14"),
    (f"{OBJ}.aggregation", "token_sum", "Pr2 Eq. 14"),
    (f"{OBJ}.eps_low", 0.2, E1),
    (f"{OBJ}.kl_coefficient", 0.0, E1),
    (f"{REPLAY}.old_gates", "predicted", "Pr2 Eq. 6"),
    (f"{REPLAY}.predictor.loss", "kl", "Pr2 Eq. 8"),
    ("rollout.precision.weights", "same", "open"),
]


def pr2_model(P: int, G: int, tokens: int, T_c: int, high: float, gpu: str, gpus: int) -> list[tuple[str, Any, str]]:
    return [
        *PR2, (f"{BATCH}.num_prompts", P, E1), (f"{BATCH}.num_responses", G, E1),
        (f"{ALG}.sampling.max_tokens", tokens, E1),
        (f"{REPLAY}.predictor.num_positions", T_c, E1), (f"{OBJ}.eps_high", high, E1), ("cluster.gpu", gpu, E1),
        ("gpus", gpus, E1),
    ]  # fmt: skip


def off(N: int, rate: float, multiplier: float, where: str = E1) -> list[tuple[str, Any, str]]:
    return [(f"{BATCH}.num_minibatches", N, E1), (RATE, rate, E1), (MULTIPLIER, multiplier, where)]


QWEN = pr2_model(64, 8, 16 * 1024, 2 * 1024, 0.28, "H200-141GB", 32)
MOONLIGHT = pr2_model(32, 16, 1024, 1024, 0.28, "H200-141GB", 32)
OLMOE = pr2_model(32, 8, 1024, 1024, 0.1, "RTX-PRO-6000-96GB", 8)

TABLE: dict[str, list[tuple[str, Any, str]]] = {
    # Mini-batches stay 64 x 16 = 1,024, so the rollout batch grows with N; replay is the best of each figure.
    "minirl/n1": [*MINIRL, *mode("none", "MiniRL Fig. 1"), *off_policy(1, 64, M)],
    "minirl/n2_r2": [
        *MINIRL, *mode("R2", "MiniRL Fig. 2"), *off_policy(2, 128, M44),
    ],
    "minirl/n4_r3": [
        *MINIRL, *mode("R3", "MiniRL Fig. 3"), *off_policy(4, 256, M44),
    ],
    "minirl/n8_r3": [
        *MINIRL, *mode("R3", "MiniRL Fig. 4"), *off_policy(8, 512, M44),
    ],
    "r3/sft_mini8_grpo": [*R3, *GRPO, *NO_TIS, *mode("none", S), *mini(8, 1e-6, 180)],
    "r3/sft_mini8_grpo_r3": [*R3, *GRPO, *NO_TIS, *mode("R3", S), *mini(8, 1e-6, 180)],
    "r3/sft_mini8_gspo": [*R3, *GSPO, *NO_TIS, *mode("none", S), *mini(8, 1e-6, 180)],
    "r3/sft_mini8_gspo_r3": [*R3, *GSPO, *NO_TIS, *mode("R3", S), *mini(8, 1e-6, 180)],
    "r3/sft_mini1_grpo": [*R3, *GRPO, *NO_TIS, *mode("none", S), *mini(1, 3e-6, 160)],
    "r3/sft_mini1_grpo_tis": [*R3, *GRPO, *TIS, *mode("none", S), *mini(1, 3e-6, 160)],
    "r3/sft_mini1_grpo_r3": [*R3, *GRPO, *NO_TIS, *mode("R3", S), *mini(1, 3e-6, 160)],
    "r3/sft_mini1_grpo_tis_r3": [*R3, *GRPO, *TIS, *mode("R3", S), *mini(1, 3e-6, 160)],
    "r3/base_mini1_grpo": [*R3, *GRPO, *NO_TIS, *mode("none", S), *mini(1, 3e-6, 180)],
    "r3/base_mini1_grpo_tis": [*R3, *GRPO, *TIS, *mode("none", S), *mini(1, 3e-6, 180)],
    "r3/base_mini1_grpo_r3": [*R3, *GRPO, *NO_TIS, *mode("R3", S), *mini(1, 3e-6, 180)],
    "r3/base_mini1_grpo_tis_r3": [*R3, *GRPO, *TIS, *mode("R3", S), *mini(1, 3e-6, 180)],
    "r3/base_mini1_grpo_fixed_router": [
        *R3, *GRPO, *NO_TIS, *mode("none", S), *mini(1, 3e-6, 180), (f"{ALG}.freeze_router", True, "R3 App. C"),
    ],
    "r3/base_mini4_gspo": [*R3, *GSPO, *NO_TIS, *mode("none", S), *mini(4, 2e-6, 200, "R3 App. E")],
    "r3/base_mini4_tis": [*R3, *GRPO, *TIS, *mode("none", S), *mini(4, 2e-6, 200, "R3 App. E")],
    "r3/base_mini4_r3": [*R3, *GRPO, *NO_TIS, *mode("R3", S), *mini(4, 2e-6, 200, "R3 App. E")],
    "pr2/qwen3_off2": [*QWEN, *mode("Pr2", E1), *off(2, 2e-6, 1e4)],
    "pr2/qwen3_off4": [*QWEN, *mode("Pr2", E1), *off(4, 1.5e-6, 1e3)],
    "pr2/qwen3_off8": [*QWEN, *mode("Pr2", E1), *off(8, 1e-6, 1e3)],
    "pr2/qwen3_pr3_off2": [*QWEN, *mode("Pr3", F), *off(2, 2e-6, 1e2, F)],
    "pr2/qwen3_pr3_off4": [*QWEN, *mode("Pr3", F), *off(4, 1.5e-6, 1e1, F)],
    "pr2/qwen3_pr3_off8": [*QWEN, *mode("Pr3", F), *off(8, 1e-6, 1e1, F)],
    "pr2/moonlight_off2": [*MOONLIGHT, *mode("Pr2", E1), *off(2, 5e-7, 1e2)],
    "pr2/moonlight_off4": [*MOONLIGHT, *mode("Pr2", E1), *off(4, 3.7e-7, 5e1)],
    "pr2/moonlight_off8": [*MOONLIGHT, *mode("Pr2", E1), *off(8, 2.5e-7, 5e1)],
    "pr2/olmoe_off2": [*OLMOE, *mode("Pr2", E1), *off(2, 5e-7, 1e3)],
    "pr2/olmoe_off4": [*OLMOE, *mode("Pr2", E1), *off(4, 3.7e-7, 1e3)],
    "pr2/olmoe_off8": [*OLMOE, *mode("Pr2", E1), *off(8, 2.5e-7, 1e3)],
}  # fmt: skip

SHARED = ("qwen3_30b_a3b", "r3/common", "pr2/common")


def test_every_recipe_is_in_the_table():
    """Each file is a recipe with a row for every number that its paper prints, or what recipes share."""
    assert set(RECIPES) == set(TABLE) | set(SHARED)


@pytest.mark.parametrize("name", TABLE)
def test_recipe_holds_what_its_paper_prints(name):
    """Every hyperparameter that the paper prints is the recipe's."""
    config = plan_of(name).config
    cluster = config.cluster
    for field, printed, where in TABLE[name]:
        found = cluster.num_nodes * cluster.gpus_per_node if field == "gpus" else attrgetter(field)(config)
        assert found == printed, f"{name}: {field}: {where} prints {printed}, the recipe has {found}"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_fits_its_cluster(name):
    """Training and rollout fit their GPUs, the cluster has no idle GPU, and no rollout outlasts its timeout."""
    plan = plan_of(name)
    assert plan.misfits == []
    cluster = plan.config.cluster
    assert plan.to_json()["cluster"]["gpus_needed"] == cluster.num_nodes * cluster.gpus_per_node
    task = plan.config.task
    assert task.kind == "jsonl" and task.max_response_tokens == plan.config.algorithm.sampling.max_tokens
    # A push beside what spills takes 20 times as long; a file that others build on is no run.
    stored = sum(stored_bytes(plan.config, plan.shape).values())
    assert name in SHARED or stored <= cluster.object_store_gib * 2**30


def unbuilt(self, cluster, build, num_engines, **options):
    """A group's `__init__` that keeps its engines' builder and the layers of their objects, and starts none."""
    self.build, self.layer_sets = build, options["layer_sets"]


@pytest.mark.parametrize("name", [name for name in RECIPES if plan_of(name).config.algorithm.replay.mode == "Pr3"])
def test_engines_of_a_predicted_mu_give_features(name, tmp_path, monkeypatch):
    """The engine that a Pr3 recipe builds takes its rollout's request for router features, graphs or not."""

    class Unstarted(engine.VllmEngine):
        def _start(self):
            self.version = 0

    config = plan_of(name).config
    shutil.copy(SHAPES / f"{config.model.shape}.json", tmp_path / "config.json")
    model = config.model.model_copy(update={"path": str(tmp_path)})
    sampling = Sampling(max_tokens=8, num_features=config.algorithm.replay.predictor.num_positions)
    monkeypatch.setattr(RolloutGroup, "__init__", unbuilt)
    monkeypatch.setattr(engine, "VllmEngine", Unstarted)
    monkeypatch.setattr(engine.quantize, "choose_kernels", lambda precision, is_cpu: "native")
    for is_eager in (False, True):
        rollout = config.rollout.model_copy(update={"enforce_eager": is_eager})
        changed = config.model_copy(update={"model": model, "rollout": rollout})
        groups.rollout_group(changed, (1,), object.__new__(Cluster), Meter()).build()._check_ready(sampling)


def test_comments_cite_every_printed_number():
    """A line of a recipe that sets a hyperparameter of the algorithm says where it is from, or that it is open."""
    uncited = []
    for path in FOLDER.rglob("*.yaml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            code, _, comment = line.partition("#")
            names = "eps_low:", "eps_high:", "learning_rate", "num_prompts:", "num_minibatches:", "max_tokens:", "cap: "
            if any(name in code for name in names) and "null" not in code and not comment:
                uncited.append(f"{path}: {line}")
    assert [line for line in uncited if "mini4" not in line] == []
    # The mini4 files cite App. E once, in their first line.
    assert all("App. E" in Path(line.split(": ")[0]).read_text(encoding="utf-8") for line in uncited)


def distinct_layouts() -> list[str]:
    """One recipe of each model and layout; a token budget changes no weight."""
    found: dict[Any, str] = {}
    for name in RECIPES:
        config = plan_of(name).config
        layout = config.training.model_dump_json(exclude={"max_tokens_per_micro_batch"})
        found.setdefault((config.model.shape, layout), name)
    return list(found.values())


@pytest.mark.parametrize("name", distinct_layouts())
def test_megatron_builds_the_layout(name):
    """Megatron-core builds every stage of each distinct layout on the meta device, with the plan's bytes."""
    plan = plan_of(name)
    with forked_builds():
        ranks = dry_run_layout(plan)
    assert [rank.stage for rank in ranks] == list(range(plan.config.training.pipeline_parallel))
    parts = plan.training.memory.parts
    assert ranks[0].weight_bytes == parts["weights"]
    assert ranks[0].gradient_bytes == parts["gradients, fp32"]
    assert ranks[0].optimizer_bytes == pytest.approx(parts["optimizer states"], abs=2)
    assert ranks[0].peak_bytes < 2**30
