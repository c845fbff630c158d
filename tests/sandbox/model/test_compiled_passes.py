"""With compiled kernels trainer == prefill == decode holds bit by bit, as it does with torch's operators."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from sandbox.engines.buffers import PassRecorder
from sandbox.engines.prefix_cache import PrefixCache
from sandbox.kernels import EAGER
from sandbox.kernels.compiled.rounding import struct_of
from sandbox.kernels.numerics import Numerics
from sandbox.kernels.rounding import Rounding, RoundingStep
from sandbox.model.kv_cache import KVCache
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED, MODELS, copy_of, engine, model, trainer
from tests.sandbox.engines import test_defect_chain as chain
from tests.sandbox.engines.prefill import prefilled
from theory.contracts import MiniBatch, Rollouts, Sampling
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.streams import stream

SAMPLING = Sampling(max_tokens=10, num_responses=3, seed=5)
OPERATORS = replace(COMPILED, has_passes=False)
"""The compiled operators one by one, without whole passes."""


class FP8Inputs(Numerics):
    """The inputs of large products rounded to FP8, as one object."""

    steps = Rounding(inputs=(RoundingStep("fp8_e4m3", "token"),))

    def rounding(self) -> Rounding:
        return self.steps


def sampled(rollouts: Rollouts, logp_BT: torch.Tensor) -> torch.Tensor:
    """The log-probs of the response tokens, in a row."""
    return logp_BT[rollouts.padded().is_response_BT]


@pytest.mark.parametrize("name", MODELS)
def test_trainer_equals_prefill_equals_decode(name):
    """For every convention: alone == in a batch == prefill == old pass == gradient pass, in each bit and route."""
    weights = model(name)
    prompts, rolls = worlds.prompts(6), engine(weights)
    rollouts = rolls.generate(prompts, SAMPLING)
    logp_mu = sampled(rollouts, rollouts.padded().logp_mu_BT)

    alone = rolls.generate(prompts[:1], SAMPLING)
    for a, b in zip(alone.responses, rollouts.responses[:3], strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.logp_mu, b.logp_mu)
    again = prefilled(rolls, rollouts)
    assert torch.equal(sampled(again, again.padded().logp_mu_BT), logp_mu)
    learner = trainer(weights, micro_batch_size=7)
    scores = learner.score(rollouts, RoutingPlan("natural"))
    assert torch.equal(sampled(rollouts, scores.logp_BT), logp_mu)
    for record in (again.experts, scores.experts):
        assert (record is None) == (rollouts.experts is None)
        assert record is None or torch.equal(record.experts, rollouts.experts.experts)
    minibatch = MiniBatch(rollouts, scores.logp_BT, torch.linspace(-1, 1, 18), index=0, num_minibatches=1)
    stats = learner.update(minibatch, preset("minirl"), RoutingPlan("natural"))
    assert torch.equal(sampled(rollouts, stats.logp_pi_BT), logp_mu)


@pytest.mark.parametrize("name", MODELS)
def test_a_whole_pass_is_its_operators(name):
    """One C++ call for all layers gives every bit that the operators give one by one: hidden states, caches, routes.

    A pass that asks a routing layer by layer is in between, and gives them too.
    """
    weights = model(name)
    config = weights.config
    tokens_BS = torch.randint(0, config.vocab_size, (5, 13), generator=stream(1, "tokens"))

    class Asked:
        def __init__(self, recorder):
            self.route = recorder.route

    results = []
    for kernels, wrap in ((COMPILED, lambda r: r), (COMPILED, Asked), (OPERATORS, lambda r: r)):
        own, cache, recorder = copy_of(weights, kernels), KVCache(config, 5, 24), PassRecorder(keep_features=True)
        with torch.no_grad(), own.held():
            first = own.forward_hidden(tokens_BS[:, :9], wrap(recorder), cache=cache)
            cache.truncate(torch.tensor([9, 4, 7, 9, 1]))
            second = own.forward_hidden(tokens_BS[:, 9:], wrap(recorder), cache=cache)
            logits = own.logits(second.flatten(0, 1))
            uncached = own.forward_hidden(tokens_BS, wrap(recorder))
        kept = [k[:, b, :, :n] for k in (cache.k_LBhCd, cache.v_LBhCd) for b, n in enumerate(cache.lengths_B.tolist())]
        results.append([first, second, logits, uncached, *kept, *recorder.experts, *recorder.hidden, *recorder.logits])
    whole, *others = results
    for other in others:
        assert len(other) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))


def test_rounding_steps_outlive_their_cache():
    """A model that is held gives their address to every pass: they stay, however many others the cache has seen."""
    own = copy_of(model("qwen3"), COMPILED)
    numerics = FP8Inputs()
    with torch.no_grad(), own.held():
        own.forward_hidden(torch.zeros(1, 2, dtype=torch.int64), numerics=numerics)
        steps = weakref.ref(struct_of(numerics.rounding()))
        struct_of.cache_clear()
        gc.collect()
        assert steps() is not None


@pytest.mark.parametrize("name", MODELS)
def test_compiled_is_eager_to_rounding(name):
    """Log-probs differ from the eager kernels' by at most 1e-5 nats, gradients by 1e-5 relative; routes are replayed.

    Measured 2.4e-6 nats on the benchmark's model and 2e-6 relative: float32 sums of some 100 terms in another order.
    """
    weights = model(name)
    rollouts = engine(weights).generate(worlds.prompts(6), SAMPLING)
    routing = RoutingPlan("natural") if rollouts.experts is None else RoutingPlan("replay", record=rollouts.experts)
    logp, gradients = [], []
    for kernels in (EAGER, COMPILED):
        learner = trainer(weights, kernels=kernels)
        learner.take_step = lambda: None
        logp_BT = learner.score(rollouts, routing).logp_BT
        minibatch = MiniBatch(rollouts, logp_BT, torch.linspace(-1, 1, 18), index=0, num_minibatches=1)
        learner.settings = replace(learner.settings, max_grad_norm=1e9)
        learner.update(minibatch, preset("reinforce"), routing)
        logp.append(sampled(rollouts, logp_BT))
        gradients.append({n: p.grad for n, p in learner.model.named_parameters()})
    assert (logp[0] - logp[1]).abs().max() < 1e-5
    for key, eager in gradients[0].items():
        assert (eager - gradients[1][key]).norm() <= 1e-5 * eager.norm(), key


@pytest.mark.parametrize("gate", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replay_gives_the_same_first_ratio(gate, mode):
    """Replayed in R2 (old's experts) and R3 (mu's) the gradient pass equals the old pass in every bit."""
    weights = model(gate)
    # Other weights sampled, so that replay changes routes.
    rollouts = engine(model(gate, seed=1)).generate(worlds.prompts(6), SAMPLING)
    learner = trainer(weights)
    first = RoutingPlan("natural") if mode == "R2" else RoutingPlan("replay", record=rollouts.experts)
    scores = learner.score(rollouts, first)
    record = scores.experts if mode == "R2" else rollouts.experts
    assert torch.equal(scores.experts.experts, record.experts)
    minibatch = MiniBatch(rollouts, scores.logp_BT, torch.linspace(-1, 1, 18), index=0, num_minibatches=1)
    stats = learner.update(minibatch, preset("minirl"), RoutingPlan("replay", record=record))
    assert torch.equal(sampled(rollouts, stats.logp_pi_BT), sampled(rollouts, scores.logp_BT))


def test_a_prefix_cache_changes_no_bit():
    """Prompts that begin as earlier conversations did give the bits that they give without the cache."""
    weights = model("qwen3")
    first = engine(weights, prefixes=PrefixCache()), engine(weights)
    longer = []
    for one in first:
        for response in one.generate(worlds.prompts(4), SAMPLING).responses:
            tokens = (*response.prompt.tokens, *response.tokens.tolist(), 3, 4)
            longer.append(replace(response.prompt, tokens=tokens))
    half = len(longer) // 2
    assert longer[:half] == longer[half:]
    cached, fresh = (one.generate(longer[:half], SAMPLING) for one in first)
    assert chain.equal(cached, fresh)
