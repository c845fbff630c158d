"""Engines that round inside a pass: the whole compiled pass rounds as the hooks do, and computes no other numerics."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sandbox.engines import (
    ActivationPrecision,
    BlockPrecision,
    KVPrecision,
    LogitNoise,
    ReductionOrder,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
    rounded,
)
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.kernels.compiled import rounding as compiled
from sandbox.kernels.numerics import EXACT, Numerics, compose
from sandbox.kernels.rounding import Rounding, RoundingStep
from sandbox.training.numerics import of_precision
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED, MODELS, model
from tests.sandbox.engines import test_defect_chain as chain
from tests.sandbox.engines.prefill import prefilled
from theory.contracts import Rollouts, Sampling
from theory.streams import stream

SAMPLING = Sampling(max_tokens=5, num_responses=2, seed=5, num_features=4)
OPERATORS = replace(COMPILED, has_passes=False)
"""The compiled operators one by one, hooks in between, without whole passes."""


def refused(*arguments):
    """The functions that no whole pass calls."""
    raise NotImplementedError("an operator was asked")


WHOLE = replace(COMPILED, linear=refused, attention=refused, grouped_experts=refused)
"""Whole passes alone: whatever needs an operator fails."""

STRESS = (WeightPrecision(), ActivationPrecision(), KVPrecision())
KNOWN: dict[str, tuple[Defect, ...]] = {
    "fp8 per token": (ActivationPrecision(),),
    "fp8 per block": (ActivationPrecision(scale="block", block_size=12),),
    "int8 per token": (ActivationPrecision(format="int8"),),
    "bf16": (ActivationPrecision(format="bf16"),),
    "cache bf16": (KVPrecision(format="bf16"),),
    "cache fp8": (KVPrecision(),),
    "cache fp8 per token": (KVPrecision(scale="token"),),
    "cache int8": (KVPrecision(format="int8", scale="token"),),
    "router noise": (RouterNoise(std=0.3),),
    "two noises": (RouterNoise(std=0.1), LogitNoise(std=0.1), RouterNoise(std=0.2)),
    "noise, then fp8": (RouterNoise(std=0.1), ActivationPrecision()),
    "fp8, then int8": (ActivationPrecision(), ActivationPrecision(format="int8")),
    "int8, then fp8": (ActivationPrecision(format="int8"), ActivationPrecision()),
    "stale and truncated": (*STRESS, StaleWeights(switch_at=0.5, cache="recomputed"), SamplingMismatch(top_k=4)),
}
UNKNOWN: dict[str, tuple[Defect, ...]] = {
    "fp16": (ActivationPrecision(format="fp16"),),
    "fp8 per tensor": (ActivationPrecision(scale="tensor"),),
    "mxfp8": (BlockPrecision(),),
    "cache fp8 per tensor": (KVPrecision(scale="tensor"),),
    "reduction": (ReductionOrder(),),
    "stress and reduction": (*STRESS, ReductionOrder()),
}


_VERSIONS = functools.cache(lambda name: [model(name, seed=version) for version in (0, 1)])


def engine(name: str, kernels, *defects: Defect, numerics: Numerics = EXACT) -> SandboxEngine:
    """An engine of the named model with these kernels, which was handed two versions."""
    made = SandboxEngine(MODELS[name], defects, (worlds.STOP,), kernels=kernels, numerics=numerics)
    for version, weights in enumerate(_VERSIONS(name)):
        made.load_model(weights, version)
    return made


def equal(a: Rollouts, b: Rollouts) -> bool:
    """Whether tokens, log-probs, routes and router features are the same bits."""
    if a.experts is None or b.experts is None:
        pairs = zip(a.responses, b.responses, strict=True)
        return all(torch.equal(x.tokens, y.tokens) and torch.equal(x.logp_mu, y.logp_mu) for x, y in pairs)
    if a.features is not None and b.features is not None:
        own, other = a.features, b.features
        if not (torch.equal(own.hidden, other.hidden) and torch.equal(own.logits, other.logits)):
            return False
    return chain.equal(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits agree, signs of zeros too; a NaN is a NaN."""
    number = ~(a.isnan() & b.isnan())
    return torch.equal(a[number].view(torch.int32), b[number].view(torch.int32))


