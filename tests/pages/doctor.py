"""The doctor's rate of naming planted faults: engines with defects, historic bugs in code, and damaged traces.

`python -m tests.pages.doctor` writes docs/doctor.md; test_doctor.py plants a part of it again, on another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.causes import CAUSES, UNKNOWN
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.doctor.importers import FORMATS
from lab.doctor.replay_log import FORMAT as REPLAY_LOG
from lab.doctor.steps.causes import STEPS_CAUSES
from lab.markdown import markdown_table
from lab.traces import Trace
from sandbox.config import TrainingBlock
from sandbox.engines import (
    ActivationPrecision,
    BlockPrecision,
    ExpertLayout,
    KVPrecision,
    LogitNoise,
    PartialWeights,
    ReductionOrder,
    RoutedScaling,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from sandbox.measure.defect_table import Bench
from tests.mutants.catalogue_capture import CAPTURE
from tests.mutants.mutant import edited
from tests.pages import damage, layers
from tests.pages.courses import COURSES, NARROW, TALL, is_step_right, told
from tests.pages.doctor_words import HOOKS, INTRO, OVER_STEPS, READS
from theory.routing.passes import RoutingPlan

MUTANTS = {mutant.name: mutant for mutant in CAPTURE}


@dataclass(frozen=True)
class Plant:
    """Something wrong: the cause that has to be named, and how it comes about."""

    cause: str
    defect: Defect | None = None
    products: Literal["fp8_e4m3"] | None = None
    """The format of the trainer's products, beside an engine that does without."""
    mutant: str = ""
    then: tuple[Defect, ...] = ()
    """Further defects of the engine, after the first."""
    damage: Callable[[Trace], Trace] = field(default=lambda trace: trace)
    is_out_of_reach: bool = False
    """Whether one step does not tell it, as the models of the thresholds show: the counts are also given without it."""

    @property
    def defects(self) -> tuple[Defect, ...]:
        """All defects of the engine, in order."""
        return self.then if self.defect is None else (self.defect, *self.then)

    @property
    def is_format(self) -> bool:
        """Whether it is a format of blocks, or of the trainer's products: counted apart."""
        return self.products is not None or isinstance(self.defect, BlockPrecision)


# ---- what is planted -------------------------------------------------------------------------------------------------

PLANTS: dict[str, Plant] = {
    "exact engine": Plant("nothing"),
    "weights bf16": Plant("precision", WeightPrecision(format="bf16")),
    "weights int8": Plant("precision", WeightPrecision(format="int8")),
    "weights fp8": Plant("precision", WeightPrecision()),
    "weights fp8, blocks": Plant("precision", WeightPrecision(scale="block", block_size=32)),
    "activations bf16": Plant("precision", ActivationPrecision(format="bf16")),
    "activations fp8": Plant("precision", ActivationPrecision()),
    "fp8 blocks, ue8m0 scales": Plant("precision", BlockPrecision(format="fp8_ue8m0")),
    "mxfp8": Plant("precision", BlockPrecision()),
    "nvfp4": Plant("precision", BlockPrecision(format="nvfp4"), is_out_of_reach=True),
    "trainer fp8": Plant("precision", products="fp8_e4m3"),
    "both fp8, the engine's from a bf16 export": Plant(
        "precision", WeightPrecision(format="bf16"), "fp8_e4m3", then=(WeightPrecision(), ActivationPrecision())
    ),
    "cache bf16": Plant("precision", KVPrecision(format="bf16")),
    "cache fp8": Plant("precision", KVPrecision()),
    "8 units, partial sums in bf16": Plant("precision", ReductionOrder(units=8, partials="bf16")),
    "logit noise 0.1": Plant("precision", LogitNoise(std=0.1)),
    "router noise 0.03": Plant("routing", RouterNoise(std=0.03)),
    "router noise 0.1": Plant("routing", RouterNoise(std=0.1)),
    "router noise 0.3": Plant("routing", RouterNoise(std=0.3)),
    "1 version behind": Plant("stale", StaleWeights(versions=1)),
    "2 versions behind": Plant("stale", StaleWeights(versions=2)),
    "4 versions behind": Plant("stale", StaleWeights(versions=4)),
    "4 behind, half new, cache recomputed": Plant(
        "switched", StaleWeights(versions=4, switch_at=0.5, cache="recomputed")
    ),
    "4 behind, half new, cache kept": Plant("switched", StaleWeights(versions=4, switch_at=0.5)),
    "nothing arrives": Plant("stale", PartialWeights()),
    "experts never arrive": Plant("stale", PartialWeights(missing="experts")),
    "attention never arrives": Plant("stale", PartialWeights(missing="attention")),
    "routers never arrive": Plant("stale", PartialWeights(missing="routers"), is_out_of_reach=True),
    "experts one place on": Plant("wrong_weights", ExpertLayout()),
    "gate and up swapped": Plant("wrong_weights", ExpertLayout(moved="halves")),
    "routed sum times 0.4": Plant("wrong_weights", RoutedScaling()),
    "routed sum times 0.8": Plant("wrong_weights", RoutedScaling(factor=0.8), is_out_of_reach=True),
    "top-p 0.9, scored": Plant("mask", SamplingMismatch(top_p=0.9, score="processed")),
    "top-k 2, scored": Plant("mask", SamplingMismatch(top_k=2, score="processed")),
    "temperature 0.7, scored": Plant("temperature", SamplingMismatch(temperature=0.7, score="processed")),
    "temperature 1.3, scored": Plant("temperature", SamplingMismatch(temperature=1.3, score="processed")),
    "top-p 0.9": Plant("sampler_mask", SamplingMismatch(top_p=0.9)),
    "min-p 0.1": Plant("sampler_mask", SamplingMismatch(min_p=0.1)),
    "temperature 0.7": Plant("sampler_temperature", SamplingMismatch(temperature=0.7)),
    "log mu a token late": Plant("shifted", damage=damage.shifted_mu),
    "log old a token early, fp8": Plant("shifted", WeightPrecision(), damage=damage.shifted_old),
    "end token's log mu is 0": Plant("last_token", damage=damage.last_is_zero),
    "end token's log mu is 0, bf16": Plant("last_token", WeightPrecision(format="bf16"), damage=damage.last_is_zero),
    "half of log mu is 0, fp8": Plant("zero_padded", WeightPrecision(), damage=damage.zeros_after_a_half),
    "a tenth of log old is 0": Plant("zero_padded", damage=damage.zeros_here_and_there),
    "end tokens cut off": Plant("end_token", damage=damage.without_end),
    "log mu of other responses": Plant("unrelated", damage=damage.unrelated),
} | {
    name: Plant("route_record", mutant=name)
    for name in ("record_is_a_row_late", "decoding_repeats_the_prompts_route", "last_stage_overwrites_the_first")
}  # fmt: skip


