"""A `TrainingEngine` whose ranks run in Ray actors: a group of ranks that also takes gradient steps."""

from __future__ import annotations

from pathlib import Path

from jaxtyping import Float
from torch import Tensor
from torch._C._distributed_c10d import Store

from scaled.cluster.rank_group import ModelRank, ScoringGroup, tokens_only
from scaled.config import ModelBlock, TrainingBlock
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Rollouts, UpdateStats
from theory.objectives import Objective
from theory.routing.passes import RoutingPlan


class TrainingGroup(ScoringGroup):
    """`TrainingEngine` over the ranks that `build` makes, with `save` and `load`.

    A rank has `MegatronRank`'s methods, each for its own part of the batch, the layers or the checkpoint.
    After RankDied the caller starts another group from a checkpoint.
    """

    def score_reference(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        """As theory's contract."""
        with self.meter.seconds("timing_s/ref"):
            return self.assembly.reference(self._call("score_reference", tokens_only(rollouts)))

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        """As theory's contract."""
        with self.meter.seconds("timing_s/update_actor"):
            return self.assembly.stats(self._call("update", minibatch, objective, plan))

    def predictor_weights(self) -> dict[int, Float[Tensor, "D E"]]:
        """As theory's contract, with the layers of all stages."""
        merged: dict[int, Tensor] = {}
        for part in self._call("predictor_weights"):
            # Ranks of a stage hold the same W_p, so that any of them may have the last word.
            merged |= part
        return dict(sorted(merged.items()))

    def save(self, folder: Path) -> None:
        """Writes every rank's part of a checkpoint into a folder that all machines share."""
        self._call("save", folder)

    def begin_save(self, folder: Path) -> None:
        """The same, without waiting for the files."""
        self._call("begin_save", folder)

    def has_saved(self, wait: bool = False) -> bool:
        """Whether every rank has written its part of the last `begin_save`; `wait` blocks until all have."""
        return all(self._call("has_saved", wait))

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint of the same model."""
        self._call("load", folder)


def build_megatron(
    model: ModelBlock,
    training: TrainingBlock,
    algorithm: Algorithm,
    rank: int,
    num_ranks: int,
    store: Store,
) -> ModelRank:
    """A Megatron-core rank that has met the others; its machine must have the model's folder."""
    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.rank import MegatronRank

    parallel.initialize(training, rank, num_ranks, store)
    # A reference is a second copy of the weights: only a KL penalty reads it.
    return MegatronRank(model, training, algorithm, keep_reference=algorithm.objective.kl_coefficient > 0)


__all__ = ["TrainingGroup", "build_megatron"]
