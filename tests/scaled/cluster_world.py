"""The sandbox's engines behind the interfaces of the cluster's actors: Ray, gloo and processes are real."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from sandbox.engines.engine import SandboxEngine
from sandbox.model.checkpoint import load
from sandbox.training.engine import SandboxTrainingEngine
from scaled.cluster.engine_actor import OneByOne
from scaled.cluster.rank_group import Assembly
from scaled.config import PrecisionBlock, ScaledRun
from scaled.vllm_engine.quantize import quantised
from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, NamedTensors, Prompt, Response, Rollouts, Sampling, TokenScores, UpdateStats
from theory.objectives import Objective
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

SAMPLING = Sampling(max_tokens=8, num_responses=3, seed=5)
BUCKET = 20_000
"""Bytes; a dozen buckets for these weights."""


def alone(defects: str = "exact") -> Rollouts:
    """The draw of one engine in this process: five prompts with `SAMPLING`."""
    return worlds.rollout_engine(defects, worlds.model()).generate(worlds.prompts(5), SAMPLING)


class ShareEngine(OneByOne, SandboxEngine):
    """The sandbox engine for a piece of the prompts: response b of the whole draw uses row b of its stream.

    Where the folder `hold` exists, `generate` says so with a file of its process number, and waits for its end. The
    file `asked` gets a line with the prompts of each call and its process number.
    Asleep it has no weights, takes none and answers nothing.
    """

    hold: Path | None = None
    asked: Path | None = None
    is_asleep: bool = False

    def sleep(self) -> None:
        self.is_asleep = True
        for weight in self.model.parameters():
            weight.data.fill_(math.nan)

    def wake(self) -> None:
        self.is_asleep = False

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        assert not self.is_asleep
        super().load_weights(named_tensors, version)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        assert not self.is_asleep
        if self.asked is not None:
            with self.asked.open("a") as file:
                print(os.getpid(), *(prompt.id for prompt in prompts), file=file)
        if self.hold is not None and self.hold.is_dir():
            (self.hold / str(os.getpid())).touch()
            time.sleep(600)
        before = [] if sampling.draws else [prompts[0]] * (first_response // sampling.num_responses)
        whole = super().generate([*before, *prompts], sampling)
        return whole.select(range(len(before) * sampling.num_responses, len(whole)))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        scorer = SandboxTrainingEngine(self.model, worlds.OptimizerSettings())
        responses = tuple(
            Response(
                Prompt("probe", tuple(s[:1]), ""),
                torch.tensor(s[1:]),
                torch.zeros(len(s) - 1),
                torch.ones(len(s) - 1, dtype=torch.bool),
                "length",
                self.version,
            )
            for s in sequences
        )
        scores = scorer.score(Rollouts(responses), RoutingPlan("natural"))
        return [scores.logp_BT[b, : len(s) - 1] for b, s in enumerate(sequences)]


def build_engine(
    defects: str = "exact", hold: Path | None = None, folder: Path | None = None, asked: Path | None = None
) -> ShareEngine:
    """An engine actor's builder, for the model in `folder` or the contract suite's; a `functools.partial` of it."""
    torch.set_num_threads(1)
    config = worlds.model_config() if folder is None else load(folder).config
    engine = ShareEngine(config, worlds.DEFECTS[defects], stop_tokens=(worlds.STOP,))
    engine.hold, engine.asked = hold, asked
    return engine


def build_mortal(builds: Path) -> ShareEngine:
    """The builder of an engine whose first process dies of it; each build adds its process number to the file."""
    with builds.open("a") as file:
        print(os.getpid(), file=file)
    if len(builds.read_text().split()) == 1:
        os._exit(9)
    return build_engine()


class ReplicaRank:
    """One of several replicas that meet over gloo: each computes everything and reports its share of it.

    Exports are a collective, as Megatron's are: nobody gets ahead of the others by more than a tensor.
    """

    def __init__(self, rank: int, num_ranks: int, store: Store, engine: SandboxTrainingEngine, timeout_s: float):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        # From here on: on a busy machine the other rank may start much later than a collective may be late.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        self.index, self.num_ranks = rank, num_ranks
        self.engine = engine

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> tuple[list[int], TokenScores]:
        dist.barrier()
        return self._own(len(rollouts)), self.engine.score(rollouts, plan)

    def score_reference(self, rollouts: Rollouts) -> Tensor:
        return self.engine.score_reference(rollouts)

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        dist.barrier()
        return self.engine.update(minibatch, objective, plan)

    def export(self, folded: bool) -> NamedTensors:
        for i, item in enumerate(self.engine.named_tensors(folded)):
            dist.barrier()
            if i % self.num_ranks == self.index:
                yield item

    def predictor_weights(self) -> dict[int, Tensor]:
        """Its own layers, as a pipeline stage has them."""
        weights = self.engine.predictor_weights()
        return {n: w for i, (n, w) in enumerate(weights.items()) if i % self.num_ranks == self.index}

    def give_way(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        dist.barrier()
        if (folder.parents[3] / "full").exists():  # beside the runs
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        safetensors.torch.save_file(self.engine.state_tensors(), folder / f"rank-{self.index}.safetensors")

    def begin_save(self, folder: Path) -> None:
        """A copy of now, written by a thread that waits as long as the folder `slow` is beside the runs."""
        state = {name: tensor.clone() for name, tensor in self.engine.state_tensors().items()}

        def write() -> None:
            while (folder.parents[3] / "slow").exists():
                time.sleep(0.05)
            safetensors.torch.save_file(state, folder / f"rank-{self.index}.safetensors")

        self.writing = ThreadPoolExecutor(1).submit(write)

    def has_saved(self, wait: bool) -> bool:
        if not (wait or self.writing.done()):
            return False
        self.writing.result()
        return True

    def load(self, folder: Path) -> None:
        self.engine.load_state_tensors(safetensors.torch.load_file(folder / f"rank-{self.index}.safetensors"))

    def _own(self, B: int) -> list[int]:
        return list(range(B))[self.index :: self.num_ranks]


def build_rank(
    rank: int,
    num_ranks: int,
    store: Store,
    predictor: PredictorSettings | None = None,
    predictor_std: float = 0.0,
    folder: Path | None = None,
    algorithm: Algorithm | None = None,
    timeout_s: float = 60.0,
    died: Path | None = None,
) -> ReplicaRank:
    """The builder of a rank actor, for the model in `folder` or the contract suite's; a `functools.partial` of it.

    Where the file `died` is named and not there, the last rank makes it and dies before it has met the others.
    """
    if died is not None and rank == num_ranks - 1 and not died.exists():
        died.touch()
        os._exit(9)
    engine = worlds.training_engine(worlds.model(), predictor, keep_reference=True)
    if engine.predictor is not None:
        for number, W_p in engine.predictor.parameters.items():
            W_p.data.normal_(std=predictor_std, generator=stream(number, "predictor"))
    if folder is not None and algorithm is not None:
        settings = algorithm.predictor if algorithm.passes.trains_predictor else None
        engine = SandboxTrainingEngine(load(folder), algorithm.optimizer, settings)
    return ReplicaRank(rank, num_ranks, store, engine, timeout_s)


class FailingRank(ReplicaRank):
    """A rank whose export ends in an error."""

    def export(self, folded: bool) -> NamedTensors:
        yield from super().export(folded)
        raise ValueError("no more weights")


def build_failing(rank: int, num_ranks: int, store: Store) -> FailingRank:
    """The builder of such a rank."""
    return FailingRank(rank, num_ranks, store, worlds.training_engine(worlds.model()), timeout_s=60.0)


def _scores(parts: Sequence[tuple[list[int], TokenScores]]) -> TokenScores:
    """Each response from the rank that reports it; what the others sent of it is overwritten with garbage first."""
    first = parts[0][1]
    logp_BT = torch.full_like(first.logp_BT, torch.nan)
    for own, scores in parts:
        logp_BT[own] = scores.logp_BT[own]
    return TokenScores(logp_BT, first.entropy_BT, first.experts, first.natural, first.features)


ASSEMBLY = Assembly(scores=_scores, reference=lambda parts: parts[0], stats=lambda parts: parts[-1])


def config(num_ranks: int = 2, num_engines: int = 2) -> ScaledRun:
    """A run that only its cluster is made of: places for ranks and engines."""
    return ScaledRun.model_validate_json(
        f"""{{"name": "cluster", "num_steps": 1, "task": {{"kind": "arithmetic"}}, "model": {{"path": "none"}},
        "training": {{"num_ranks": {num_ranks}}}, "rollout": {{"num_engines": {num_engines}}},
        "cluster": {{"object_store_gib": 0.2}}, "algorithm": {{"objective": {{"preset": "minirl"}}}}}}"""
    )


def rounded(named_tensors: NamedTensors) -> NamedTensors:
    """The weights in bf16."""
    yield from ((name, tensor.bfloat16()) for name, tensor in named_tensors)


def signed(named_tensors: NamedTensors) -> NamedTensors:
    """The weights in bf16, after the number of the process that converts them."""
    yield f"process {os.getpid()}", torch.zeros(0)
    yield from rounded(named_tensors)


def enlarged(named_tensors: NamedTensors) -> NamedTensors:
    """The weights in fp16, after a weight of this process that fp16 cannot hold."""
    first = (f"process {os.getpid()}", torch.tensor([1.0, -7e4]))
    yield from quantised([first, *named_tensors], PrecisionBlock(compute="fp16"))
