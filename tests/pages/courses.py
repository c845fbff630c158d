"""Runs of several steps with a fault planted from a step on, and the doctor's diagnosis of each run.

The model is small and its task has 45 problems, so that prompts recur and steps share draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.steps.course import Course, Watch
from lab.traces import Trace
from sandbox.engines import (
    ActivationPrecision,
    BlockPrecision,
    ExpertLayout,
    PartialWeights,
    RoutedScaling,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.run import build_engine, build_learner, initial_model, open_task
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling
from theory.loop import global_step
from theory.streams import stream

CONFIG = "configs/arithmetic.yaml"
FEW_PROBLEMS = (
    "--task.min_digits", "1", "--task.max_digits", "1", "--task.num_held_out", "1", "--evaluation.max_prompts", "1",
    "--evaluation.num_samples", "1", "--algorithm.batch.num_prompts", "12", "--algorithm.sampling.max_tokens", "14",
    "--algorithm.optimizer.warmup_steps", "0",
)  # fmt: skip
NARROW = (
    *FEW_PROBLEMS, "--model.hidden_size", "32", "--model.num_heads", "2", "--model.num_kv_heads", "2",
    "--model.expert_size", "32",
)  # fmt: skip
"""Two layers of 8 experts, width 32: the model on which the rules over steps were made, with seeds 0 and 1."""
TALL = (
    *FEW_PROBLEMS, "--model.hidden_size", "48", "--model.num_heads", "3", "--model.num_kv_heads", "3",
    "--model.num_layers", "3", "--model.num_experts", "16",
)  # fmt: skip
"""Three layers of 16 experts, width 48."""
NUM_STEPS = 14
NUM_ENGINES = 3
USUAL = (ActivationPrecision(format="bf16"),)
"""The setting of the engines beside the faulty one."""


class Fleet:
    """Several engines as one: each generates for its part of the prompts, in order."""

    def __init__(self, engines: Sequence[SandboxEngine]):
        self.engines = engines

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Loads the weights into every engine."""
        # A list, since the stream of tensors can be read only once.
        tensors = list(named_tensors)
        for engine in self.engines:
            engine.load_weights(tensors, version)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """The responses of all engines, in the order of the prompts."""
        size = -(-len(prompts) // len(self.engines))
        parts = [prompts[i * size : (i + 1) * size] for i in range(len(self.engines))]
        return Rollouts.concat([e.generate(part, sampling) for e, part in zip(self.engines, parts, strict=True)])


def slot_is_off(trace: Trace) -> Trace:
    """The trace with noise on the log mu of each batch's sixth response, as if scored after another prefix."""
    lengths_B = trace.offsets.diff() - trace.num_prompt
    start, stop = int(lengths_B[:5].sum()), int(lengths_B[:6].sum())
    logp_mu = trace.logp_mu.clone()
    noise = torch.randn(stop - start, generator=stream(trace.step, "courses", "slot"))
    logp_mu[start:stop] = (logp_mu[start:stop] + noise).clamp(max=0.0)
    return replace(trace, logp_mu=logp_mu)


@dataclass(frozen=True)
class CoursePlant:
    """A fault: the cause to name, and the first step (from 1) of its engine."""

    cause: str
    defects: tuple[Defect, ...] = ()
    begins: int = 1
    """The first step that the faulty engine samples; the last weights that arrive are those of this step."""
    in_fleet: bool = False
    overrides: tuple[str, ...] = ()
    """Config overrides by which the trainer departs from its engine."""
    damage: Callable[[Trace], Trace] = lambda trace: trace

    @property
    def since(self) -> int | None:
        """The first step of the fault, or of the weights that stay; None if it is there from the start."""
        return self.begins if self.begins > 1 or self.cause == "stopped" else None


COURSES: dict[str, CoursePlant] = {
    "exact engine": CoursePlant("nothing"),
    "activations bf16": CoursePlant("precision", (ActivationPrecision(format="bf16"),)),
    "weights and activations fp8": CoursePlant("precision", (WeightPrecision(), ActivationPrecision())),
    "fp8 from step 7": CoursePlant("precision", (WeightPrecision(), ActivationPrecision()), begins=7),
    "mxfp8 from step 7": CoursePlant("precision", (BlockPrecision(),), begins=7),
    "trainer fp8": CoursePlant("precision", overrides=("--training.products", "fp8_e4m3")),
    "both fp8, the engine's from a bf16 export": CoursePlant(
        "precision",
        (WeightPrecision(format="bf16"), WeightPrecision(), ActivationPrecision()),
        overrides=("--training.products", "fp8_e4m3"),
    ),
    "nothing arrives": CoursePlant("stopped", (PartialWeights(),)),
    "nothing arrives from step 6": CoursePlant("stopped", (PartialWeights(),), begins=6),
    "nothing arrives from step 6, fp8": CoursePlant("stopped", (WeightPrecision(), PartialWeights()), begins=6),
    "experts never arrive": CoursePlant("partly", (PartialWeights(missing="experts"),)),
    "attention arrives no more after step 5": CoursePlant("partly", (PartialWeights(missing="attention"),), begins=5),
    "routers never arrive": CoursePlant("partly", (PartialWeights(missing="routers"),)),
    "1 step behind": CoursePlant("behind", (StaleWeights(versions=1),)),
    "3 steps behind": CoursePlant("behind", (StaleWeights(versions=3),)),
    "experts one place on from step 7": CoursePlant("wrong_weights", (ExpertLayout(),), begins=7),
    "routed sum times 0.4": CoursePlant("wrong_weights", (RoutedScaling(),)),
    "temperature 0.7, scored, from step 8": CoursePlant(
        "temperature", (SamplingMismatch(temperature=0.7, score="processed"),), begins=8
    ),
    "one engine of three in fp8, the others in bf16": CoursePlant("one_engine", (WeightPrecision(),), in_fleet=True),
    "one place of the batch, the others in bf16": CoursePlant("one_slot", USUAL, damage=slot_is_off),
}


def run(plant: CoursePlant, overrides: Sequence[str], num_steps: int = NUM_STEPS) -> Iterator[Trace]:
    """The traces of a run whose engine is exact before the plant's step, and has its defects from then on."""
    config = load(CONFIG, [*overrides, *plant.overrides], Schemas()).settled()
    torch.set_num_threads(1)
    task = open_task(config)
    learner = build_learner(config, task, initial_model(config, task, "none"))
    trainer, good = learner.training_engine, learner.rollout
    faulty = build_engine(config, trainer.model.config, task, plant.defects)
    others = [build_engine(config, trainer.model.config, task, USUAL) for _ in range(NUM_ENGINES - 1)]
    bad = Fleet([others[0], faulty, others[1]]) if plant.in_fleet else faulty
    good.load_weights(trainer.named_tensors(), 0)
    for step in range(num_steps):
        if step + 1 == plant.begins:
            bad.load_weights(trainer.named_tensors(), step)
        engine = bad if step + 1 >= plant.begins else good
        result = global_step(step, learner.algorithm, engine, trainer, task, config.seed)
        trace = Trace.of(result.rollouts, result.scores, result.rewards_B, step + 1)
        if plant.in_fleet:
            trace = replace(trace, engines=torch.arange(len(trace)) * NUM_ENGINES // len(trace))
        yield plant.damage(trace)


def told(plant: CoursePlant, overrides: Sequence[str], num_steps: int = NUM_STEPS) -> Course:
    """The doctor's diagnosis of such a run."""
    watch = Watch()
    for trace in run(plant, overrides, num_steps):
        watch.add(trace)
    return watch.course()


def step_named(course: Course) -> int | None:
    """The step in the verdict: that of the last weights that arrived, else that of the KL's change."""
    if course.named.name == "stopped":
        return int(course.seen["stopped_since"])
    return course.since()


def is_step_right(plant: CoursePlant, course: Course) -> bool:
    """Whether the fault's step is named; a partial push shows one step after the last whole weights."""
    if plant.since is None:
        return True
    return step_named(course) == plant.since + (plant.cause == "partly")
