"""The parts of an objective: advantage, ratio, trust region, correction, aggregation and KL penalty, and what fits.

Papers: MiniRL (arXiv 2512.01374) Eq. 3, 5, 7 and App. A, Pr2 (2606.00395) Eq. 10, 11 and 14.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from theory import advantages
from theory.fields import About, require_ranges
from theory.names import unknown_name
from theory.objectives.aggregations import Aggregation
from theory.objectives.centering import CENTERINGS, WHOLE_VOCABULARY
from theory.objectives.corrections import CORRECTIONS, Correction, NoCorrection
from theory.objectives.kl_penalty import ESTIMATORS
from theory.objectives.ratios import RATIOS, Ratio
from theory.objectives.second_moment import Budget
from theory.objectives.trust_regions import TRUST_REGIONS, TrustRegion


@dataclass(frozen=True)
class Composition:
    """The parts of an objective, and its words. `advantage` names a function of theory/advantages.py, which the loop
    applies to rewards; `title` is the name as papers spell it.

    Raises ValueError on unknown names, a negative KL coefficient, a correction whose weight already holds pi under a
    trust region that multiplies by the ratio itself, and one that reweighs beside a region whose factor holds pi/mu.
    """

    name: str
    advantage: str
    ratio: Ratio
    trust_region: TrustRegion
    correction: Correction
    aggregation: Aggregation
    kl_coefficient: Annotated[float, About("beta of the penalty KL(pi || ref)", ge=0)] = 0.0
    kl_estimator: Annotated[str, About("estimator of that penalty")] = "k3"
    centering: Annotated[
        str, About("subtracts E_mu of each token's part of the gradient (arXiv 2609.20807): none, full or top_k")
    ] = "none"
    centering_k: Annotated[int, About("mu's likeliest tokens recorded per position, for top_k", ge=1)] = 20
    title: str = ""
    rejection: Correction = field(default_factory=NoCorrection)
    normalise_weights: Annotated[
        bool, About("divide the correction's weights by their mean over the mini-batch (verl's batch_normalize)")
    ] = False
    router_shift_floor: Annotated[
        float, About("least router-shift ratio gamma that scales pi/old (RSPO, arXiv 2510.23027); 1: none", gt=0, le=1)
    ] = 1.0
    m2_budget: Budget = 0.0

    def __post_init__(self) -> None:
        if self.advantage not in advantages.ADVANTAGES:
            raise unknown_name("advantage", self.advantage, advantages.ADVANTAGES)
        if self.kl_estimator not in ESTIMATORS:
            raise unknown_name("KL estimator", self.kl_estimator, ESTIMATORS)
        require_ranges(self, self.name)
        self._require_centering()
        self._require_weights()
        self._require_router_shift()
        self._require_budget()
        if not self.ratio.symbol and self.trust_region.name != "none":
            raise ValueError(f"{self.name}: expected a ratio for the trust region {self.trust_region.name}, got none")
        if self.correction.weighted and self.trust_region.weight_ratio == "none":
            raise ValueError(
                f"{self.name}: correction: expected none, or one that only rejects, got {self.correction.name}, which "
                f"reweighs: {self.trust_region.name} weighs by pi/mu itself, which would count the engine gap twice"
            )
        if self.correction.numerator == "pi" and self.trust_region.weight_ratio == "old/mu":
            raise ValueError(
                f"{self.name}: expected a correction with numerator 'old', got {self.correction.name} with 'pi': "
                f"{self.trust_region.name} multiplies by pi/old itself, which would count twice"
            )

    def _require_centering(self) -> None:
        if self.centering not in CENTERINGS:
            raise unknown_name("centering", self.centering, CENTERINGS)
        coupled = self._coupled()
        if self.centering != "none" and self.has_token_advantages:
            raise ValueError(
                f"{self.name}: centering: expected none beside an advantage per token, got {self.centering} with "
                f"{self.advantage}"
            )
        if self.centering != "none" and coupled is not None:
            wanted, got = coupled
            raise ValueError(
                f"{self.name}: centering: expected none, or {wanted} (a token's term must depend on no other token), "
                f"got {self.centering} with {got}"
            )

    @property
    def is_tokenwise(self) -> bool:
        """Whether a token's term depends on no other token, as centering and `rollout_corr/drift` require."""
        return self._coupled() is None and not (self.normalise_weights or self.looks_ahead or self.has_token_advantages)

    @property
    def has_token_advantages(self) -> bool:
        """Whether each token has its own advantage."""
        return self.advantage in advantages.OF_TOKENS

    def _coupled(self) -> tuple[str, str] | None:
        """The parts that centering accepts, and the objective's own that makes tokens depend on each other; or None."""
        weight, region, ratio = self.correction, self.trust_region, self.ratio
        # Rejections couple nothing: of responses they are in the mask, of tokens a function of the token's own ratio.
        if weight.weighted and not weight.is_tokenwise:
            wanted = [name for name, one in CORRECTIONS.items() if one.is_tokenwise]
            return f"a correction of {', '.join(wanted)} or none", f"the correction {weight.name}"
        if not region.is_tokenwise:
            wanted = [name for name, one in TRUST_REGIONS.items() if one.is_tokenwise]
            return f"a trust region of {', '.join(wanted)}", f"the trust region {region.name}"
        if not ratio.is_tokenwise:
            wanted = [name for name, one in RATIOS.items() if one.is_tokenwise]
            return f"a ratio of {', '.join(wanted)}", f"the ratio {ratio.name}"
        return None

    def _require_weights(self) -> None:
        weight, beside = self.correction, self.rejection
        if beside.weighted:
            raise ValueError(
                f"{self.name}: rejection: expected a correction that only rejects, got {beside.name}, which reweighs"
            )
        if self.normalise_weights and not (weight.weighted and weight.numerator == "old"):
            raise ValueError(
                f"{self.name}: normalise_weights: expected a weight on old/mu, whose mean is known before the gradient "
                f"pass, got the correction {weight.name} with numerator {weight.numerator!r}"
            )
        if self.normalise_weights and self.centering != "none":
            raise ValueError(f"{self.name}: normalise_weights: expected centering none, got {self.centering}")

    def _require_router_shift(self) -> None:
        if not self.uses_router_shift:
            return
        field, weight = f"{self.name}: router_shift_floor", self.correction
        if not self.ratio.takes_router_shift:
            wanted = ", ".join(name for name, one in RATIOS.items() if one.takes_router_shift)
            raise ValueError(f"{field}: expected a ratio of {wanted} to scale, got the ratio {self.ratio.name}")
        if not self.trust_region.takes_router_shift:
            wanted = ", ".join(name for name, one in TRUST_REGIONS.items() if one.takes_router_shift)
            got = self.trust_region.name
            raise ValueError(f"{field}: expected a trust region of {wanted}, got the trust region {got}")
        # Such a weight stands in for the ratio (`Objective._term`), and gamma would be lost.
        if weight.numerator == "pi":
            raise ValueError(
                f"{field}: expected a correction with numerator 'old' beside the ratio pi/old that it scales, got "
                f"{weight.name} with 'pi'"
            )
        if self.centering != "none":
            raise ValueError(f"{field}: expected 1 beside centering {self.centering}, got {self.router_shift_floor:g}")

    def _require_budget(self) -> None:
        if not self.m2_budget:
            return
        field, region, ratio = f"{self.name}: m2_budget", self.trust_region.name, self.ratio.name
        if region != "min_clip" or ratio != "token":
            raise ValueError(
                f"{field}: expected the trust region min_clip of the ratio token to widen, got {region} of {ratio}"
            )
        # tau is found on ratios without gamma (`within_budget`), and depends on all tokens, which centering rules out.
        if self.uses_router_shift or self.centering != "none":
            got = f"router_shift_floor {self.router_shift_floor:g}" if self.uses_router_shift else "centering"
            raise ValueError(f"{field}: expected neither a router shift nor centering beside it, got {got}")

    @property
    def looks_ahead(self) -> bool:
        """Whether an update needs a scoring pass of its mini-batch under pi before its gradient pass."""
        return self.uses_router_shift or self.m2_budget > 0

    @property
    def uses_router_shift(self) -> bool:
        """Whether the router-shift ratio gamma scales each token's ratio."""
        return self.router_shift_floor < 1

    @property
    def num_top(self) -> int:
        """The number of mu's likeliest tokens to record per position; a smaller vocabulary is recorded whole."""
        return {"none": 0, "full": WHOLE_VOCABULARY, "top_k": self.centering_k}[self.centering]

    # -- words

    @property
    def _centred_on(self) -> str:
        return "all of mu" if self.centering == "full" else f"mu's {self.centering_k} likeliest tokens, pi's tail"

    @property
    def formula(self) -> str:
        """J in the papers' notation, with the numbers in it."""
        weight = " ".join(s for s in (self.correction.symbol, self.rejection.symbol) if s)
        if self.normalise_weights:
            weight = f"{weight}/mean(w)"
        # A score region needs pi/mu: old/mu from the correction, and the ratio pi/old beside it.
        if self.trust_region.weight_ratio == "pi/mu" and self.correction.numerator == "old":
            weight = " ".join(s for s in (weight, self.ratio.symbol) if s)
        term = self.trust_region.formula(self.ratio.symbol, weight)
        if self.m2_budget:
            term = f"{term} [bounds widened to log r of at most tau]"
        if self.uses_router_shift:
            term = f"{term} [each pi_t/old_t times gamma_t]"
        if self.kl_coefficient > 0:
            term = f"({term} - {self.kl_coefficient:g} {self.kl_estimator}[KL(pi || ref)])"
        return "J = " + self.aggregation.formula.format(term=term)

    def describe(self) -> str:
        """The composition, a line per part, each with its formula."""
        kl = f"{self.kl_coefficient:g} x {self.kl_estimator} of KL(pi || ref)" if self.kl_coefficient > 0 else "none"
        parts = {
            "objective": self.formula,
            "advantage": f"{self.advantage}: {advantages.FORMULAS[self.advantage]}",
            "ratio": f"{self.ratio.name}: {self.ratio.formula}",
            "trust region": self.trust_region.name,
            "correction": f"{self.correction.name}: {self.correction.formula}",
            "rejection": f"{self.rejection.name}: {self.rejection.formula}",
            "weights": "w_t over the mean w of the mini-batch's kept responses",
            "aggregation": self.aggregation.name,
            "KL penalty": kl,
        }
        if self.rejection.name == "none":
            del parts["rejection"]
        if not self.normalise_weights:
            del parts["weights"]
        if self.m2_budget:
            moment = "(1/n) sum_j min((log r_j)^2, tau^2)"
            parts["bounds"] = f"tau: {moment} = {self.m2_budget:g} over the n tokens with A log r > 0"
        if self.uses_router_shift:
            shift = "mean over layers, old's experts of |log p_pi/p_old|"
            parts["router shift"] = f"gamma_t = sg[max(exp(-{shift}), {self.router_shift_floor:g})]"
        if self.centering != "none":
            parts["centering"] = f"-sum_v mu(v) c(v) log pi(v), c = d term / d log pi; {self._centred_on}"
        return "\n".join([self.name, *(f"  {part:<13} {text}" for part, text in parts.items())])
