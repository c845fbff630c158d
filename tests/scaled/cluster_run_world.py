"""A short cluster run with the sandbox's engines inside, and its rows without what depends on the clock.

Actors build themselves from cluster_world.py, which imports none of this: Lightning would double their start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import scaled.session
from firstorder.cli import main
from lab.config.load import load
from lab.records import RunFolder
from lab.tasks.arithmetic import ALPHABET
from sandbox.model import MoE
from sandbox.model.checkpoint import save
from scaled.cluster.rollout_group import RolloutGroup
from scaled.cluster.training_group import TrainingGroup
from scaled.config import ScaledRun
from scaled.session import Session
from tests.contracts import worlds
from tests.scaled.cluster_world import ASSEMBLY, build_engine, build_rank
from tests.scaled.forked_workers import of_parent
from theory.streams import stream

CONFIG = """
name: cut
seed: 3
backend: scaled
num_steps: 6
task: {kind: arithmetic, min_digits: 2, max_digits: 3, num_held_out: 8}
model: {path: MODEL}
algorithm:
  objective: {preset: minirl}
  replay: {mode: Pr3, predictor: {num_positions: 4}}
  batch: {num_prompts: 4, num_responses: 2, num_minibatches: 2}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3, warmup_steps: 3}
training: {num_ranks: 2, micro_batch_size: 2}
rollout: {num_engines: 1, timeout_s: 300.0}
evaluation: {every: 3, num_samples: 1, max_prompts: 4}
checkpoint: {every: 2}
traces: {every: 3}
cluster: {object_store_gib: 0.2}
logging: {loggers: [csv]}
"""
MEASURED = ("timing_s/", "rollout/", "transfer/")
"""Groups of metrics that say how a step ran, not what it computed."""


class SandboxSession(Session):
    """A `scaled.session.Session` whose ranks and engines hold the sandbox's; all around them is the real thing."""

    layer_sets: tuple[tuple[int, ...], ...] = ()

    def ranks(self) -> TrainingGroup:
        folder = Path(self.config.model.path).resolve()
        build = partial(build_rank, folder=folder, algorithm=self.algorithm)
        return TrainingGroup(
            self.places, build, self.config.training.num_ranks, ASSEMBLY,
            bucket_bytes=2**20, meter=self.meter,
        )  # fmt: skip

    def engines(self) -> RolloutGroup:
        build = partial(build_engine, "weights-bf16", folder=Path(self.config.model.path).resolve())
        rollout = self.config.rollout
        return RolloutGroup(
            self.places, build, rollout.num_engines, max_num_seqs=rollout.max_num_seqs,
            timeout_s=float(rollout.timeout_s), max_restarts=rollout.max_restarts, bucket_bytes=2**20, meter=self.meter,
            lost=self.interruptions.engine_was_lost, layer_sets=self.layer_sets,
        )  # fmt: skip


def before_each_step(
    patch: pytest.MonkeyPatch, act: Callable[[Session, int, TrainingGroup, RolloutGroup], None]
) -> None:
    """Calls act(session, step, ranks, engines) before every global step of this process's runs."""
    real = Session._step

    def step(self: Session, number: int, *parts: Any) -> None:
        *_, training, rollout, _ = parts
        act(self, number, training, rollout)
        real(self, number, *parts)

    patch.setattr(Session, "_step", step)


def save_model(folder: Path, alphabet: str = ALPHABET) -> None:
    """A tiny Qwen3-MoE over the characters of a task (arithmetic, unless told), as a Hugging Face folder."""
    config = replace(worlds.model_config(), vocab_size=len(alphabet) + 2)
    save(MoE(config, stream(0, "cluster-model")), folder)


def config(model: Path, folder: Path, *words: str, text: str = CONFIG) -> ScaledRun:
    path = folder / "config.yaml"
    path.write_text(text.replace("MODEL", str(model)))
    return load(path, ["--output", str(folder / "runs"), *words], {"scaled": ScaledRun})


def computed(folder: RunFolder) -> list[dict]:
    """The rows of a run without what depends on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in folder.metrics()]


if __name__ == "__main__":
    # `firstorder` with sandbox engines inside the cluster: what the kill tests start as a process of its own.
    scaled.session.Session = SandboxSession
    with of_parent():
        sys.exit(main(sys.argv[1:]))