class Ward:
    """A trained model of some versions, and the traces of whatever engine was planted."""

    def __init__(self, config: str, overrides: Sequence[str], num_steps: int):
        self.bench = Bench(load(config, overrides, Schemas()), num_steps)

    def trace(self, plant: Plant, draw: int) -> Trace:
        """Samples of the planted engine with the trainer's scores, on the draw's problems."""
        with ExitStack() as stack:
            mutant = MUTANTS[plant.mutant] if plant.mutant else None
            for target in dict.fromkeys(edit.target for edit in mutant.edits) if mutant else ():
                stack.enter_context(edited(target, [edit for edit in mutant.edits if edit.target == target]))
            rollouts = self.bench.sample(self.bench.engine(*plant.defects), draw)
        trainer = self.bench.trainer
        if plant.products is not None:
            trainer = self.bench.build_trainer(trainer.model, TrainingBlock(products=plant.products))
        scores = trainer.score(rollouts, RoutingPlan("natural"))
        rewards = [self.bench.task.reward(response.prompt, response) for response in rollouts.responses]
        return plant.damage(Trace.of(rollouts, scores, torch.tensor(rewards), step=draw))

    def named(self, plant: Plant, draw: int) -> Diagnosis:
        """The doctor's word on it."""
        return diagnose(self.trace(plant, draw))


def confusion(ward: Ward, names: Sequence[str], draws: Sequence[int]) -> dict[str, Counter[str]]:
    """For each plant how often each cause was named first."""
    return {name: Counter(ward.named(PLANTS[name], draw).named[0].name for draw in draws) for name in names}


def num_right(found: Mapping[str, Counter[str]]) -> int:
    """The number of times that the planted cause was named first."""
    return sum(counts[PLANTS[name].cause] for name, counts in found.items())


# ---- the page --------------------------------------------------------------------------------------------------------

SMALL = (
    "--algorithm.batch.num_prompts", "16", "--task.max_digits", "2", "--task.num_held_out", "32",
    "--algorithm.sampling.max_tokens", "24", "--model.hidden_size", "32", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--model.expert_size", "32", "--seed", "3",
)  # fmt: skip
"""A model of width 32 on sums of two figures, other problems and another seed than those the thresholds are from."""
DEEP = (
    "--algorithm.batch.num_prompts", "16", "--seed", "5", "--model.num_layers", "3", "--model.num_experts", "16",
    "--model.hidden_size", "48", "--model.num_heads", "3", "--model.num_kv_heads", "3",
)  # fmt: skip
"""Three layers of 16 experts, another seed."""
NEWEST = (PartialWeights, ExpertLayout, RoutedScaling)
COURSE_SEEDS = ("12",)
"""Of the runs over steps: no rule was made on it."""
FIRST_DRAW = 20
NUM_DRAWS = 3


def formats() -> str:
    """The formats that can be read, as a table, and how to add the fields that a dump lacks."""
    rows = [
        (
            about.name,
            f"`{about.files}`" if " " not in about.files else about.files,
            about.has,
            about.lacks,
            about.source,
        )
        for about in (*FORMATS, REPLAY_LOG)
    ]
    return READS + markdown_table(("whose", "files", "has", "lacks", "as in"), rows) + HOOKS


