"""Responses of several turns on the cluster: engines, ranks and record see what one process would."""

from __future__ import annotations

from pathlib import Path

import pytest

import scaled.run
import scaled.session
from lab.tasks import build as build_task
from lab.tasks.calculator import ALPHABET
from lab.traces import Trace
from sandbox.engines.engine import SandboxEngine
from sandbox.model.checkpoint import load as load_model
from sandbox.training.engine import SandboxTrainingEngine
from tests.contracts import worlds
from tests.scaled.cluster_run_world import config, save_model
from tests.scaled.ray_marks import RAY
from theory.loop import global_step, hand_over

pytestmark = RAY

CONFIG = """
name: turns
seed: 3
backend: scaled
num_steps: 2
task: {kind: calculator, num_held_out: 8}
model: {path: MODEL}
algorithm:
  objective: {preset: minirl}
  replay: {mode: R3}
  batch: {num_prompts: 4, num_responses: 4, num_minibatches: 2}
  sampling: {max_tokens: 48, max_turns: 3}
  optimizer: {learning_rate: 1e-3, warmup_steps: 3}
training: {num_ranks: 2, micro_batch_size: 2}
rollout: {num_engines: 2, timeout_s: 300.0}
evaluation: {every: 2, num_samples: 1, max_prompts: 4}
traces: {every: 1}
cluster: {object_store_gib: 0.2}
logging: {loggers: []}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, ALPHABET)
    return folder


def test_a_run_of_turns_is_that_of_one_process(model: Path, in_session: None, tmp_path: Path) -> None:
    """Two engines and two ranks that hand each other the memory, which takes part of each step's time, report to the
    bit the metrics of the same steps in this process."""
    words = "--cluster.placement", "colocated", "--training.offload", "[gradients]"
    cut = config(model, tmp_path, *words, text=CONFIG)
    folder = scaled.run.run(cut, progress="none")
    assert all(0 < row["timing_s/turn"] < row["timing_s/step"] for row in folder.metrics()[1:])
    algorithm, task, weights = cut.algorithm.build(), build_task(cut.task), load_model(model)
    rollout = SandboxEngine(weights.config, worlds.DEFECTS["weights-bf16"], stop_tokens=(worlds.STOP,))
    trainer = SandboxTrainingEngine(weights, algorithm.optimizer)
    hand_over(algorithm, rollout, trainer, version=0)
    for step, row in enumerate(folder.metrics()[1:]):
        here = global_step(step, algorithm, rollout, trainer, task, seed=cut.seed).metrics
        assert len(here) > 30 and {name: row[name] for name in here} == here
    for trace in map(Trace.load, folder.traces()):
        assert not trace.is_response.all(), "expected the calculator to have answered"
        assert (trace.logp_mu[~trace.is_response] == 0).all()


def test_turns_and_task_go_together(model: Path, tmp_path: Path) -> None:
    """A task with turns in one turn is refused by name, as in the sandbox."""
    with pytest.raises(ValueError, match=r"max_turns: expected at least 2 for task calculator, got 1"):
        config(model, tmp_path, "--algorithm.sampling.max_turns", "1", text=CONFIG)
