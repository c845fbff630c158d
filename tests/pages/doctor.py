"""The doctor's rate of naming planted faults: engines with defects, historic bugs in code, and damaged traces.

`python -m tests.pages.doctor` writes docs/doctor.md; test_doctor.py plants a part of it again, on another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.doctor.importers import FORMATS
from lab.doctor.replay_log import FORMAT as REPLAY_LOG
from lab.doctor.steps.causes import STEPS_CAUSES
from lab.markdown import markdown_table
from lab.traces import Trace
from sandbox.config import TrainingBlock
from sandbox.measure.defect_table import Bench
from tests.mutants.mutant import edited
from tests.pages import layers
from tests.pages.courses import COURSES, NARROW, TALL, is_step_right, told
from tests.pages.doctor_plants import MUTANTS, PLANTS, Plant
from tests.pages.doctor_tables import Found, counted, every, reliability, section
from tests.pages.doctor_words import HOOKS, INTRO, OVER_STEPS, READS, STRENGTHS
from theory.routing.passes import RoutingPlan


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


def findings(ward: Ward, names: Sequence[str], draws: Sequence[int]) -> dict[str, list[Found]]:
    """The diagnoses of each plant on these draws."""
    return {name: [Found.of(PLANTS[name].cause, ward.named(PLANTS[name], draw)) for draw in draws] for name in names}


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
FRESH = ("--algorithm.batch.num_prompts", "16", "--model.hidden_size", "56", "--seed", "9")
FRESH_DEEP = (
    "--algorithm.batch.num_prompts", "16", "--model.hidden_size", "72", "--model.num_layers", "3",
    "--model.num_experts", "12", "--seed", "10",
)  # fmt: skip
"""Two models that nothing was run on before the rule for *undecided* was written down."""
COURSE_SEEDS = ("12",)
"""Of the runs over steps: no rule was made on it."""
FIRST_DRAW, FRESH_DRAW = 20, 80
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


def page(wards: Mapping[str, tuple[Callable[[], Ward], int]], num_draws: int) -> str:
    """docs/doctor.md."""
    parts, whole = [], []
    for title, (make, first) in wards.items():
        found = findings(make(), list(PLANTS), range(first, first + num_draws))
        parts.append(section(title, found))
        whole += every(found)
    runs = over_steps(run_courses(COURSE_SEEDS))
    told = [counted(whole), *parts, f"{STRENGTHS}\n{reliability(whole)}", runs, layers.whole(), formats()]
    return "\n".join([INTRO.format(draws=num_draws), *told])


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


WARDS: Mapping[str, tuple[Callable[[], Ward], int]] = {
    "Two layers of 8 experts, width 32": (lambda: Ward("configs/arithmetic.yaml", SMALL, 4), FIRST_DRAW),
    "Three layers of 16 experts, width 48": (lambda: Ward("configs/arithmetic.yaml", DEEP, 6), FIRST_DRAW),
    "Two layers of 8 experts, width 56": (lambda: Ward("configs/arithmetic.yaml", FRESH, 6), FRESH_DRAW),
    "Three layers of 12 experts, width 72": (lambda: Ward("configs/arithmetic.yaml", FRESH_DEEP, 6), FRESH_DRAW),
}
"""The models of the page, and the first draw on each."""

if __name__ == "__main__":
    print(page(WARDS, NUM_DRAWS), end="")
