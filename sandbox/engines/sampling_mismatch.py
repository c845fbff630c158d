"""Defect: tokens drawn from a processed distribution, by a temperature or a truncation that nobody scores (or all do).

The contract wants `logp_mu` at the temperature that was asked for and untruncated, and tokens that were drawn from it.
Two bugs of the field break one half each: sampling defaults of a model folder that are applied behind the caller's back
(`score: raw`), and log-probabilities of what they left, handed to a trainer that does not know it (`score: processed`).
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
    """A further temperature, then top-k, top-p and min-p, applied to what tokens are drawn from.

    `score: raw` writes down the model's own log-probabilities (vLLM's raw_logprobs), at temperature 1 whatever was
    asked for. At that temperature every numerical link holds and KL(mu || old) reads 0: what breaks is
    sampler == scorer, which a gap between the tokens' mean surprise and the mean entropy reveals. At another one
    trainer == engine breaks.
    `score: processed` writes down those of the distribution that is drawn from: this breaks trainer == engine, and
    log-ratios of kept tokens are off by the log of the kept mass.
    """

    place: ClassVar[float] = 12
    at_most_one: ClassVar[bool] = True
    kind: Literal["sampling_mismatch"] = "sampling_mismatch"
    temperature: float = Field(default=1.0, gt=0, description="multiplies the temperature that was asked for")
    top_k: int = Field(default=0, ge=0, description="keeps the k most likely tokens; 0 keeps all")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="keeps the most likely tokens whose mass first reaches p; 1 keeps all"
    )
    min_p: float = Field(
        default=0.0, ge=0, lt=1, description="keeps tokens of at least min_p times the largest probability"
    )
    score: Literal["raw", "processed"] = Field(default="raw", description="which log-probabilities are written down")

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
        """Whether what tokens are drawn from is left as it is."""
        return (self.temperature, self.top_k, self.top_p, self.min_p) == (1.0, 0, 1.0, 0.0)

    @property
    def setting(self) -> str:
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        acting = [f"{name} {dial(getattr(self, name))}" for name, off in neutral.items() if getattr(self, name) != off]
        return ", ".join([*acting, f"{self.score} scores"])

    @property
    def breaks(self) -> frozenset[Link]:
        if self.is_neutral:
            return BREAKS_NONE  # at the sampling temperature 1; at another, raw scores still differ
        return frozenset({"sampler"}) if self.score == "raw" else BREAKS_TRAINER

    def drawn(self, logits_AV: Float[Tensor, "A V"]) -> Float[Tensor, "A V"]:
        return self._processed(logits_AV, logits_AV)

    def scored(
        self, tempered_AV: Float[Tensor, "A V"], raw_AV: Float[Tensor, "A V"], temperature: float
    ) -> Float[Tensor, "A V"]:
        if self.score == "raw":
            return raw_AV
        # The kept set is decided in float64 in both places: a drawn token always has a score.
        return self._processed(tempered_AV, raw_AV.double() / temperature)

    def _processed(self, logits_AV: Tensor, deciding_AV: Tensor) -> Tensor:
        kept_AV = self._kept(deciding_AV / self.temperature)
        return (logits_AV / self.temperature).masked_fill(~kept_AV, float("-inf"))

    def _kept(self, logits_AV: Tensor) -> Bool[Tensor, "A V"]:
        """Tokens by rank: of equal logits the lower id stands first, so that top-k keeps k."""
        V = logits_AV.shape[1]
        probs_AV, order_AV = logits_AV.softmax(-1).sort(dim=-1, descending=True, stable=True)
        kept_AV = torch.ones_like(probs_AV, dtype=torch.bool)
        if 0 < self.top_k < V:
            kept_AV[:, self.top_k :] = False
        if self.top_p < 1:
            mass_AV = torch.where(kept_AV, probs_AV, 0.0)
            mass_AV = mass_AV / mass_AV.sum(-1, keepdim=True)
            kept_AV &= mass_AV.cumsum(-1) - mass_AV < self.top_p
        kept_AV &= probs_AV >= self.min_p * probs_AV[:, :1]
        return torch.zeros_like(kept_AV).scatter_(1, order_AV, kept_AV)
