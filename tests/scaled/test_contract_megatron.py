"""The contract suite of training engines (tests/contracts) over a real Megatron-core rank: the same laws.

Left out are laws of the sandbox alone: bits that do not depend on micro-batches, and its own checkpoint format (a
rank's is in `test_megatron_rank_checkpoints`). The laws run in a rank's own process, as all of Megatron's does here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sandbox.model import MoE
from sandbox.model.checkpoint import save
from tests.contracts import test_training_engine as suite
from tests.contracts import worlds
from tests.scaled.megatron_world import free_ports, joined, spawn
from tests.scaled.rank_world import OneRank, algorithm, obey, training
from theory.contracts import Rollouts
from theory.routing.predictor import PredictorSettings

Law = Callable[[MoE, Rollouts], None]
LAWS: dict[str, Law] = {
    "pi is old, natural": partial(suite.test_pi_is_old_before_the_first_update, source="natural"),
    "pi is old, replayed": partial(suite.test_pi_is_old_before_the_first_update, source="replay"),
    "old's own route": suite.test_recorded_old_route_replays_to_the_same_bits,
    "mu's route": suite.test_replay_uses_the_record_and_keeps_what_it_would_have_chosen,
    "zero predictor": suite.test_zero_predictor_is_natural_routing,
    "ascent": suite.test_update_climbs_the_objective,
    **{
        f"micro-batches, {name}": partial(suite.test_updates_do_not_depend_on_micro_batches, name=name)
        for name in ("minirl", "grpo", "grpo_dapo", "gspo")
    },
}


def megatron_engine(
    weights: MoE,
    predictor: PredictorSettings | None = None,
    learning_rate: float = 1e-2,
    micro_batch_size: int = 4,
) -> OneRank:
    """`worlds.training_engine` of this world."""
    folder = Path(tempfile.mkdtemp(prefix="contract-"))
    save(weights, folder)
    settings = {"optimizer": {"learning_rate": learning_rate, "weight_decay": 0.0, "eps": 1e-8}}
    if predictor is not None:
        settings["predictor"] = predictor
    recipe = algorithm("none" if predictor is None else "Pr2", **settings)
    return OneRank(folder, recipe, micro_batch_size=micro_batch_size)


def judge(rank: int, port: int) -> dict[str, str | None]:
    """In a rank's process: each law's name, and how it was broken, or None."""
    worlds.training_engine = megatron_engine
    weights = worlds.model()
    rollouts = worlds.rollout_engine("fp8-and-noise", weights).generate(worlds.prompts(), suite.SAMPLING)

    def named(name: str, law: Law) -> Any:
        def bound(_: Path) -> None:
            law(weights=weights, rollouts=rollouts)

        bound.__name__ = name
        return bound

    with joined(training(), rank, port):
        return obey([named(name, law) for name, law in LAWS.items()], Path())


@pytest.fixture(scope="module")
def verdicts() -> dict[str, str | None]:
    (port,) = free_ports(1)
    return spawn(1, judge, port)[0]


@pytest.mark.parametrize("law", LAWS)
def test_contract(verdicts, law):
    """Each law (its own docstring, in tests/contracts) holds in a real world of one rank."""
    assert verdicts[law] is None, verdicts[law]