@pytest.fixture(scope="module")
def floats() -> Tensor:
    """Every bfloat16, their neighbours, 2^20 floats of random bits, and all middles between two FP8 numbers."""
    coarse = (torch.arange(2**16, dtype=torch.int64) << 16).to(torch.int32)
    random = torch.randint(-(2**31), 2**31, (2**20,), generator=stream(0, "bits")).to(torch.int32)
    eighths = torch.arange(0, 2**8, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    eighths = eighths[eighths.isfinite()].sort().values
    middles = ((eighths[1:] + eighths[:-1]) / 2).view(torch.int32)
    bits = torch.cat([part + shift for part in (coarse, middles) for shift in (-1, 0, 1)])
    return torch.cat([bits, random]).view(torch.float32)


@pytest.mark.parametrize("step", [RoundingStep("bf16"), RoundingStep("fp8_e4m3")], ids=["bf16", "fp8"])
def test_a_format_without_a_scale_has_torchs_bits(step, floats):
    """Every float rounds to what torch rounds it to: subnormals, signed zeros, ties, infinities, NaN."""
    assert same_bits(compiled.rounded(floats, (step,)), rounded.rounded(floats, (step,)))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8"])
def test_a_scaled_format_has_torchs_bits(fmt, floats):
    """One scale a number takes every finite float to +- its format's largest; rows of like magnitudes use all levels.

    A scale may be 0, subnormal or infinite; NaN is kept to itself in torch and here.
    """
    alone = RoundingStep(fmt, "token")
    assert same_bits(compiled.rounded(floats[:, None], (alone,)), rounded.rounded(floats[:, None], (alone,)))
    ordered = floats[floats.isfinite()].sort().values[: 2**20].view(-1, 64)
    near = torch.rand(2**14, 64, generator=stream(1, "near")) * 2 - 1
    levels = torch.arange(-254, 255) / 254  # INT8's levels and all middles between them, where the scale is exact
    for rows in (ordered, near, ordered * near, levels[None] * 127, floats[: 2**18].view(-1, 64)):
        for step in (alone, RoundingStep(fmt, "block", 24)):
            assert same_bits(compiled.rounded(rows, (step,)), rounded.rounded(rows, (step,)))


@given(st.integers(0, 2**16), st.integers(1, 40), st.integers(1, 45), st.sampled_from(["fp8_e4m3", "int8"]))
def test_rows_of_any_width_and_block_have_torchs_bits(seed, width, block, fmt):
    """Blocks start at a row's first number, the last one is what is left, at every width; steps follow each other."""
    x = torch.randn(3, width, generator=stream(seed, "rows", width)) * 10
    steps = (RoundingStep("bf16"), RoundingStep(fmt, "block", block), RoundingStep("fp8_e4m3"))
    for few in (steps[:1], steps[1:2], steps, steps[::-1]):
        assert same_bits(compiled.rounded(x, few), rounded.rounded(x, few))


@pytest.mark.parametrize("name", KNOWN)
def test_a_whole_pass_rounds_as_the_hooks_do(name):
    """Generation and prefill in whole passes alone give the bits of operators and hooks: tokens, log-probs, routes.

    So do the router inputs and logits that are recorded. What the defects do is felt: the exact engine's bits differ.
    """
    prompts = worlds.prompts(4)
    whole, operators, exact = (engine("qwen3", kernels, *KNOWN[name]) for kernels in (WHOLE, OPERATORS, OPERATORS))
    exact.defects = ()
    rollouts = whole.generate(prompts, SAMPLING)
    assert equal(rollouts, operators.generate(prompts, SAMPLING))
    assert not equal(rollouts, exact.generate(prompts, SAMPLING))
    again = prefilled(whole, rollouts, seed=3)
    assert equal(again, prefilled(operators, rollouts, seed=3))
    assert not equal(again, prefilled(exact, rollouts, seed=3))


@pytest.mark.parametrize("name", MODELS)
def test_every_site_of_every_convention_is_rounded(name):
    """bf16 at all inputs and outputs, FP8 at the large ones, both caches and router noise: the operators' bits.

    Shared experts, their gates, dense layers, all kinds of norms of queries and keys, tied heads.
    """
    defects = (
        ActivationPrecision(format="bf16"),
        ActivationPrecision(),
        KVPrecision(format="int8", scale="token"),
        KVPrecision(),
    )
    prompts, few = worlds.prompts(3), replace(SAMPLING, max_tokens=3, num_responses=1)
    has_passes = MODELS[name].head_dim % 8 == 0
    for own in ((*defects, RouterNoise(std=0.2)), defects[:2]):
        rollouts = engine(name, WHOLE if has_passes else COMPILED, *own).generate(prompts, few)
        assert equal(rollouts, engine(name, OPERATORS, *own).generate(prompts, few))


def test_a_pass_without_a_cache_rounds_keys_and_values_too():
    """A pass that caches nothing gives the operators' logits, its keys and values rounded as for a cache."""
    tokens_BS = torch.randint(0, worlds.VOCABULARY, (3, 9), generator=stream(1, "tokens"))
    results = []
    for kernels, defects in ((COMPILED, STRESS), (OPERATORS, STRESS), (OPERATORS, STRESS[:2])):
        made = engine("qwen3", kernels, *defects)
        with torch.no_grad():
            results.append(made.model(tokens_BS, numerics=made.numerics(0)))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_a_whole_pass_does_not_know_goes_to_the_operators(name):
    """Scales that depend on the batch, fp16 and orders of summation are never computed by a whole pass."""
    with pytest.raises(NotImplementedError, match="an operator was asked"):
        engine("qwen3", WHOLE, *UNKNOWN[name]).generate(worlds.prompts(2), SAMPLING)
    rollouts, same = (
        engine("qwen3", kernels, *UNKNOWN[name]).generate(worlds.prompts(2), SAMPLING)
        for kernels in (COMPILED, OPERATORS)
    )
    assert equal(rollouts, same)


def test_a_trainer_in_bf16_goes_to_the_operators():
    """A precision of training that rounds weights inside a pass is not known as data, alone or under a defect."""
    for defects in ((), STRESS):
        with pytest.raises(NotImplementedError, match="an operator was asked"):
            engine("qwen3", WHOLE, *defects, numerics=of_precision("bf16")).generate(worlds.prompts(2), SAMPLING)


def test_fp16_overflow_is_an_error_with_compiled_kernels():
    """Activations beyond fp16 stop the run with the magnitude that came, as with torch's operators."""
    made = engine("qwen3", COMPILED, ActivationPrecision(format="fp16"))
    with torch.no_grad():
        made.model.layers[0].attention_norm.mul_(1e6)
    with pytest.raises(OverflowError, match="fp16: expected magnitudes of at most 65504"):
        made.generate(worlds.prompts(2), SAMPLING)


@pytest.mark.parametrize("hook", ["activation", "weight", "product", "output", "kv"])
def test_a_class_that_overrides_a_hook_states_nothing_of_itself(hook):
    """Numerics that override a hook are known as data only where they say so, also beside others and below them."""
    generator = stream(0, "hooks")
    for base in (
        Numerics,
        *(type(defect.numerics(generator)) for defect in (*STRESS[1:], RouterNoise(), LogitNoise())),
    ):
        own = type("Own", (base,), {hook: getattr(Numerics, hook), "touch": True})
        setattr(own, hook, lambda self, *arguments: arguments[0])
        made = own.__new__(own)
        made.steps = Rounding()
        assert made.rounding() is None
        assert compose([made, ActivationPrecision().numerics(generator)]).rounding() is None


def test_numerics_state_what_they_round():
    """A chain's data are those of its parts in order; noise on router logits is asked for, noise on logits is not."""
    generator = stream(0, "hooks")
    parts = [defect.numerics(generator) for defect in (ActivationPrecision(format="int8"), KVPrecision(), LogitNoise())]
    stated = Rounding(inputs=(RoundingStep("int8", "token"),), kv=(RoundingStep("fp8_e4m3"),))
    assert compose(parts).rounding() == stated
    noise = RouterNoise().numerics(generator)
    for noisy in ([*parts, noise], [noise, *parts], [*parts[:1], noise, *parts[1:]]):
        assert compose(noisy).rounding() == replace(stated, asks_router=True)
    twice = compose([*parts[:1], *parts, ActivationPrecision(format="bf16").numerics(generator)]).rounding()
    bf16 = (RoundingStep("bf16"),)
    assert twice == Rounding((*stated.inputs * 2, *bf16), bf16, bf16, stated.kv)
    assert EXACT.rounding() == Rounding()


def test_noise_that_is_stated_is_the_hook_s():
    """`router_noise` has the numbers that the hook adds layer by layer; of two noises, or none, it draws nothing."""
    made = [RouterNoise(std=0.3).numerics(stream(0, "noise")) for _ in range(3)]
    stated = compose([ActivationPrecision().numerics(stream(0, "other")), made[0]]).router_noise(2, 3, 5)
    added = [made[1].router_logits(layer, torch.zeros(3, 5)) for layer in range(2)]
    assert stated is not None and torch.equal(stated, torch.stack(added))
    assert compose(made[:2]).router_noise(2, 3, 5) is None and EXACT.router_noise(2, 3, 5) is None
    assert torch.equal(made[0].router_logits(0, torch.zeros(3, 5)), made[1].router_logits(0, torch.zeros(3, 5)))