def page(wards: Mapping[str, Callable[[], Ward]], num_draws: int) -> str:
    """docs/doctor.md."""
    draws = range(FIRST_DRAW, FIRST_DRAW + num_draws)
    parts = [section(title, confusion(make(), list(PLANTS), draws)) for title, make in wards.items()]
    runs = over_steps(run_courses(COURSE_SEEDS))
    return "\n".join([INTRO.format(draws=num_draws), *parts, runs, layers.whole(), formats()])


def section(title: str, found: Mapping[str, Counter[str]]) -> str:
    """The counts and tables of one model."""
    main = {name: counts for name, counts in found.items() if not PLANTS[name].is_format}
    formats = {name: counts for name, counts in found.items() if PLANTS[name].is_format}
    told = {name: counts for name, counts in main.items() if not PLANTS[name].is_out_of_reach}
    older = {name: counts for name, counts in main.items() if not isinstance(PLANTS[name].defect, NEWEST)}
    in_reach = {name: counts for name, counts in found.items() if not PLANTS[name].is_out_of_reach}
    unknown = sum(counts[UNKNOWN.name] for counts in found.values())
    return (
        f"### {title}\n\n{_counted(main)} right.\n\n{_counted(told)} without the two that one step does not tell; "
        f"{_counted(older)} without the eight newest plants. Of the four plants of formats {_counted(formats)}, "
        f"which makes {_counted(found)} in all. *Unknown* was named {unknown} times.\n\n"
        f"{matrix(in_reach)}\n{details(found)}"
    )


def _counted(found: Mapping[str, Counter[str]]) -> str:
    """The number right, out of how many."""
    return f"{num_right(found)} of {sum(counts.total() for counts in found.values())}"


def run_courses(seeds: Sequence[str]) -> dict[str, list[tuple[str, bool]]]:
    """For each course, by model and seed: the cause that was named, and whether it and its step are right."""
    out: dict[str, list[tuple[str, bool]]] = {}
    for name, plant in COURSES.items():
        found = [told(plant, [*model, "--seed", seed]) for model in (NARROW, TALL) for seed in seeds]
        out[name] = [
            (course.named.name, course.named.name == plant.cause and is_step_right(plant, course)) for course in found
        ]
    return out


def over_steps(found: Mapping[str, Sequence[tuple[str, bool]]]) -> str:
    """The diagnoses of runs with planted faults, and how often they are right."""
    rows, num, num_causes, num_steps = [], 0, 0, 0
    for name, results in found.items():
        plant = COURSES[name]
        num, num_steps = num + len(results), num_steps + sum(is_right for _, is_right in results)
        num_causes += sum(cause == plant.cause for cause, _ in results)
        said = ", ".join(f"{cause} {n}" for cause, n in Counter(cause for cause, _ in results).most_common())
        steps = "–" if plant.since is None else f"{sum(is_right for _, is_right in results)} of {len(results)}"
        rows.append((name, plant.cause, said, steps))
    spanning = {cause.name for cause in STEPS_CAUSES}
    others = [cause for name, results in found.items() if COURSES[name].cause not in spanning for cause, _ in results]
    counts = (
        f"The cause is right in {num_causes} of {num} runs, the cause and its step in {num_steps}. Of {len(others)} "
        f"runs without a fault that spans steps {sum(cause in spanning for cause in others)} were said to have one. "
        "What is left is mostly weights that never arrive and hardly move the policy."
    )
    return f"{OVER_STEPS}\n{counts}\n\n{markdown_table(('planted', 'cause', 'named', 'at the right step'), rows)}"


def matrix(found: Mapping[str, Counter[str]]) -> str:
    """Planted causes down, named ones across: how many of each."""
    planted: dict[str, Counter[str]] = {}
    for name, counts in found.items():
        planted.setdefault(PLANTS[name].cause, Counter()).update(counts)
    order = [cause.name for cause in CAUSES if any(counts[cause.name] for counts in planted.values())]
    heads = [f"{i + 1}" for i in range(len(order))]
    rows = [
        (f"{order.index(cause) + 1 if cause in order else '–'} {cause}", *(counts[name] or "" for name in order))
        for cause, counts in sorted(planted.items(), key=lambda item: order.index(item[0]) if item[0] in order else 99)
    ]
    return markdown_table(("planted \\ named", *heads), rows)


def details(found: Mapping[str, Counter[str]]) -> str:
    """Planted against named causes, in one table."""
    rows = [
        (name, PLANTS[name].cause, ", ".join(f"{cause} {n}" for cause, n in counts.most_common()))
        for name, counts in found.items()
    ]
    return markdown_table(("planted", "cause", "named"), rows)


WARDS: Mapping[str, Callable[[], Ward]] = {
    "Two layers of 8 experts, width 32": lambda: Ward("configs/arithmetic.yaml", SMALL, 4),
    "Three layers of 16 experts, width 48": lambda: Ward("configs/arithmetic.yaml", DEEP, 6),
}

if __name__ == "__main__":
    print(page(WARDS, NUM_DRAWS), end="")
