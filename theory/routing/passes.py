"""The routing of each pass of a global step under each replay mode, and the routing plan of a single pass.

Papers: R3 (arXiv 2510.11370) sec. 4.1 and 5.1; Pr2 (arXiv 2606.00395) sec. 4.1, App. C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.record import RoutingRecord

Mode = Literal["none", "R2", "R3", "Pr2", "Pr3"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class ModePlan:
    """The routing of a mode's three passes: the rollout under mu, the old pass, and the gradient passes.

    `effect` says it in a clause, for reports: `R2` + " replays ..." is a sentence.
    """

    rollout: Literal["natural", "predicted"]
    old: Literal["natural", "replay_rollout", "predicted"]
    gradient: Literal["natural", "replay_old", "replay_rollout"]
    effect: str = ""

    @property
    def experts(self) -> str:
        """The pass whose experts the gradient passes replay, as configs print it; empty for a mode without replay."""
        of = {"natural": "", "replay_old": "old's", "replay_rollout": "mu's"}[self.gradient]
        return f"{of}, predicted" if self.trains_predictor else of

    @property
    def trains_predictor(self) -> bool:
        """Whether some pass routes by the predictor, which must then learn."""
        return "predicted" in (self.rollout, self.old)

    @property
    def records_rollout(self) -> bool:
        """Whether a training pass replays the rollout's experts, which must then be recorded."""
        return "replay_rollout" in (self.old, self.gradient)

    @property
    def records_old(self) -> bool:
        """Whether the gradient passes replay the old pass's experts, which must then be recorded."""
        return self.gradient == "replay_old"


PASSES: dict[Mode, ModePlan] = {
    "none": ModePlan(rollout="natural", old="natural", gradient="natural"),
    "R2": ModePlan(
        rollout="natural", old="natural", gradient="replay_old",
        effect="replays the old pass's experts in the gradient passes",
    ),
    "R3": ModePlan(
        rollout="natural", old="replay_rollout", gradient="replay_rollout",
        effect="replays mu's experts in all training passes",
    ),
    "Pr2": ModePlan(
        rollout="natural", old="predicted", gradient="replay_old",
        effect="replays the experts that a predictor chose in the old pass",
    ),
    "Pr3": ModePlan(
        rollout="predicted", old="replay_rollout", gradient="replay_rollout",
        effect="replays the experts that a predictor chose for mu",
    ),
}  # fmt: skip
IN_WORDS = ", ".join(f"{mode} ({plan.experts})" if plan.experts else mode for mode, plan in PASSES.items())
"""The modes with whose experts each replays, for configs."""


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """The routing of one pass.

    source: `natural` top-k of the live logits; `replay` of `record`, live gates; `predicted`, top-k of the live logits
    plus h W_p. gates: for `predicted`, weights from the biased logits (`predicted`, Pr2 Eq. 6) or the live ones.
    feature_rows: per response, the rows whose router logits are kept; with `keep_hidden` their router inputs too, for a
    predictor to learn from. scored: the experts whose log-scores under the live logits are kept on every row, those
    that the pass uses or a record's (RSPO). Raises ValueError where they conflict.
    """

    source: Literal["natural", "replay", "predicted"]
    record: RoutingRecord | None = None
    gates: Literal["live", "predicted"] = "live"
    predictor: Mapping[int, Float[Tensor, "D E"]] = field(default_factory=dict)
    feature_rows: tuple[Int[Tensor, " _"], ...] | None = None
    keep_hidden: bool = False
    scored: RoutingRecord | Literal["used"] | None = None

    def __post_init__(self) -> None:
        if (self.source == "replay") != (self.record is not None):
            got = "no record" if self.record is None else f"a record of {len(self.record)} responses"
            raise ValueError(f"expected a record if and only if source is 'replay', got {got} with {self.source!r}")
        if (self.source == "predicted") != bool(self.predictor):
            got = f"one for layers {sorted(self.predictor)} with {self.source!r}"
            raise ValueError(f"expected a predictor if and only if source is 'predicted', got {got}")
        if self.gates == "predicted" and self.source != "predicted":
            raise ValueError(f"expected gates 'predicted' only with source 'predicted', got source {self.source!r}")
        if self.keep_hidden and self.feature_rows is None:
            raise ValueError("expected keep_hidden only with feature rows, got no rows")
        if self.record is not None and self.feature_rows is not None and len(self.record) != len(self.feature_rows):
            raise ValueError(f"expected feature rows of {len(self.record)} responses, got {len(self.feature_rows)}")

    def select(self, indices: Sequence[int]) -> RoutingPlan:
        """The routing of these responses, in this order."""
        indices = list(indices)
        return replace(
            self,
            record=None if self.record is None else self.record.select(indices),
            feature_rows=None if self.feature_rows is None else tuple(self.feature_rows[b] for b in indices),
            scored=self.scored.select(indices) if isinstance(self.scored, RoutingRecord) else self.scored,
        )

    def expected_layers(self, layer_numbers: Sequence[int] | None) -> list[int] | None:
        """The layers that a pass routes: the model's, or those that the plan names; ValueError where these differ."""
        # At most one of the two names layers: __post_init__ refuses a record beside a predictor.
        known = sorted(self.predictor) or None
        if self.record is not None:
            known = list(self.record.layer_numbers)
        if layer_numbers is None:
            return known
        if known is not None and known != sorted(layer_numbers):
            raise ValueError(f"expected the model's layers {sorted(layer_numbers)}, got {known} to be {self.source}")
        return sorted(layer_numbers)

    def require_rows(self, num_rows_B: list[int], width: int) -> None:
        """ValueError unless a batch of these rows per response, padded to `width`, is one that the plan is for."""
        scored, features = self.scored, self.feature_rows
        if max(num_rows_B, default=0) > width:
            raise ValueError(f"expected a width of at least {max(num_rows_B)} rows, got {width}")
        if self.record is not None and self.record.num_rows_B != num_rows_B:
            raise ValueError(f"expected a record of {num_rows_B} rows per response, got {self.record.num_rows_B}")
        if isinstance(scored, RoutingRecord) and scored.num_rows_B != num_rows_B:
            raise ValueError(f"expected experts to score on {num_rows_B} rows, got {scored.num_rows_B}")
        # Before the pass: `ReplayContext` gathers by these ids, and -1 is no index.
        if isinstance(scored, RoutingRecord) and scored.num_missing_rows:
            raise ValueError(f"expected experts to score on every row, got none on {scored.num_missing_rows}")
        if features is not None and len(features) != len(num_rows_B):
            raise ValueError(f"expected feature rows of {len(num_rows_B)} responses, got {len(features)}")

    def flat_feature_rows(self, num_rows_B: list[int], width: int) -> Int[Tensor, " F"] | None:
        """The feature rows' places in the flattened batch, if any; ValueError where a response lacks such a row."""
        if self.feature_rows is None:
            return None
        num_features_B = torch.tensor([rows.shape[0] for rows in self.feature_rows], dtype=torch.int64)
        response_F = torch.arange(len(self.feature_rows)).repeat_interleave(num_features_B)
        rows_F = torch.cat(list(self.feature_rows))
        # Checked, as in the flattened batch such a row is padding or the next response's.
        is_outside_F = (rows_F < 0) | (rows_F >= torch.tensor(num_rows_B)[response_F])
        if bool(is_outside_F.any()):
            b = int(response_F[is_outside_F][0])
            got = self.feature_rows[b].tolist()
            raise ValueError(f"response {b}: expected feature rows in [0, {num_rows_B[b]}), got {got}")
        return response_F * width + rows_F
