"""Each defect breaks exactly the links of the chain that it declares: the exact engine's equalities, bit by bit.

Links (sandbox/engines/defect.py): alone == in a batch, prefill == decode, trainer == engine, sampler == scorer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sandbox.engines import (
    KINDS,
    ActivationPrecision,
    BlockPrecision,
    ExpertLayout,
    KVPrecision,
    LogitNoise,
    PartialWeights,
    ReductionOrder,
    RoutedScaling,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect, Link
from sandbox.engines.engine import SandboxEngine
from sandbox.kernels import EAGER, Kernels
from sandbox.kernels.numerics import EXACT, Numerics
from sandbox.model import MoE
from sandbox.training.numerics import of_precision, training_numerics
from tests.contracts import worlds
from tests.sandbox.engines.prefill import prefilled
from theory.contracts import MiniBatch, Rollouts, Sampling
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.streams import stream

SAMPLING = Sampling(max_tokens=8, num_responses=3, seed=5)
NUM_PROMPTS = 6  # 18 rows decode together: more than one tile of a kernel that tiles by 16

BROKEN: dict[str, Defect] = {name: defects[0] for name, defects in worlds.DEFECTS.items() if len(defects) == 1} | {
    "weights fp16": WeightPrecision(format="fp16"),
    "weights fp8 per block": WeightPrecision(scale="block", block_size=16),
    "activations fp16": ActivationPrecision(format="fp16"),
    "activations fp8 per block": ActivationPrecision(scale="block", block_size=16),
    "activations fp8 per tensor": ActivationPrecision(scale="tensor"),
    "activations int8 per tensor": ActivationPrecision(format="int8", scale="tensor"),
    "blocks ue8m0": BlockPrecision(format="fp8_ue8m0"),
    "blocks mxfp8": BlockPrecision(),
    "blocks nvfp4": BlockPrecision(format="nvfp4"),
    "blocks nvfp4 weights": BlockPrecision(format="nvfp4", of="weights"),
    "cache bf16": KVPrecision(format="bf16"),
    "cache fp8 per token": KVPrecision(scale="token"),
    "cache fp8 per tensor": KVPrecision(scale="tensor"),
    "cache int8 per tensor": KVPrecision(format="int8", scale="tensor"),
    "reduction bf16": ReductionOrder(units=8, partials="bf16"),
    "stale": StaleWeights(versions=1),
    "stale, then new": StaleWeights(versions=1, switch_at=0.5),
    "stale, then new with its own cache": StaleWeights(versions=1, switch_at=0.5, cache="recomputed"),
    "nothing arrives": PartialWeights(),
    "attention never arrives": PartialWeights(missing="attention"),
    "routers never arrive": PartialWeights(missing="routers"),
    "gate and up swapped": ExpertLayout(moved="halves"),
    "temperature": SamplingMismatch(temperature=0.7),
    "top-p": SamplingMismatch(top_p=0.8),
    "top-k": SamplingMismatch(top_k=4),
    "min-p": SamplingMismatch(min_p=0.2),
    "temperature, scored": SamplingMismatch(temperature=0.7, score="processed"),
    "top-k, scored": SamplingMismatch(top_k=4, score="processed"),
}
"""Rows of the contract suite with one defect, and further settings of these kinds."""

NEUTRAL: dict[str, Defect] = {
    "reduction": ReductionOrder(units=1, partials="bf16"),
    "router noise": RouterNoise(std=0.0),
    "logit noise": LogitNoise(std=0.0),
    "stale": StaleWeights(versions=0, switch_at=0.5, cache="recomputed"),
    "experts where they belong": ExpertLayout(layers=0),
    "routed sum": RoutedScaling(factor=1.0),
    "sampling": SamplingMismatch(),
    "sampling, scored": SamplingMismatch(score="processed"),
}


class Watched(SandboxEngine):
    """Keeps, by its draw, the log-probability that each token had in the distribution it was drawn from."""

    def generate(self, prompts, sampling):
        self.seen: dict[float, float] = {}
        return super().generate(prompts, sampling)

    def _sample(self, drawn_AV, draws_A):
        tokens_A = super()._sample(drawn_AV, draws_A)
        logp_A = drawn_AV.log_softmax(-1).gather(-1, tokens_A[:, None])[:, 0]
        self.seen |= dict(zip(draws_A.tolist(), logp_A.tolist(), strict=True))
        return tokens_A


@dataclass(frozen=True)
class World:
    """Weights of two versions, and engines that were handed both."""

    before: MoE
    now: MoE

    def engine(self, *defects: Defect, numerics: Numerics = EXACT) -> Watched:
        options = {"numerics": numerics, "kernels": self.now.kernels}
        engine = Watched(self.now.config, defects, stop_tokens=(worlds.STOP,), **options)
        engine.load_model(self.before, version=3)
        engine.load_model(self.now, version=4)
        return engine


def make_world(kernels: Kernels = EAGER) -> World:
    """The contract model, and the same a small step away."""
    now, before = worlds.model().compute_with(kernels), worlds.model().compute_with(kernels)
    with torch.no_grad():
        for parameter, other in zip(before.parameters(), worlds.model(seed=1).parameters(), strict=True):
            parameter.add_(0.05 * other)
    return World(before, now)


@pytest.fixture(scope="module")
def world() -> World:
    """One world for all tests that change nothing of it."""
    return make_world()


def equal(a: Rollouts, b: Rollouts) -> bool:
    """Whether tokens, log-probs and routes are the same bits."""
    assert a.experts is not None
    assert b.experts is not None
    pairs = zip(a.responses, b.responses, strict=True)
    same = all(torch.equal(x.tokens, y.tokens) and torch.equal(x.logp_mu, y.logp_mu) for x, y in pairs)
    return same and torch.equal(a.experts.experts, b.experts.experts)


def broken_links(world: World, *defects: Defect, numerics: Numerics = EXACT) -> Iterator[Link]:
    """The links that do not hold, measured."""
    engine = world.engine(*defects, numerics=numerics)
    prompts = worlds.prompts(NUM_PROMPTS)
    rollouts = engine.generate(prompts, SAMPLING)
    if not is_drawn_as_scored(engine, rollouts):
        yield "sampler"
    if not equal(engine.generate(prompts[:1], SAMPLING), rollouts.select(range(SAMPLING.num_responses))):
        yield "batch"
    if not equal(prefilled(engine, rollouts, seed=SAMPLING.seed), rollouts):
        yield "prefill"
    scores = worlds.training_engine(world.now, numerics=numerics).score(rollouts, RoutingPlan("natural"))
    batch = rollouts.padded()
    if not torch.equal(scores.logp_BT[batch.is_response_BT], batch.logp_mu_BT[batch.is_response_BT]):
        yield "trainer"


def is_drawn_as_scored(engine: Watched, rollouts: Rollouts) -> bool:
    """Whether every written log-probability is that of the distribution which its token was drawn from.

    To float32 rounding: tokens are drawn in float64. Measured 4e-7 where it is, 0.01 and more where it is not.
    """
    shape = (len(rollouts), SAMPLING.max_tokens)
    draws_BT = torch.rand(shape, dtype=torch.float64, generator=stream(SAMPLING.seed, "sampling")).tolist()
    return all(
        abs(engine.seen[u] - logp) < 1e-5
        for b, response in enumerate(rollouts.responses)
        for u, logp in zip(draws_BT[b], response.logp_mu.tolist(), strict=False)
    )


@pytest.mark.parametrize("name", BROKEN)
def test_a_defect_breaks_the_links_that_it_declares(world, name):
    """Every link that the defect declares differs in bits somewhere, and every other one in none."""
    assert set(broken_links(world, BROKEN[name])) == BROKEN[name].breaks != set()


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_dial_is_the_exact_engine(world, name):
    """At the neutral setting nothing breaks, and tokens, log-probs and routes are the exact engine's bits."""
    assert set(broken_links(world, NEUTRAL[name])) == NEUTRAL[name].breaks == set()
    prompts = worlds.prompts(NUM_PROMPTS)
    assert equal(world.engine(NEUTRAL[name]).generate(prompts, SAMPLING), world.engine().generate(prompts, SAMPLING))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_exact_engine_breaks_nothing(world, precision):
    """All four links hold to the bit, in either precision of the training engine, which the exact engine shares."""
    assert set(broken_links(world, numerics=of_precision(precision))) == set()


