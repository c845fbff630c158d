"""Shared parts of a Megatron rank's tests: one tiny model that the sandbox can open too, batches, records, scenarios.

Functions that take a `rank` run in processes of `megatron_world.spawn`; the rest runs in the test's own.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sandbox.model import MoE, checkpoint
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from scaled.config import ModelBlock, TrainingBlock
from tests.scaled.megatron_world import free_ports, joined, spawn
from theory.algorithm import Algorithm, OptimizerSettings
from theory.contracts import MiniBatch, NamedTensors, Prompt, Response, Rollouts, TokenScores, UpdateStats
from theory.objectives import Objective, preset
from theory.routing.features import draw_rows
from theory.routing.gates import GATES
from theory.routing.packed_rows import offsets_of
from theory.routing.passes import RoutingPlan
from theory.routing.payloads import pack_record
from theory.routing.predictor import PredictorSettings
from theory.routing.record import RoutingRecord
from theory.streams import stream
from theory.top_tokens import TopTokens

VOCABULARY, WIDTH, EXPERTS, SLOTS = 19, 32, 8, 2  # an odd vocabulary needs a padding row under TP2

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "EP2": {"expert_parallel": 2},
    "EP2 allgather": {"expert_parallel": 2, "token_dispatcher": "allgather"},
    "TP2": {"tensor_parallel": 2},
    "TP2+ETP2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "TP2+EP2": {"tensor_parallel": 2, "expert_parallel": 2},
    "TP2+EP2 allgather": {"tensor_parallel": 2, "expert_parallel": 2, "token_dispatcher": "allgather"},
    "CP2": {"context_parallel": 2},
    "CP2+EP2": {"context_parallel": 2, "expert_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "PP2+VPP2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "PP2, 3 + 1 layers": {"pipeline_parallel": 2, "num_layers_in_last_pipeline_stage": 1},
}


def layers(dense: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The decoder layers of the tiny model that have a router."""
    return tuple(n for n in range(4) if n not in dense)


def write_model(
    folder: Path, dense: tuple[int, ...] = (), gate: str = "qwen3", qk_norm: Any = "head", tied: bool = False
) -> Path:
    """A Hugging Face folder of a random model of four layers whose routers choose clearly."""
    config = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        experts_per_token=SLOTS,
        expert_size=24,
        dense_size=48,
        dense_layers=dense,
        gate=GATES[gate],
        qk_norm=qk_norm,
        tied_head=tied,
    )
    model = MoE(config, stream(1, "rank-world"))
    with torch.no_grad():
        for parameter in model.router_parameters():
            parameter.mul_(4)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.save(model, folder)
    return folder


def algorithm(mode: str = "Pr2", **changes: Any) -> Algorithm:
    """MiniRL with an AdamW that is not ruled by the sign of rounding errors: its eps is of the gradients' own size.

    The predictor learns at the model's rate: at a default made for rates of 1e-6 rounding would grow a thousandfold.
    """
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1, "eps": 1e-4, **changes.pop("optimizer", {})}
    fields = {"objective": preset("minirl"), "num_prompts": 4, "num_responses": 2, "predictor": PredictorSettings(1.0)}
    fields |= changes
    return Algorithm(mode=mode, optimizer=OptimizerSettings(**optimizer), **fields)


def batch(num: int = 8, seed: int = 0) -> Rollouts:
    """Responses of different lengths, a tenth of their tokens not sampled by mu, made-up logp_mu."""
    draws = stream(seed, "rank-world-batch")
    responses = []
    for i in range(num):
        P, T = int(torch.randint(1, 6, (1,), generator=draws)), int(torch.randint(2, 9, (1,), generator=draws))
        prompt = Prompt(str(i), tuple(torch.randint(2, VOCABULARY, (P,), generator=draws).tolist()), "")
        tokens = torch.randint(0, VOCABULARY, (T,), generator=draws)
        logp_mu = -3 * torch.rand(T, generator=draws)
        responses.append(Response(prompt, tokens, logp_mu, torch.rand(T, generator=draws) > 0.1, "stop", 0))
    return Rollouts(tuple(responses))


