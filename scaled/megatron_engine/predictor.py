"""The predictors of one pipeline stage: every rank of the stage holds the same W_p and takes the same steps.

Each rank has the feature rows of its own responses and positions; gradients are averaged over the stage's ranks by
their numbers of rows, which is the gradient over all rows. Paper: Pr2 (arXiv 2606.00395) Eq. 8, App. D and E.

Extra letter: F feature rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from scaled.megatron_engine.parts import BatchSizes, PredictorPart, RoutePart, local_features
from theory.routing.features import RouterFeatures
from theory.routing.predictor import PredictorSettings, PredictorTrainer


class StagePredictor:
    """W_p of this rank's MoE layers, zero at the start, and their AdamW."""

    def __init__(
        self,
        layers: Sequence[int],
        width: int,
        num_experts: int,
        settings: PredictorSettings,
        stage: int,
        device: torch.device,
    ) -> None:
        self.trainer = PredictorTrainer(layers, width, num_experts, settings, device=device)
        self._stage, self._device = stage, device

    def step(
        self, features: RouterFeatures, sizes: BatchSizes, routes: Sequence[RoutePart], rate: float
    ) -> PredictorPart:
        """One step on the mini-batch's cached `features` against pi's logits in this rank's `routes`; a collective.

        Raises ValueError where the cached rows are not those that the pass kept, and where there are none at all.
        """
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        pi = local_features(sizes, routes)
        num_rows = 0 if pi is None else len(pi.rows)
        if pi is None or num_rows == 0:
            cached, logits_FLE = self._nothing(features)
        else:
            # An error here leaves others in the all-reduce: `ScoringGroup._gather` does not wait for them.
            cached, logits_FLE = _on_rows(features, pi, max(sizes.num_rows_B)), pi.logits
        total = torch.tensor(num_rows, device=self._device)
        dist.all_reduce(total, group=group)
        if int(total) == 0:  # of all ranks, so that they raise together and none waits for another
            raise ValueError("expected at least 1 feature row in the mini-batch, got 0")
        share = num_rows / int(total)

        def average(gradients: Sequence[Tensor]) -> None:
            # A rank's gradient is a mean over its rows: weighted by its share, the sum is the mean over all rows.
            for gradient in gradients:
                gradient.mul_(share)
                dist.all_reduce(gradient, group=group)

        # The rows stay where they are: a step takes a block of them at a time to the device.
        metrics = self.trainer.step(_fetched(cached), logits_FLE, rate, average)
        loss, norm = metrics["predictor/loss"], metrics["predictor/weight_norm"]
        return PredictorPart(self._stage, num_rows, torch.tensor(loss), torch.tensor(norm).double().square())

    def _nothing(self, features: RouterFeatures) -> tuple[RouterFeatures, Tensor]:
        """A row of weight 0, for a rank that has none: it must join the average all the same."""
        numbers = tuple(self.trainer.parameters)
        D, E = next(iter(self.trainer.parameters.values())).shape
        hidden_1LD, logits_1LE = torch.zeros(1, len(numbers), D), torch.zeros(1, len(numbers), E)
        row = RouterFeatures(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]), hidden_1LD, logits_1LE, numbers)
        return row, logits_1LE


def _on_rows(features: RouterFeatures, pi: RouterFeatures, width: int) -> RouterFeatures:
    """The cached features on the rows and layers of `pi`."""
    have_F, want_F = _keys(features, width), _keys(pi, width)
    # Keys ascend, as responses and their rows do. A key past the end is clamped and fails the comparison below.
    where_F = torch.searchsorted(have_F, want_F).clamp(max=max(len(have_F) - 1, 0))
    if len(have_F) == 0 or not torch.equal(have_F[where_F], want_F):
        raise ValueError(f"expected cached features on the {len(want_F)} rows that the pass kept, got other rows")
    absent = sorted(set(pi.layer_numbers) - set(features.layer_numbers))
    if absent:
        raise ValueError(f"expected cached features of layers {pi.layer_numbers}, got none of {absent}")
    return features.at(where_F, pi.offsets, pi.layer_numbers)


def _keys(features: RouterFeatures, width: int) -> Tensor:
    # `width` exceeds every row, so that no two responses share a key.
    counts = features.offsets.diff()
    return torch.arange(len(counts)).repeat_interleave(counts) * width + features.rows


def _fetched(features: RouterFeatures) -> RouterFeatures:
    """The features in this process: those in the object store would be fetched again with every block."""
    return RouterFeatures(features.rows, features.offsets, features.hidden, features.logits, features.layer_numbers)


__all__ = ["StagePredictor"]