def test_a_bf16_trainer_is_not_the_fp32_engine(world):
    """bf16 training departs from float32 sampling: the precision dial of training is felt in every token's bits."""
    rollouts = world.engine().generate(worlds.prompts(), SAMPLING)
    scores = worlds.training_engine(world.now, numerics=of_precision("bf16")).score(rollouts, RoutingPlan("natural"))
    batch = rollouts.padded()
    difference = (scores.logp_BT - batch.logp_mu_BT)[batch.is_response_BT].abs()
    # Measured mean 0.017: bf16 keeps 8 bits, logits are of the order of 1.
    assert 1e-3 < difference.mean() < 0.1
    assert (difference > 0).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_fp8_trainer_is_an_fp8_engine(world, precision):
    """FP8 products in training are, to the bit, an engine with FP8 weights and activations, and not the exact one.

    Gradients pass the rounding: that of the parameters points where exact training's does, but not to the bit.
    """
    fp8 = training_numerics(precision, ReductionOrder(units=1), "fp8_e4m3")
    trainer = worlds.training_engine(world.now, numerics=fp8)
    plan, is_same = RoutingPlan("natural"), {}
    for name, defects in {"fp8": (WeightPrecision(), ActivationPrecision()), "exact": ()}.items():
        engine = SandboxEngine(world.now.config, defects, (worlds.STOP,), numerics=of_precision(precision))
        engine.load_model(world.now, version=0)
        rollouts = engine.generate(worlds.prompts(), SAMPLING)
        batch = rollouts.padded()
        is_same[name] = (trainer.score(rollouts, plan).logp_BT == batch.logp_mu_BT)[batch.is_response_BT]
    assert is_same["fp8"].all() and is_same["exact"].float().mean() < 0.1
    exact = worlds.training_engine(world.now)
    gradients = [engine.token_gradients(rollouts, plan, 0)[1].mean(0) for engine in (trainer, exact)]
    assert 0.9 < torch.cosine_similarity(*gradients, dim=0) < 0.9999