def with_top(rollouts: Rollouts, num: int, seed: int = 0) -> Rollouts:
    """The rollouts with the `num` likeliest tokens of a made-up mu at every position."""
    lengths = [len(response.tokens) for response in rollouts.responses]
    logits_AV = 2 * torch.randn(sum(lengths), VOCABULARY, generator=stream(seed, "rank-world-top"))
    return replace(rollouts, top=TopTokens.of(logits_AV.log_softmax(-1), num, offsets_of(lengths)))


def altered_routes(rollouts: Rollouts, numbers: Sequence[int], missing: float = 0.1, seed: int = 3) -> RoutingRecord:
    """Random experts for every row, `missing` of the rows not recorded."""
    draws = stream(seed, "rank-world-record")
    payloads = []
    for response in rollouts.responses:
        rows = response.num_tokens - 1
        ids = torch.rand(rows, len(numbers), EXPERTS, generator=draws).argsort(dim=-1)[..., :SLOTS]
        ids[torch.rand(rows, generator=draws) < missing] = -1
        payloads.append(ids)
    return pack_record(payloads, [r.num_tokens for r in rollouts.responses], numbers, EXPERTS)


def altered(rollouts: Rollouts, **options: Any) -> RoutingPlan:
    """Replay of routes that no router would choose, at every layer; `options` are for `altered_routes`."""
    return RoutingPlan("replay", record=altered_routes(rollouts, layers(), **options))


def one_minibatch(rollouts: Rollouts, logp_old_BT: Tensor, **fields: Any) -> MiniBatch:
    """The whole batch as one mini-batch, its advantages from -1 to 1."""
    return MiniBatch(rollouts, logp_old_BT, torch.linspace(-1, 1, len(rollouts)), 0, 1, **fields)


def feature_rows(rollouts: Rollouts, num: int = 3) -> tuple[Tensor, ...]:
    """A few rows of each response that predict its tokens."""
    num_rows = [r.num_tokens - 1 for r in rollouts.responses]
    return draw_rows(
        num_rows, [len(r.prompt.tokens) - 1 for r in rollouts.responses], num, stream(0, "rank-world-rows")
    )


def passes(rollouts: Rollouts, numbers: Sequence[int]) -> dict[str, RoutingPlan]:
    """Every way in which a pass routes (theory/routing/passes.py::PASSES), features and experts' scores asked for."""
    draws = stream(5, "rank-world-predictor")
    predictor = {n: 0.3 * torch.randn(WIDTH, EXPERTS, generator=draws) for n in numbers}
    rows = feature_rows(rollouts)
    record = altered_routes(rollouts, numbers)
    scored = altered_routes(rollouts, numbers, missing=0.0, seed=4)
    natural = RoutingPlan("natural", feature_rows=rows, keep_hidden=True, scored=scored)
    predicted = RoutingPlan("predicted", predictor=predictor, feature_rows=rows, keep_hidden=True, scored="used")
    return {
        "natural": natural,
        "replay": replace(natural, source="replay", record=record),
        "predicted": replace(predicted, gates="predicted"),
        "predicted, live gates": predicted,
    }


