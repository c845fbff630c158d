"""Peak resident memory of a run's driver by the size of its batch, with the cluster's own path from config to report.

`python -m tests.scaled.driver_bench`: every size in a fresh process. Two ranks and an engine are real Ray actors that
compute nothing: they answer with random tokens of full length, and with nothing else (a dense model) or with what real
ones record under a replay mode: routes of 48 layers and 8 slots, as Qwen3-30B has them, and router features on a few
rows of each response. Under score centering (`centred`, without replay) they record mu's 20 likeliest tokens at every
position, too. `--stored` prints the bytes in the object store, by kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import ray
import torch
from ray._private.internal_api import node_stats
from safetensors.torch import save_file
from torch import Tensor

import scaled.run
import scaled.session
from lab.markdown import markdown_table
from scaled.cluster.engine_actor import OneByOne
from scaled.cluster.rank_group import Assembly
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.training_group import TrainingGroup
from scaled.cluster.transfer import shares
from scaled.config import ScaledRun
from scaled.session import Session
from tests.scaled.cluster_run_world import save_model
from tests.scaled.forked_workers import of_parent
from tests.scaled.worker_request import ADDRESS
from theory.contracts import MiniBatch, NamedTensors, Prompt, Response, Rollouts, Sampling, TokenScores, UpdateStats
from theory.objectives import Objective
from theory.routing.features import RouterFeatures, draw_sampling_rows
from theory.routing.packed_rows import offsets_of
from theory.routing.passes import RoutingPlan
from theory.routing.payloads import pack_record
from theory.routing.record import RoutingRecord
from theory.streams import stream
from theory.top_tokens import TokenRows, TopTokens, id_dtype

FACTORS = (1, 2, 4, 8)
PROMPTS, RESPONSES, TOKENS = 8, 8, 256
"""Of the smallest batch: 16,384 tokens."""
STORED_PROMPTS = 2
"""Enough for `--stored`: what Ray adds to a record is no hundredth of it."""
LAYERS, SLOTS, EXPERTS, WIDTH = 48, 8, 128, 2048
TOP, VOCABULARY = 20, 151_936
STEPS, MINIBATCHES = 3, 2
POSITIONS = 4
"""Feature rows of a response: 221 KB each."""

Kind = Literal["dense", "centred", "R2", "R3", "Pr2", "Pr3"]
KINDS: tuple[Kind, ...] = ("dense", "R3", "Pr2")
"""Those of the table."""


def routes(rollouts: Rollouts, seed: int) -> RoutingRecord:
    """Distinct ascending experts in every row, layer and slot."""
    lengths = [response.num_tokens for response in rollouts.responses]
    first = torch.randint(EXPERTS // SLOTS, (sum(lengths) - len(lengths), LAYERS, 1), generator=stream(seed, "routes"))
    ids = (first + torch.arange(SLOTS) * (EXPERTS // SLOTS)).to(torch.int16)
    return pack_record(list(ids.split([n - 1 for n in lengths])), lengths, tuple(range(LAYERS)), EXPERTS)


def features(rollouts: Rollouts, rows: Sequence[Tensor], with_hidden: bool) -> RouterFeatures:
    """Zeros on the feature rows of these responses: bfloat16 hidden states, if wanted, and float32 logits."""
    sizes = [len(row) for row in rows]
    hidden = torch.zeros(sum(sizes), LAYERS, WIDTH, dtype=torch.bfloat16) if with_hidden else None
    logits = torch.zeros(sum(sizes), LAYERS, EXPERTS)
    return RouterFeatures(torch.cat(list(rows)), offsets_of(sizes), hidden, logits, tuple(range(LAYERS)))


def likeliest(rollouts: Rollouts, num: int) -> TopTokens:
    """The same `num` tokens at every position."""
    lengths = [len(response.tokens) for response in rollouts.responses]
    ids = torch.arange(num, dtype=id_dtype(VOCABULARY)).repeat(sum(lengths), 1)
    return TopTokens.packed(ids, torch.full(ids.shape, -3.0), offsets_of(lengths), VOCABULARY)


class IdleEngine(OneByOne):
    """An engine that draws tokens without a model."""

    def __init__(self, kind: Kind):
        self.kind, self.version = kind, -1

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.version = version

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        draws, T = stream(sampling.seed, "idle", first_response), sampling.max_tokens
        responses = tuple(
            Response(
                prompt, torch.randint(2, 12, (T,), generator=draws), -torch.rand(T, generator=draws),
                torch.ones(T, dtype=torch.bool), "length", self.version,
            )
            for prompt in prompts
            for _ in range(sampling.num_responses)
        )  # fmt: skip
        rollouts = Rollouts(responses)
        if self.kind == "dense":
            return rollouts
        made = None
        if sampling.num_features > 0:
            rows = draw_sampling_rows(rollouts.padded().sampling_rows_B, sampling.num_features, draws)
            made = features(rollouts, rows, with_hidden=True)
        top = likeliest(rollouts, sampling.num_top) if sampling.num_top > 0 else None
        return Rollouts(responses, routes(rollouts, sampling.seed), made, top=top)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        return [torch.zeros(len(s) - 1) for s in sequences]


class IdleRank:
    """A rank that answers for its share of the responses without a model."""

    def __init__(self, rank: int, num_ranks: int, store: object, kind: Kind):
        self.rank, self.num_ranks, self.kind = rank, num_ranks, kind

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        own, batch = self._own(rollouts), rollouts.padded()
        logp_bT = batch.logp_mu_BT[own]
        natural = routes(rollouts.select(own), 1) if self.kind != "dense" else None
        # As Megatron's rank: the experts that it used are a record of its own, also where it replays mu's.
        is_natural = self.kind == "dense" or plan.source == "natural"
        used = natural if is_natural else routes(rollouts.select(own), 3)
        made = self._features(rollouts, plan, own, with_hidden=plan.keep_hidden)
        top = None if rollouts.top is None else _here(rollouts.top.select(own).logp_rows)  # as if old were mu
        return TokenScores(logp_bT, torch.zeros_like(logp_bT), used, natural, made, top)

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        own = self._own(minibatch.rollouts)
        if minibatch.logp_old_top is not None:
            _here(minibatch.logp_old_top.select(own))
        record = routes(minibatch.rollouts.select(own), 2) if self.kind != "dense" else None
        made = self._features(minibatch.rollouts, plan, own, with_hidden=False)
        return UpdateStats({"actor/grad_norm": 1.0}, minibatch.logp_old_BT[own], record, made)

    def export(self, folded: bool) -> NamedTensors:
        yield f"{self.rank}", torch.zeros(8)

    def predictor_weights(self) -> dict[int, Tensor]:
        return {n: torch.zeros(WIDTH, EXPERTS) for n in range(LAYERS)} if self.kind in ("Pr2", "Pr3") else {}

    def give_way(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        save_file({"nothing": torch.zeros(1)}, folder / f"rank-{self.rank}.safetensors")

    def _features(
        self, rollouts: Rollouts, plan: RoutingPlan, own: list[int], with_hidden: bool
    ) -> RouterFeatures | None:
        if self.kind == "dense" or plan.feature_rows is None:
            return None
        return features(rollouts, [plan.feature_rows[b] for b in own], with_hidden)

    def _own(self, rollouts: Rollouts) -> list[int]:
        return list(range(*shares(len(rollouts), self.num_ranks)[self.rank]))


def _here(rows: TokenRows) -> TokenRows:
    """The same rows, fetched into this process."""
    return TokenRows(rows.values, rows.offsets)


def _concat(parts: Sequence[Any]) -> Any:
    """The records, features or rows of all ranks together; None where no rank has any."""
    found = [part for part in parts if part is not None]
    return type(found[0]).concat(found) if found else None


def _scores(parts: Sequence[TokenScores]) -> TokenScores:
    logp_BT, entropy_BT = (torch.cat([getattr(p, name) for p in parts]) for name in ("logp_BT", "entropy_BT"))
    used, natural = _concat([p.experts for p in parts]), _concat([p.natural for p in parts])
    made, top = _concat([p.features for p in parts]), _concat([p.logp_top for p in parts])
    return TokenScores(logp_BT, entropy_BT, used, natural, made, top)


def _stats(parts: Sequence[UpdateStats]) -> UpdateStats:
    logp_BT = torch.cat([p.logp_pi_BT for p in parts])
    natural, made = _concat([p.natural for p in parts]), _concat([p.features for p in parts])
    return UpdateStats(parts[0].metrics, logp_BT, natural, made)


class IdleSession(Session):
    """A session whose ranks and engine compute nothing."""

    kind: Kind = "R3"
    own: OwnMemory | None = None
    trained = 0
    """The largest RssAnon until the end of training, in kB, where `own` is there."""

    def close(self) -> None:
        super().close()
        IdleSession.trained = 0 if self.own is None else self.own.most

    def ranks(self) -> TrainingGroup:
        assembly = Assembly(_scores, lambda parts: parts[0], _stats)
        build: Any = partial(IdleRank, kind=self.kind)
        return TrainingGroup(self.places, build, 2, assembly, bucket_bytes=2**20, meter=self.meter)

    def engines(self) -> RolloutGroup:
        build: Any = partial(IdleEngine, kind=self.kind)
        return RolloutGroup(
            self.places, build, 1, max_num_seqs=self.config.rollout.max_num_seqs, timeout_s=600.0, max_restarts=0,
            bucket_bytes=2**20, meter=self.meter,
        )  # fmt: skip


def config(folder: Path, num_prompts: int, kind: Kind) -> ScaledRun:
    """A run of some steps, without evaluations, traces and checkpoints in between."""
    is_centred = kind == "centred"
    mode = "none" if is_centred or kind == "dense" else kind
    raw = {
        "name": "driver", "backend": "scaled", "num_steps": STEPS, "output": str(folder / "runs"),
        "task": {"kind": "arithmetic", "num_held_out": 8}, "model": {"path": str(folder / "model")},
        "algorithm": {
            "objective": {"preset": "minirl"} | ({"centering": "top_k", "centering_k": TOP} if is_centred else {}),
            "replay": {"mode": mode, "predictor": {"num_positions": POSITIONS}},
            "batch": {"num_prompts": num_prompts, "num_responses": RESPONSES, "num_minibatches": MINIBATCHES},
            "sampling": {"max_tokens": TOKENS},
        },
        "training": {"num_ranks": 2}, "rollout": {"max_model_len": 2 * TOKENS}, "probe": {"max_mean_abs_diff": 99.0},
        "evaluation": {"every": 100, "num_samples": 1, "max_prompts": 1}, "checkpoint": {"every": 100},
        "traces": {"every": 100}, "cluster": {"object_store_gib": 3.0}, "logging": {"loggers": ("csv",)},
    }  # fmt: skip
    return ScaledRun.model_validate(raw)


class OwnMemory(threading.Thread):
    """The largest RssAnon of this process, in kB, as seen a hundred times per second.

    Its resident memory has also the pages of the object store that it read, which Ray's store counts and frees.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.01):
            (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]))


