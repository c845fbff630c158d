"""A trained model whose engine gets planted faults, and the doctor's diagnosis of each trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.traces import Trace
from sandbox.config import TrainingBlock
from sandbox.measure.defect_table import Bench
from tests.mutants.mutant import edited
from tests.pages.doctor_plants import MUTANTS, PLANTS, Plant
from tests.pages.doctor_tables import Found
from theory.routing.passes import RoutingPlan


class Ward:
    """A trained model with several versions, and traces of its engine under any plant."""

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
        """The doctor's diagnosis of that trace."""
        return diagnose(self.trace(plant, draw))


DUMPS: Mapping[str, Callable[[Trace], Trace]] = {
    "experts of both sides, entropies": lambda trace: trace,
    "no experts of old (verl)": lambda trace: replace(trace, experts_old=None),
    "no experts of old, no entropies (the others)": lambda trace: replace(trace, experts_old=None, entropy_old=None),
}
"""A trace as dumps show it: ours, and those of the frameworks."""


def findings_by_dump(ward: Ward, names: Sequence[str], draws: Sequence[int]) -> dict[str, dict[str, list[Found]]]:
    """By kind of dump, the diagnoses of each plant on these draws: the same traces, with the fields that it has."""
    out: dict[str, dict[str, list[Found]]] = {kind: {name: [] for name in names} for kind in DUMPS}
    for name in names:
        for draw in draws:
            trace = ward.trace(PLANTS[name], draw)
            for kind, shown in DUMPS.items():
                out[kind][name].append(Found.of(PLANTS[name].cause, diagnose(shown(trace))))
    return out


def findings(ward: Ward, names: Sequence[str], draws: Sequence[int]) -> dict[str, list[Found]]:
    """The diagnoses of each plant on these draws."""
    return {name: [Found.of(PLANTS[name].cause, ward.named(PLANTS[name], draw)) for draw in draws] for name in names}