@pytest.mark.parametrize(
    "names", [("weights-fp8-channel", "cache-fp8", "top-k"), ("stale, then new", "reduction-order", "temperature")]
)
def test_defects_compose(world, names):
    """An engine with several defects breaks the union of what each breaks."""
    defects = [BROKEN[name] for name in names]
    assert set(broken_links(world, *defects)) == frozenset().union(*(defect.breaks for defect in defects))


def test_every_defect_is_in_the_chain():
    """The table above holds every kind of defect that a config may name."""
    assert {type(defect) for defect in BROKEN.values()} == set(KINDS)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("units", [1, 8])
def test_repeated_forward_passes_differ_by_their_order_alone(world, precision, units):
    """Scores in micro-batches of 18 and of 5 have the same bits in a fixed order, and not under a varying one.

    Reduction order is real: nothing is drawn, so that the same micro-batches give the same bits again.
    """
    # bf16 outputs hide most of what another order of float32 partial sums does; bf16 partial sums do not.
    numerics = training_numerics(precision, ReductionOrder(units=units, partials=precision))
    rollouts = world.engine().generate(worlds.prompts(NUM_PROMPTS), SAMPLING)

    def score(size: int) -> torch.Tensor:
        trainer = worlds.training_engine(world.now, numerics=numerics, micro_batch_size=size)
        return trainer.score(rollouts, RoutingPlan("natural")).logp_BT

    whole, parts = score(18), score(5)
    assert torch.equal(parts, score(5))
    assert torch.equal(whole, parts) == (units == 1)
    # Sums of 32 terms in another order: some units of 2^-24, or of 2^-8 in bf16, of logits of the order of 1.
    assert (whole - parts).abs().max() < (1e-4 if precision == "fp32" else 1.0)


def test_a_varying_order_moves_the_first_ratio_from_one(world):
    """pi equals old before the first update in a fixed order; where mini-batches are summed otherwise it does not."""
    rollouts = world.engine().generate(worlds.prompts(NUM_PROMPTS), SAMPLING)
    ratios = []
    for units in (1, 8):
        trainer = worlds.training_engine(
            world.now, numerics=training_numerics("fp32", ReductionOrder(units=units)), micro_batch_size=18
        )
        logp_old_BT = trainer.score(rollouts, RoutingPlan("natural")).logp_BT
        # 18 responses are 342 rows or 22 tiles, whose last wave is almost full; 4 are 64 rows, which are split in two.
        part = rollouts.select(range(4))
        T = part.padded().is_response_BT.shape[1]
        minibatch = MiniBatch(part, logp_old_BT[:4, :T], torch.linspace(-1, 1, 4), index=0, num_minibatches=1)
        stats = trainer.update(minibatch, preset("minirl"), RoutingPlan("natural"))
        ratios.append((stats.logp_pi_BT - logp_old_BT[:4, :T]).exp())
    assert (ratios[0] == 1).all()
    assert (ratios[1] != 1).any()
