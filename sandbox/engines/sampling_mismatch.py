"""Defect: tokens drawn at another temperature or from a truncated distribution, which is scored or not.

The contract requires `logp_mu` at the requested temperature and untruncated, and tokens drawn from that distribution.
Two bugs seen in practice break one half each: a model folder's sampling defaults that are applied silently
(`score: raw`), and log-probabilities of the truncated distribution, given to a trainer that does not know of it
(`score: processed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_NONE, BREAKS_TRAINER, Defect, Link, dial


class SamplingMismatch(Defect):
    """A further temperature, then top-k, top-p and min-p, applied to the distribution that tokens are drawn from.

    `score: raw` reports the model's own log-probabilities (vLLM's raw_logprobs), at temperature 1 whatever was
    requested. At that temperature every numerical link holds and KL(mu || old) reads 0; only sampler == scorer breaks,
    which a gap between the tokens' mean surprise and the mean entropy reveals. At another temperature trainer == engine
    breaks.
    `score: processed` reports those of the processed distribution: this breaks trainer == engine, and log-ratios of
    kept tokens are off by the log of the kept mass.
    """

    place: ClassVar[float] = 12
    at_most_one: ClassVar[bool] = True
    kind: Literal["sampling_mismatch"] = "sampling_mismatch"
    temperature: float = Field(default=1.0, gt=0, description="factor on the requested temperature")
    top_k: int = Field(default=0, ge=0, description="keeps the k most likely tokens; 0 keeps all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="keeps the most likely tokens whose mass first reaches p; 1 keeps all"
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="keeps tokens of at least min_p times the largest probability"
    )
    score: Literal["raw", "processed"] = Field(default="raw", description="which log-probabilities are reported")

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "temperature 0.9": cls(temperature=0.9),
            "temperature 0.7": cls(temperature=0.7),
            "top-p 0.9": cls(top_p=0.9),
            "top-k 2": cls(top_k=2),
            "min-p 0.1": cls(min_p=0.1),
            "temperature 0.7, scored": cls(temperature=0.7, score="processed"),
            "top-p 0.9, scored": cls(top_p=0.9, score="processed"),
        }

    @property
    def is_neutral(self) -> bool:
        """Whether the distribution that tokens are drawn from is unchanged."""
        return (self.temperature, self.top_k, self.top_p, self.min_p) == (1.0, 0, 1.0, 0.0)

    @property
    def setting(self) -> str:
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        acting = [f"{name} {dial(getattr(self, name))}" for name, off in neutral.items() if getattr(self, name) != off]
        return ", ".join([*acting, f"{self.score} scores"])

    @property
    def breaks(self) -> frozenset[Link]:
        if self.is_neutral:
            return BREAKS_NONE  # at sampling temperature 1; at any other, raw scores still differ
        return frozenset({"sampler"}) if self.score == "raw" else BREAKS_TRAINER

    def drawn(self, logits_AV: Float[Tensor, "A V"]) -> Float[Tensor, "A V"]:
        return self._processed(logits_AV, logits_AV)

    def scored(
        self, tempered_AV: Float[Tensor, "A V"], raw_AV: Float[Tensor, "A V"], temperature: float
    ) -> Float[Tensor, "A V"]:
        if self.score == "raw":
            return raw_AV
        # Both places decide the kept set in float64, so that a drawn token always has a finite score.
        return self._processed(tempered_AV, raw_AV.double() / temperature)

    def _processed(self, logits_AV: Tensor, deciding_AV: Tensor) -> Tensor:
        kept_AV = self._kept(deciding_AV / self.temperature)
        return (logits_AV / self.temperature).masked_fill(~kept_AV, float("-inf"))

    def _kept(self, logits_AV: Tensor) -> Bool[Tensor, "A V"]:
        """The mask of kept tokens; among equal logits the lower id ranks first, so that top-k keeps exactly k."""
        V = logits_AV.shape[1]
        probs_AV, order_AV = logits_AV.softmax(-1).sort(dim=-1, descending=True, stable=True)
        kept_AV = torch.ones_like(probs_AV, dtype=torch.bool)
        if 0 < self.top_k < V:
            kept_AV[:, self.top_k :] = False
        if self.top_p < 1:
            # The mass that top-k has left, renormalised: top-k comes first.
            mass_AV = torch.where(kept_AV, probs_AV, 0.0)
            mass_AV = mass_AV / mass_AV.sum(-1, keepdim=True)
            # The mass before a token: the one that reaches top_p is still kept.
            kept_AV &= mass_AV.cumsum(-1) - mass_AV < self.top_p
        # Sorted, so column 0 is the largest; probabilities are the whole distribution's, whatever top-k has left.
        kept_AV &= probs_AV >= self.min_p * probs_AV[:, :1]
        return torch.zeros_like(kept_AV).scatter_(1, order_AV, kept_AV)  # back in the order of ids


def is_unscored(defect: Defect, temperature: float) -> bool:
    """Whether tokens drawn at this temperature come from another distribution than the reported one."""
    # Raw scores are those at temperature 1, whatever was requested.
    is_raw = isinstance(defect, SamplingMismatch) and defect.score == "raw"
    return "sampler" in defect.breaks or (is_raw and temperature != 1)