def minibatches(rollouts: Rollouts, old: TokenScores, replay: RoutingPlan) -> list[tuple[MiniBatch, RoutingPlan]]:
    """Two mini-batches of half the responses each; the predictor learns from the second one's cached features."""
    B = len(rollouts)
    advantages_B = torch.randn(B, generator=stream(0, "rank-world-advantages"))
    halves = [list(range(B // 2, B)), list(range(B // 2))]
    made = []
    for index, chosen in enumerate(halves):
        part = rollouts.select(chosen)
        T = max(len(r.tokens) for r in part.responses)
        features = None if index == 0 or old.features is None else old.features.select(chosen)
        logp_top = None if old.logp_top is None else old.logp_top.select(chosen)
        minibatch = MiniBatch(
            part, old.logp_BT[chosen, :T], advantages_B[chosen], index, 2, features, logp_old_top=logp_top
        )
        made.append((minibatch, replace(replay, keep_hidden=False).select(chosen)))
    return made


def sandbox_engine(folder: Path, recipe: Algorithm, micro_batch_size: int = 2, **options: Any) -> SandboxTrainingEngine:
    """The sandbox's engine over the same folder."""
    predictor = recipe.predictor if recipe.passes.trains_predictor else None
    return SandboxTrainingEngine(
        checkpoint.load(folder), recipe.optimizer, predictor, recipe.freeze_router, micro_batch_size, **options
    )


def sandbox_gradients(engine: SandboxTrainingEngine) -> dict[str, Tensor]:
    """The parameters' gradients under Hugging Face names, 0 where there is none."""
    kept = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        gradients = {name: tensor.clone() for name, tensor in engine.named_tensors()}
        for name, parameter in engine.model.named_parameters():
            parameter.copy_(kept[name])
    return gradients


class OneRank:
    """theory's TrainingEngine over a world of one Megatron rank, in this process."""

    def __init__(self, folder: Path, recipe: Algorithm, keep_reference: bool = False, **fields: Any) -> None:
        from scaled.megatron_engine.rank import MegatronRank

        self.rank = MegatronRank(ModelBlock(path=str(folder)), training(**fields), recipe, keep_reference)

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        from scaled.megatron_engine.parts import assemble_scores

        return assemble_scores([self.rank.score(rollouts, plan)])

    def score_reference(self, rollouts: Rollouts) -> Tensor:
        from scaled.megatron_engine.parts import assemble_logp

        return assemble_logp([self.rank.score_reference(rollouts)])

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        from scaled.megatron_engine.parts import assemble_stats

        return assemble_stats([self.rank.update(minibatch, objective, plan)])

    def named_tensors(self, folded: bool = False) -> NamedTensors:
        return iter(on_host(self.rank.export(folded)).items())

    def gradients(self) -> NamedTensors:
        return iter(on_host(self.rank.gradients()).items())

    def predictor_weights(self) -> dict[int, Tensor]:
        return self.rank.predictor_weights()


def gradient_bytes(rank: Any) -> int:
    """Bytes of the gradient buffers of a MegatronRank."""
    buffers = [buffer for chunk in rank.policy.wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)


def optimizer_tensors(rank: Any) -> dict[str, Tensor]:
    """The weights that a MegatronRank's optimizer steps, and their states but for AdamW's count of steps, by name."""
    found: dict[str, Tensor] = {}
    for i, one in enumerate(rank.optimizer.megatron.chained_optimizers):
        for j, parameter in enumerate(p for group in one.optimizer.param_groups for p in group["params"]):
            states = {name: state for name, state in one.optimizer.state.get(parameter, {}).items() if name != "step"}
            found |= {f"{i}.{j}.{name}": tensor.detach() for name, tensor in {"weight": parameter, **states}.items()}
    return found


def training(num_ranks: int = 1, **fields: Any) -> TrainingBlock:
    """A layout; fp32 and two responses a micro-batch unless it says otherwise."""
    plain = {"precision": "fp32", "micro_batch_size": 2, "distributed_optimizer": False, "timeout_s": 120}
    return TrainingBlock(num_ranks=num_ranks, **{**plain, **fields})


def obey(laws: Sequence[Callable[[Path], Any]], folder: Path) -> dict[str, str | None]:
    """In one rank's process: each law's name, and how it was broken, or None."""
    broken: dict[str, str | None] = {}
    for law in laws:
        try:
            law(folder)
        except BaseException:  # torch.distributed.checkpoint raises one that is no Exception
            broken[law.__name__] = traceback.format_exc()
        else:
            broken[law.__name__] = None
    return broken


def verdicts_on(module: str, folder: Path, num_ranks: int = 1, **fields: Any) -> list[dict[str, str | None]]:
    """The answer of `obey` on a module's LAWS on each rank of one world."""
    return spawn(num_ranks, _obey, module, folder, training(num_ranks, **fields), free_ports(1)[0])


def _obey(rank: int, module: str, folder: Path, block: TrainingBlock, port: int) -> dict[str, str | None]:
    with joined(block, rank, port):
        return obey(importlib.import_module(module).LAWS, folder)


def on_host(named_tensors: NamedTensors) -> dict[str, Tensor]:
    """The tensors by name, on the CPU."""
    return {name: tensor.cpu() for name, tensor in named_tensors}


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest absolute difference of tensors by the same names."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())[:5]
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in theirs)


def merged(parts: Sequence[dict[Any, Tensor]]) -> dict[Any, Tensor]:
    """Tensors by name of all ranks together; a name that two ranks have must have the same bits on both."""
    whole: dict[Any, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert name not in whole or torch.equal(whole[name], tensor), f"{name} differs between ranks"
            whole[name] = tensor
    return whole