class Stored:
    """Bytes in the object store after the last of a run's `num` calls of a method, as Ray's daemon counts them."""

    def __init__(self, group: type, method: str, num: int) -> None:
        self.last, self._calls, inner = 0, 0, getattr(group, method)

        def called(*given: Any) -> Any:
            answer = inner(*given)
            self._calls += 1
            if self._calls % num == 0:
                self.last = self._count()
            return answer

        setattr(group, method, called)

    def _count(self) -> int:
        """The least in three seconds: Ray frees what nobody needs any more up to a second late."""
        (node,) = (node for node in ray.nodes() if node["Alive"])
        found = []
        for _ in range(15):
            stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
            found.append(stats.store_stats.object_store_bytes_used)
            time.sleep(0.2)
        return min(found)


def one(num_prompts: int, kind: Kind) -> dict[str, float]:
    """Peak MB of this process before and after a run; of its own pages alone, in the run and until its report is
    written; MB of mu's record in a batch.
    """
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "model")
        IdleSession.own = own = OwnMemory()
        own.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        row = run(Path(name), num_prompts, kind)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        own.ended.set()
    record = row.get("transfer/routes_bytes") or 0.0
    return {
        "before": before * 1024 / 1e6,
        "peak": peak * 1024 / 1e6,
        "own": own.most * 1024 / 1e6,
        "trained": IdleSession.trained * 1024 / 1e6,
        "record": record / 1e6,
    }


