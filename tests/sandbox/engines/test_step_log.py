"""The log of decoding steps: what it writes for many steps at a time has the bits of one step at a time."""

from __future__ import annotations

import pytest
import torch

from sandbox.engines import PartialWeights, RouterNoise, SamplingMismatch, StaleWeights, step_log
from sandbox.engines.engine import SandboxEngine
from tests.contracts import worlds
from theory.contracts import Sampling


@pytest.mark.parametrize("vocabulary", [2, 13, 25, 64, 1000])
@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_the_scores_of_several_steps_are_those_of_each(vocabulary, num_rows):
    """A row of torch's log_softmax does not depend on the rows beside it, nor on where they lie in memory."""
    generator = torch.Generator().manual_seed(vocabulary)
    steps = [8 * torch.randn(num_rows, vocabulary, generator=generator) for _ in range(7)]
    together = torch.log_softmax(torch.cat(steps), -1).split(num_rows)
    assert all(torch.equal(own, torch.log_softmax(step, -1)) for own, step in zip(together, steps, strict=True))


DEFECTS = {
    "exact": (),
    "noise": (RouterNoise(std=0.3),),
    "processed": (SamplingMismatch(top_p=0.9, score="processed"),),
    "switched": (StaleWeights(switch_at=0.5, cache="recomputed"),),
    "withheld": (PartialWeights(missing="experts"),),
}


@pytest.mark.parametrize("name", DEFECTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_when_the_log_is_written_changes_no_bit(name, temperature, monkeypatch):
    """Written after every step or as seldom as possible, a call gives the same tokens, scores, routes and features.

    Responses end at different tokens, so that rows leave the batch, and with `switched` the model changes on the way.
    """
    weights = worlds.model(dense_layers=(1,))

    def generated():
        engine = SandboxEngine(weights.config, DEFECTS[name], stop_tokens=worlds.STOPS)
        engine.load_model(weights, version=0)
        engine.load_model(worlds.model(seed=1, dense_layers=(1,)), version=1)
        sampling = Sampling(24, num_responses=3, temperature=temperature, seed=2, num_features=5, num_top=4)
        return engine.generate(worlds.prompts(6), sampling)

    seldom = generated()
    monkeypatch.setattr(step_log, "HELD", 1)
    often = generated()
    lengths = {len(response.tokens) for response in seldom.responses}
    assert len(lengths) > 2, lengths
    for one, other in zip(seldom.responses, often.responses, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.logp_mu, other.logp_mu)
    for record in ("experts", "features", "top"):
        for one, other in zip(_tensors(getattr(seldom, record)), _tensors(getattr(often, record)), strict=True):
            assert torch.equal(one, other), record


def _tensors(record) -> list[torch.Tensor]:
    own = [value for value in vars(record).values() if isinstance(value, torch.Tensor)]
    rows = [record.id_rows.values, record.logp_rows.values] if hasattr(record, "id_rows") else []
    return own + rows
