"""Rows of branches: all arms continue from the same states, so that they are paired by state, not only by seed.

A cell's seed determines its state: the run of the arm's `start` with that seed, after NUM_UPDATES[seed mod 5] updates,
Adam's moments included. Fresh moments would make the first updates full-rate steps in every parameter, a kick that no
run has; the moments of the state's run are the same for all arms. From the state the arm takes the global steps of its
config. Problems and sampling streams depend on the seed and, for arms of another N, on the step.
Besides pi's accuracy before and after, a row compares the arm's gradient at the state, and that of its first step's
last mini-batch, with the exact policy gradient at the same weights (`gradients.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.config.load import config_hash
from lab.files import atomic_folder
from lab.recording import NonFiniteError
from lab.tasks import TextTask
from lab.verdict import VerdictRules, judge
from sandbox.config import SandboxRun
from sandbox.ledger.cells import ACCURACY, Cell, row_of
from sandbox.ledger.gradients import PIECE, ReferenceGradient, alignment, gradients, reference
from sandbox.measure.defect_table import Bench
from sandbox.model import MoE
from sandbox.run import build_engine, build_learner, file_hashes, initial_model, open_task
from sandbox.training.callbacks import Evaluation
from sandbox.training.learner import Learner
from theory.collection import collect
from theory.contracts import TrainingEngine
from theory.loop import global_step, hand_over
from theory.old_pass import old_pass
from theory.step_metrics import old_pass_metrics
from theory.streams import derive_seed

NUM_UPDATES = (0, 40, 80, 160, 240)
"""Updates before a state, indexed by the seed modulo 5."""

PROCEDURE = 1
"""Part of a state's key: raise it when the procedure that makes states changes."""

NON_FINITE = VerdictRules(min_steps=20_000, early_steps=1, patience=10_000)
"""Rules that only a non-finite number triggers: a branch is too short for rules on lasting changes."""


@dataclass(frozen=True)
class SampleSizes:
    """Sample sizes: `rounds` x `num_minibatches` mini-batches for an arm's gradient at the state, one round for that of
    its last mini-batch; the other fields are numbers of responses.

    Under the token weight the noise of a mean over 32 mini-batches is 1.2 to 2.2 times as large as the mean (border,
    seeds 0 to 4); over 128, 0.6 to 1.1 times.
    """

    num_minibatches: int = 32
    rounds: int = 4
    reference: int = 50 * 1024
    late_reference: int = 12 * 1024
    kl: int = 1024


FULL = SampleSizes()


@dataclass(frozen=True)
class State:
    """The state from which all arms of a seed start: weights and moments, grad J there, and pi's held-out accuracy."""

    tensors: dict[str, Tensor]
    reference: ReferenceGradient
    accuracy: float
    num_updates: int