def run(folder: Path, num_prompts: int, kind: Kind) -> dict[str, Any]:
    """A run's last metrics; `folder` has the model."""
    IdleSession.kind, scaled.session.Session = kind, IdleSession
    return scaled.run.run(config(folder, num_prompts, kind), progress="none").metrics()[-1]


def stored(*kinds: Kind) -> dict[Kind, dict[str, int]]:
    """Bytes in the object store in the last step of a run on STORED_PROMPTS: after its last update and its push."""
    places = {
        "update": Stored(TrainingGroup, "update", STEPS * MINIBATCHES),
        "push": Stored(RolloutGroup, "load_weights", STEPS + 1),  # the first push is before the first step
    }
    found: dict[Kind, dict[str, int]] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as name:
            save_model(Path(name) / "model")
            run(Path(name), STORED_PROMPTS, kind)
        found[kind] = {name: place.last for name, place in places.items()}
    return found


def main() -> str:
    """The table, by batch size."""
    lines = []
    for factor in FACTORS:
        found = {}
        for kind in KINDS:
            words = [sys.executable, "-m", __spec__.name, "--one", str(factor), "--kind", kind]
            answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            found[kind] = json.loads(answer.splitlines()[-1])
        figures = [found["dense"]["before"]]
        figures += [found[kind][name] for name in ("peak", "own") for kind in KINDS]
        figures += [found["R3"]["record"], factor * PROMPTS * RESPONSES * POSITIONS * 0.221184]
        lines.append((f"{factor * PROMPTS * RESPONSES * TOKENS:,}", *(f"{x:,.0f}" for x in figures)))
    head = (
        "sampled tokens",
        "MB at the start",
        "peak without routes",
        "peak with routes",
        "peak with features too",
        "own pages without",
        "own pages with",
        "own pages with features too",
        "MB of one record of routes",
        "MB of features",
    )
    return markdown_table(head, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="driver_bench")
    parser.add_argument("--one", type=int)
    parser.add_argument("--kind", choices=get_args(Kind), default="R3")
    parser.add_argument("--stored", action="store_true")
    words = parser.parse_args()
    # The workers of a test's Ray are forks, which start sooner; what is measured here is the driver's and the store's.
    with of_parent() if ADDRESS in os.environ else contextlib.nullcontext():
        if words.stored:
            print(json.dumps(stored("R2", "R3", "Pr2", "Pr3", "centred")))
        else:
            print(main() if words.one is None else json.dumps(one(words.one * PROMPTS, words.kind)))
