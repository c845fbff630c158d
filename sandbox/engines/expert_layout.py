"""Defect: expert matrices that a weight sync writes to the wrong places.

vllm#42821, verl#7986, verl#7195: a reload writes tensors in the checkpoint's layout into a kernel's own layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_NONE, BREAKS_TRAINER, Defect, Link

NAME = re.compile(r"(.*\.layers\.(\d+)\..*\.experts\.)(\d+)\.(\w+)(\..*)")
SWAPPED = {"gate_proj": "up_proj", "up_proj": "gate_proj", "w1": "w3", "w3": "w1"}


class ExpertLayout(Defect):
    """In the last `layers` MoE layers, experts have each other's matrices, or gate and up projections are swapped.

    `experts`: expert e has the matrices of expert e + 1, the last one those of the first; the router is correct.
    `halves`: silu(up x) * gate x instead of silu(gate x) * up x. Breaks only trainer == engine; `layers` = 0 is exact.
    """

    place: ClassVar[float] = 10
    kind: Literal["expert_layout"] = "expert_layout"
    moved: Literal["experts", "halves"] = Field(default="experts", description="the tensors that are misplaced")
    layers: int = Field(default=1, ge=0, description="number of affected MoE layers, counted from the last")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "experts one place on, last layer": cls(),
            "gate and up swapped, last layer": cls(moved="halves"),
        }

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_TRAINER if self.layers else BREAKS_NONE

    def weights(self, names: Sequence[str], stacked: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        found = {name: match for name in names if (match := NAME.fullmatch(name))}
        # The last layers of this stack: `kept_weights` hands over the tensors of one shape at a time.
        # With 0 layers the slice would begin at -0 and take all of them.
        hit = sorted({int(match[2]) for match in found.values()})[-self.layers :] if self.layers else []
        num_experts = 1 + max((int(match[3]) for match in found.values()), default=0)
        place = {name: i for i, name in enumerate(names)}
        order = torch.arange(len(names))
        for name, match in found.items():
            if int(match[2]) in hit:
                order[place[name]] = place[self._source(match, num_experts)]
        return stacked[order]

    def _source(self, match: re.Match[str], num_experts: int) -> str:
        """The name of the tensor that is written in place of this one."""
        start, _, expert, kind, rest = match.groups()
        if self.moved == "halves":
            return f"{start}{expert}.{SWAPPED.get(kind, kind)}{rest}"
        return f"{start}{(int(expert) + 1) % num_experts}.{kind}{rest}"
