"""The world of the defects' tests: an engine of the contract model against its training engine."""

from __future__ import annotations

import torch

from sandbox.engines.defect import Defect
from sandbox.model import MoE
from tests.contracts import worlds
from theory.contracts import Sampling
from theory.divergences import discrepancy_metrics
from theory.routing.passes import RoutingPlan


def discrepancy(*defects: Defect, versions: int = 1) -> float:
    """k3 KL(mu || old) of an engine with these defects, on 16 responses of the contract model."""
    *older, weights = [worlds.model()] if versions == 1 else trained(versions)
    engine = worlds.SandboxEngine(weights.config, defects, stop_tokens=(worlds.STOP,))
    for version, model in enumerate([*older, weights]):
        engine.load_model(model, version)
    rollouts = engine.generate(worlds.prompts(4), Sampling(max_tokens=16, num_responses=4, seed=9))
    scores = worlds.training_engine(weights).score(rollouts, RoutingPlan("natural"))
    batch = rollouts.padded()
    return discrepancy_metrics(scores.logp_BT, batch.logp_mu_BT, batch.is_response_BT)["rollout_corr/k3_kl"]


def trained(num_versions: int) -> list[MoE]:
    """The contract model moving towards another one in equal steps, the last version being the contract model's own."""
    versions = []
    for version in range(num_versions):
        model = worlds.model()
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), worlds.model(seed=1).parameters(), strict=True):
                parameter.add_(0.02 * (num_versions - 1 - version) * other)
        versions.append(model)
    return versions