def state_of(start: SandboxRun, folder: Path, budget: SampleSizes = FULL) -> State:
    """The state of a run with this config, read from `folder`; the first process that needs it creates it.

    Its subfolder is named by a hash of its inputs; a killed process leaves none. ValueError if N does not divide the
    state's updates.
    """
    updates, n = NUM_UPDATES[start.seed % len(NUM_UPDATES)], start.algorithm.batch.num_minibatches
    if updates % n:
        raise ValueError(f"algorithm.batch.num_minibatches: expected N that divides {updates} updates, got {n}")
    parts = [PROCEDURE, torch.__version__, config_hash(start), file_hashes(start), updates, budget.reference, PIECE]
    place = folder / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():  # asked under the lock: whoever waited for it finds the state made
            with atomic_folder(place) as scratch:
                _make(start, updates // n, scratch, budget)
    about = json.loads((place / "state.json").read_text(encoding="utf-8"))
    halves_2Q = load_file(place / "reference.safetensors")["halves"]
    return State(load_file(place / "state.safetensors"), ReferenceGradient(halves_2Q), about["accuracy"], updates)


def _make(start: SandboxRun, num_steps: int, folder: Path, budget: SampleSizes) -> None:
    """Runs `start` for that many global steps with an exact engine, and writes the state's files."""
    worked = time.process_time()
    bench = Bench(start, num_steps)
    task, model = bench.task, bench.trainer.model
    save_file(bench.trainer.state_tensors(), folder / "state.safetensors")
    about = {"accuracy": _accuracy(start, task, model), "run_cpu_seconds": time.process_time() - worked}
    found = reference(start, task, model, _first_step(start, "reference"), budget.reference)
    save_file({"halves": found.halves_2Q}, folder / "reference.safetensors")
    about |= {"reference_error": found.error, "cpu_seconds": time.process_time() - worked}
    (folder / "state.json").write_text(json.dumps(about), encoding="utf-8")


def branch_row(cell: Cell, root: str, compiled: bool, budget: SampleSizes = FULL) -> dict[str, Any]:
    """The row of the cell: its metrics over the branch, and these probes.

    accuracy_before, accuracy_after: pi's held-out accuracy, sampled by an exact engine with the same draws; cosine,
    bias, variance and the rest of `gradients.alignment`, at the state; late_cosine and the rest: of mini-batch N of a
    step, at the weights after training on its first N - 1 (N > 1); reference_error and late_reference_error; kl_before,
    kl_after: k3 KL(mu || old) in nats per token.
    """
    assert cell.start is not None, "a branch has a start"
    begun = time.monotonic()
    update = {"compile": True} if compiled else {}
    config, start = cell.config.model_copy(update=update), cell.start.model_copy(update=update)
    config.kernels().set_threads(config.threads or 1)
    task = open_task(config)
    state = state_of(start, Path(root) / "states", budget)
    # After the state, which the first arm makes for all: `cpu_seconds` are the arm's own.
    worked = time.process_time()
    probes = {"accuracy_before": state.accuracy, "reference_error": state.reference.error}
    probes["num_updates_before"] = float(state.num_updates)
    probes |= _at_the_state(config, start, task, state, budget)
    learner = _learner_at(config, task, state)
    metrics = [{"step": 0, ACCURACY: state.accuracy}, *_continued(learner, config)]
    probes["accuracy_after"] = _accuracy(start, task, learner.model)
    metrics[-1][ACCURACY] = probes["accuracy_after"]
    probes["kl_after"] = _kl(learner, config, budget)
    cpu_seconds = time.process_time() - worked
    times = {"seconds": round(time.monotonic() - begun, 1), "cpu_seconds": round(cpu_seconds, 2)}
    # Step 0 is the state's evaluation, not a step of the branch.
    verdict = judge(metrics[1:], NON_FINITE).to_json()
    return row_of(cell, metrics, verdict, probes) | times | {"compiled": compiled}


def _at_the_state(
    config: SandboxRun, start: SandboxRun, task: TextTask, state: State, budget: SampleSizes
) -> dict[str, float]:
    """Measurements of the arm's gradient at the state, and of its step's last mini-batch."""
    num, step = budget.num_minibatches, _first_step(config, "gradient")
    learner = _learner_at(config, task, state)
    rounds = [gradients(learner, step + i, num) for i in range(budget.rounds)]
    probes = alignment(torch.cat([one.of_KQ for one in rounds]), state.reference)
    probes["kl_before"] = fmean(one.metrics["rollout_corr/k3_kl"] for one in rounds)
    after = config.algorithm.batch.num_minibatches - 1
    if after:
        # Built again: the rounds above have trained the arm's predictor, if it has one.
        learner = _learner_at(config, task, state)
        late = gradients(learner, step, num, after)
        truth = reference(start, task, learner.model, _first_step(config, "late reference"), budget.late_reference)
        about = alignment(late.of_KQ, truth) | {"reference_error": truth.error}
        probes |= {f"late_{name}": value for name, value in about.items()}
    return probes


def _learner_at(config: SandboxRun, task: TextTask, state: State) -> Learner:
    """The arm's engines with the state's weights and moments; a predictor, if any, is fresh."""
    learner = build_learner(config, task, initial_model(config, task, "none"))
    training = learner.training_engine
    # The state has no predictor: the arm's own fills the missing tensors.
    training.load_state_tensors(training.state_tensors() | state.tensors)
    hand_over(learner.algorithm, learner.rollout, training, version=0)
    return learner


def _continued(learner: Learner, config: SandboxRun) -> list[dict[str, Any]]:
    """The metrics of the arm's global steps, counted from 1; a non-finite gradient ends them, with norm inf."""
    first, metrics, backlog = _first_step(config, "training"), [], None
    parts = (learner.rollout, learner.training_engine, learner.task, learner.seed)
    for number in range(config.num_steps):
        try:
            result = global_step(first + number, learner.algorithm, *parts, backlog)
        except NonFiniteError:
            return [*metrics, {"step": number + 1, "actor/grad_norm": math.inf}]
        backlog = result.backlog
        metrics.append({"step": number + 1, **result.metrics})
    return metrics


def _accuracy(start: SandboxRun, task: TextTask, model: MoE) -> float:
    """avg@k of the model on the held-out problems by an exact engine; the draws depend only on the seed."""
    exact = build_engine(start, model.config, task, ())
    found = Evaluation(start, exact).of(model, task, _first_step(start, "evaluation"))
    return float(found[ACCURACY])


def _kl(learner: Learner, config: SandboxRun, budget: SampleSizes) -> float:
    """k3 KL(mu || old) in nats per token at the present weights, from fresh responses of the arm's engine."""
    algorithm, step = learner.algorithm, _first_step(config, "kl")
    num = budget.kl // algorithm.num_responses
    algorithm = replace(algorithm, num_prompts=num, num_minibatches=1)
    training: TrainingEngine = learner.training_engine
    hand_over(algorithm, learner.rollout, training, version=step)
    collected = collect(step, algorithm, learner.rollout, learner.task, learner.seed)
    old = old_pass(step, algorithm, training, collected, learner.seed)
    return old_pass_metrics(collected.rollouts, old.scores, algorithm.passes)["rollout_corr/k3_kl"]


def _first_step(config: SandboxRun, purpose: str) -> int:
    """The number of the first global step for a purpose, below 2^40, so that every purpose has its own draws."""
    return derive_seed(config.seed, "branch", purpose) >> 23


__all__ = ["FULL", "NUM_UPDATES", "SampleSizes", "State", "branch_row", "state_of"]
