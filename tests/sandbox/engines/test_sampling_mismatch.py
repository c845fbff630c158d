"""Truncated and tempered sampling keeps the set of its definition, and is scored as its dial says."""

from __future__ import annotations

import pytest
import torch

from sandbox.engines import SamplingMismatch, StaleWeights
from tests.contracts import worlds
from tests.sandbox.engines.defect_world import discrepancy
from theory.contracts import Sampling
from theory.divergences import entropy
from theory.exact.tree import PrefixTree

LOGITS = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log().double()


@pytest.mark.parametrize(
    ("dial", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0]),  # the mass before a token must be below p: the set that first reaches p
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.9}, [0, 1, 2, 3]),
        ({"min_p": 0.19}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0]),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),  # top-p counts the mass of what top-k left: 0.59, 0.82, 1
        ({"temperature": 0.5, "top_p": 0.75}, [0]),  # 0.77 of the mass at half the temperature
        ({"temperature": 2.0, "min_p": 0.5}, [0, 1, 2]),  # square roots: 0.71, 0.45, 0.39, 0.32, 0.22
    ],
)
def test_truncation_keeps_the_set_of_its_definition(dial, kept):
    """Tokens are drawn from the tempered distribution, renormalised over the kept tokens; ties go to lower ids."""
    defect = SamplingMismatch(**dial)
    drawn_V = defect.drawn(LOGITS)[0].softmax(-1)
    assert drawn_V.nonzero()[:, 0].tolist() == kept
    expected = (LOGITS[0] / defect.temperature).softmax(-1)[kept]
    torch.testing.assert_close(drawn_V[kept], expected / expected.sum())


def test_ties_keep_exactly_k():
    """Of equal logits the lower ids are kept."""
    assert SamplingMismatch(top_k=2).drawn(torch.zeros(1, 4))[0].isfinite().tolist() == [True, True, False, False]


def test_unscored_truncation_is_blind_in_kl_and_seen_in_surprise():
    """`raw`: KL reads 0 while sampled tokens are too likely; the gap surprise - entropy is 0 without truncation.

    Over n tokens, within 4 standard errors: n independent draws of the first response token.
    """
    weights, n = worlds.model(), 3000
    assert discrepancy(SamplingMismatch(top_p=0.8)) == 0
    sampling = Sampling(max_tokens=1, num_responses=n, seed=4)
    gaps = []
    for defects in ((), (SamplingMismatch(top_p=0.8),)):
        engine = worlds.SandboxEngine(weights.config, defects)
        engine.load_model(weights, version=0)
        rollouts = engine.generate(worlds.prompts(1), sampling)
        logp_n = torch.cat([r.logp_mu for r in rollouts.responses])
        tree = PrefixTree(worlds.VOCABULARY, 1)
        exact = worlds.SandboxEngine(weights.config, ())
        exact.load_model(weights, version=0)
        logits_V = exact.enumerate(worlds.prompts(1)[0], tree).padded().logp_mu_BT[:, 0]
        gaps.append(((-logp_n).mean() - entropy(logits_V), 4 * logp_n.std() / n**0.5))
    (honest, margin), (truncated, _) = gaps
    assert abs(honest) <= margin
    assert truncated < -margin


def test_processed_scores_are_those_of_what_was_drawn_from():
    """`processed` at a sampling temperature: logp is that of the tempered, truncated distribution of both dials."""
    weights = worlds.model()
    defect = SamplingMismatch(temperature=0.8, top_k=5, score="processed")
    engine = worlds.SandboxEngine(weights.config, (defect,))
    engine.load_model(weights, version=0)
    n = 3000
    rollouts = engine.generate(worlds.prompts(1), Sampling(max_tokens=1, num_responses=n, temperature=1.5, seed=4))
    tokens = torch.stack([r.tokens[0] for r in rollouts.responses])
    assert len(tokens.unique()) == 5
    for token in tokens.unique():
        p = rollouts.responses[int((tokens == token).nonzero()[0])].logp_mu[0].exp().item()
        frequency = (tokens == token).float().mean().item()
        assert abs(frequency - p) <= 4 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("defect", [SamplingMismatch(top_k=2), StaleWeights(switch_at=0.5)])
def test_enumeration_wants_one_scored_policy(defect):
    """A tree has one probability an edge: engines that sample from another, or from two in turn, are refused."""
    weights = worlds.model()
    engine = worlds.SandboxEngine(weights.config, (defect,))
    engine.load_model(weights, version=0)
    with pytest.raises(ValueError, match=f"one scored policy, got {defect.words}"):
        engine.enumerate(worlds.prompts(1)[0], PrefixTree(worlds.VOCABULARY, 1))
