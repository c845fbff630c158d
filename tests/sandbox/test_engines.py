"""The defects do what their dials say, to the tensors and places they name and to no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.engines import (
    ActivationPrecision,
    EngineConfig,
    KVPrecision,
    LogitNoise,
    ReductionOrder,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from sandbox.engines.formats import (
    FP8_MAX,
    amax_of_blocks,
    amax_of_rows,
    amax_of_tensor,
    round_bf16,
    round_fp8_e4m3,
    round_fp8_saturating,
    round_fp16,
    round_int8,
    round_scaled,
)
from sandbox.engines.reduction_order import num_splits
from sandbox.model import MoE
from sandbox.numerics import EXACT, compose
from tests.contracts import worlds
from theory.contracts import Sampling
from theory.divergences import discrepancy_metrics, entropy
from theory.exact.tree import PrefixTree
from theory.routing.passes import PassRouting
from theory.streams import stream

FLOATS = st.floats(-1e4, 1e4, width=32)


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_fp8_error_is_bounded_by_its_format(values):
    """|round(x) - x| <= 2^-4 |x| + half the smallest subnormal step, scaled: e4m3 has 3 mantissa bits."""
    x = torch.tensor(values)
    amax = x.abs().amax()
    scale = (amax / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    error = (round_fp8_e4m3(x, amax) - x).abs()
    # Half of 2^-9, the step of e4m3's subnormals; 1e-6 |x| for the float32 products with the scale.
    assert (error <= x.abs() * (2**-4 + 1e-6) + scale * 2**-10).all()


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_rounding_is_idempotent_and_odd(values):
    """Rounding twice is rounding once, and round(-x) = -round(x), in both formats."""
    x = torch.tensor(values)
    assert torch.equal(round_bf16(round_bf16(x)), round_bf16(x))
    assert torch.equal(round_bf16(-x), -round_bf16(x))
    amax = x.abs().amax()
    assert torch.equal(round_fp8_e4m3(-x, amax), -round_fp8_e4m3(x, amax))


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_int8_error_is_half_a_step(values):
    """|round(x) - x| <= amax / 254, the levels are symmetric, and 255 of them are used at most."""
    x = torch.tensor(values)
    amax = x.abs().amax()
    rounded = round_int8(x, amax)
    # A relative 1e-6 for the float32 quotient and product; 1e-37: subnormal amplitudes are rounded to 0.
    assert ((rounded - x).abs() <= amax / 254 * (1 + 1e-4) + amax * 1e-6 + 1e-37).all()
    assert torch.equal(round_int8(-x, amax), -rounded)


@given(st.lists(FLOATS, min_size=1, max_size=16))
def test_fp16_error_is_bounded_by_its_format(values):
    """|round(x) - x| <= 2^-11 |x|, or half of 2^-24 where fp16 is subnormal."""
    x = torch.tensor(values)
    assert ((round_fp16(x) - x).abs() <= x.abs() * 2**-11 + 2**-25).all()


def test_fp16_overflow_is_an_error():
    """A magnitude beyond fp16 is named, not turned into an infinity that a sampler would meet later."""
    assert round_fp16(torch.tensor([65504.0])).item() == 65504
    with pytest.raises(OverflowError, match="at most 65504, got 70000"):
        round_fp16(torch.tensor([1.0, -7e4]))


def test_fp8_at_scale_one_saturates_and_flushes():
    """Without a scale 448 is the largest magnitude and 2^-9 the smallest step, as in a cache with k_scale = 1."""
    x = torch.tensor([1e3, -1e3, 448.0, 2**-9, 2**-10, 2**-11, 17.0, 19.0])
    expected = torch.tensor([448.0, -448.0, 448.0, 2**-9, 0.0, 0.0, 16.0, 20.0])
    assert torch.equal(round_fp8_saturating(x), expected)


def test_smaller_scales_keep_smaller_values():
    """A scale a row keeps small rows that a scale a tensor flushes to zero, and a scale a block small blocks."""
    x = torch.tensor([[1000.0, 500.0], [1e-3, 2e-3]])
    assert torch.equal(round_scaled(x, "fp8_e4m3", amax_of_tensor(x))[1], torch.zeros(2))
    assert torch.allclose(round_scaled(x, "fp8_e4m3", amax_of_rows(x))[1], x[1], rtol=2**-4)
    y = torch.tensor([[1000.0, 1e-3], [500.0, 2e-3]])
    assert torch.equal(round_scaled(y, "int8", amax_of_rows(y))[:, 1], torch.zeros(2))
    assert torch.allclose(round_scaled(y, "int8", amax_of_blocks(y, 2, 1))[:, 1], y[:, 1], rtol=1e-2)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))
def test_blocks_tile_the_matrix(R, C, num_rows, num_columns):
    """Every element's amax is that of its block, edge blocks included: the definition, entry by entry."""
    x = torch.randn(2, R, C, generator=stream(R * 100 + C, "blocks"))
    amax = amax_of_blocks(x, num_rows, num_columns)
    for r in range(R):
        for c in range(C):
            top, left = r - r % num_rows, c - c % num_columns
            block = x[:, top : top + num_rows, left : left + num_columns]
            assert torch.equal(amax[:, r, c], block.abs().amax(dim=(1, 2)))


def test_one_block_is_a_tensor_and_a_block_a_row_a_channel():
    """A block as large as the matrix is a scale a tensor; one of a single row and all columns a scale a channel."""
    x = torch.randn(5, 12, generator=stream(0, "blocks"))
    assert torch.equal(amax_of_blocks(x, 128, 128), amax_of_tensor(x).expand(5, 12))
    assert torch.equal(amax_of_blocks(x, 1, 128), amax_of_rows(x).expand(5, 12))


@pytest.mark.parametrize("gate", ["qwen3", "mixtral"])
def test_quantised_weights_leave_router_head_norms_and_embedding(gate):
    """FP8 and INT8 round the matrices of attention and experts alone; bf16 rounds every weight."""
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", torch.linspace(0.1, 0.7, 8))
    for name, tensor in [*worlds.training_engine(worlds.model(gate=gate)).named_tensors(), bias]:
        is_large = "_proj" in name or name.endswith(("w1.weight", "w2.weight", "w3.weight"))
        for precision in (WeightPrecision(), WeightPrecision(format="int8"), WeightPrecision(scale="block")):
            assert torch.equal(precision.weight(name, tensor), tensor) == (not is_large), name
        is_ones = bool((tensor == 1).all())
        assert torch.equal(WeightPrecision(format="bf16").weight(name, tensor), tensor) == is_ones, name


def test_router_noise_has_the_dialled_size():
    """The noise on 10^5 logits has mean 0 and standard deviation `std`, within 4 standard errors."""
    n, std = 100_000, 0.25
    noise = RouterNoise(std=std).numerics(stream(0, "noise")).router_logits(0, torch.zeros(n // 10, 10))
    assert abs(noise.mean().item()) <= 4 * std / n**0.5
    assert abs(noise.std().item() - std) <= 4 * std / (2 * n) ** 0.5


def discrepancy(*defects: Defect, versions: int = 1) -> float:
    """k3 KL(mu || old) of an engine with these defects, on 16 responses of the contract model."""
    *older, weights = [worlds.model()] if versions == 1 else trained(versions)
    engine = worlds.SandboxEngine(weights.config, defects, stop_token=worlds.STOP)
    for version, model in enumerate([*older, weights]):
        engine.load_model(model, version)
    rollouts = engine.generate(worlds.prompts(4), Sampling(max_tokens=16, num_responses=4, seed=9))
    scores = worlds.training_engine(weights).score(rollouts, PassRouting("natural"))
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


LADDERS: dict[str, list[Defect]] = {
    "router noise": [RouterNoise(std=std) for std in (0.01, 0.1, 1.0)],
    "logit noise": [LogitNoise(std=std) for std in (0.01, 0.1, 1.0)],
    "weights": [WeightPrecision(format=f) for f in ("fp16", "bf16", "fp8_e4m3")],
    "weights, block": [WeightPrecision(scale="block", format=f) for f in ("int8", "fp8_e4m3")],
    "activations": [ActivationPrecision(format=f) for f in ("fp16", "bf16", "fp8_e4m3")],
    "cache": [KVPrecision(format="bf16"), KVPrecision(scale="token"), KVPrecision(scale="unit")],
    "reduction": [ReductionOrder(partials="fp32"), ReductionOrder(partials="bf16")],
    "processed temperature": [SamplingMismatch(temperature=t, score="processed") for t in (0.9, 0.7, 0.4)],
    "processed top-p": [SamplingMismatch(top_p=p, score="processed") for p in (0.99, 0.9, 0.5)],
    "processed top-k": [SamplingMismatch(top_k=k, score="processed") for k in (12, 6, 2)],
    "processed min-p": [SamplingMismatch(min_p=p, score="processed") for p in (0.02, 0.1, 0.5)],
}


@pytest.mark.parametrize("name", LADDERS)
def test_dials_turn_the_discrepancy(name):
    """More noise, fewer bits and more truncation stand further from the training engine."""
    values = [discrepancy(defect) for defect in LADDERS[name]]
    assert values == sorted(values)
    assert 0 < values[0] < values[-1]


def test_staler_weights_stand_further_away():
    """Each version behind adds to the discrepancy; a switch to the newest weights takes from it."""
    assert discrepancy(StaleWeights(versions=0), versions=4) == 0
    values = [discrepancy(StaleWeights(versions=k), versions=4) for k in (1, 2, 3)]
    assert values == sorted(values)
    assert values[0] > 0
    halves = [discrepancy(StaleWeights(versions=3, switch_at=share), versions=4) for share in (0.25, 0.5, 1.0)]
    assert halves == sorted(halves)
    assert 0 < halves[0] < halves[-1]


def test_logit_noise_costs_what_its_docstring_says():
    """The mean of KL(mu || old) under noise of size std is std^2 (1 - sum p^2) / 2, to order std^3 and within 4 s.e."""
    logits_V = torch.randn(13, generator=stream(0, "logits"), dtype=torch.float64)
    std, n = 0.05, 20_000
    noisy_nV = LogitNoise(std=std).numerics(stream(0, "noise")).logits(logits_V.expand(n, -1))
    kl_n = (noisy_nV.softmax(-1) * (noisy_nV.log_softmax(-1) - logits_V.log_softmax(-1))).sum(-1)
    expected = std**2 * (1 - (logits_V.softmax(-1) ** 2).sum()) / 2
    assert abs(kl_n.mean() - expected) <= 4 * kl_n.std() / n**0.5 + std**3


def test_logit_noise_leaves_routes_alone():
    """Experts of the tokens that both engines were given, the prompts, are the exact engine's."""
    weights, sampling = worlds.model(), Sampling(max_tokens=1, num_responses=1)
    noisy, exact = (worlds.SandboxEngine(weights.config, d) for d in ((LogitNoise(std=1.0),), ()))
    for engine in (noisy, exact):
        engine.load_model(weights, version=0)
    a, b = (engine.generate(worlds.prompts(), sampling) for engine in (noisy, exact))
    assert torch.equal(a.experts.experts, b.experts.experts)


def test_a_defects_draws_are_its_own():
    """Adding a defect leaves the noise of the others what it was: each draws from a stream of its own."""
    weights, logits = worlds.model(), torch.zeros(5, 8)
    engines = [(RouterNoise(),), (LogitNoise(), RouterNoise()), (RouterNoise(), RouterNoise())]
    alone, beside, twice = (worlds.SandboxEngine(weights.config, d).numerics(3) for d in engines)
    beside.logits(torch.zeros(4, 13))
    first = alone.router_logits(0, logits)
    assert torch.equal(beside.router_logits(0, logits), first)
    second = twice.router_logits(0, logits)
    assert not torch.equal(second, first) and not torch.equal(second, 2 * first)


# ---- order of summation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(1, 8), (16, 8), (17, 4), (48, 2), (64, 2), (80, 1), (128, 1), (129, 8), (144, 8), (256, 1)],
)
def test_the_last_wave_of_tiles_is_split(num_rows, expected):
    """8 units, tiles of 16 rows: units // (tiles mod units) parts, and none where the last wave is full."""
    assert num_splits(num_rows, units=8, tile_rows=16) == expected
    assert num_splits(num_rows, units=1, tile_rows=16) == 1


@given(st.integers(9, 70), st.integers(2, 8), st.sampled_from(["fp32", "bf16"]))
def test_parts_sum_to_the_product(width, units, partials):
    """Split products cover every inner index once, and differ from the exact ones by rounding alone."""
    x, weight = (torch.randn(3, width, generator=stream(width, name), dtype=torch.float64) for name in "xw")
    spans = []

    def part(start, stop):
        spans.append((start, stop))
        return x[:, start:stop] @ weight[:, start:stop].T

    total = ReductionOrder(units=units, partials=partials).order().product(part, width, 3, "o")
    assert [i for start, stop in spans for i in range(start, stop)] == list(range(width))
    assert len(spans) <= units
    assert all(stop - start >= 8 for start, stop in spans[:-1])
    # bf16 rounds each of at most 8 partial sums and totals by 2^-9 of it.
    bound = x.abs() @ weight.abs().T * (1e-14 if partials == "fp32" else 16 * 2**-9)
    assert ((total - x @ weight.T).abs() <= bound).all()


def test_only_large_products_are_split():
    """Router, shared gate and vocabulary keep one order, and so does everything with one unit."""
    x = torch.randn(2, 64, generator=stream(0, "x"))

    def splits(site, units=8):
        spans = []
        ReductionOrder(units=units).order().product(lambda a, b: spans.append(a) or x[:, a:b].sum(1), 64, 2, site)
        return len(spans)

    assert [splits(site) for site in ("qkv", "o", "gate_up", "down")] == [8, 8, 8, 8]
    assert [splits(site) for site in ("router", "shared_gate", "head")] == [1, 1, 1]
    assert splits("qkv", units=1) == 1
    assert ReductionOrder(units=1).order() is EXACT


def test_nested_orders_still_cover_the_sum():
    """Two orders composed split each other's parts: the sum is the same to rounding, over every index once."""
    both = compose([ReductionOrder(units=2).order(), ReductionOrder(units=4).order()])
    seen = []
    both.product(lambda a, b: seen.extend(range(a, b)) or torch.zeros(1, 1), 64, 1, "o")
    assert seen == list(range(64))


# ---- stale weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
def test_stale_engines_say_the_version_they_sample_from(k, expected):
    """After hand-over n the engine samples with, and says, version max(0, n - k), to the bits of an exact engine."""
    models = trained(4)
    engine = worlds.SandboxEngine(models[0].config, (StaleWeights(versions=k),), stop_token=worlds.STOP)
    sampling = Sampling(max_tokens=4, num_responses=2, seed=1)
    for version, model in enumerate(models):
        engine.load_model(model, version)
        rollouts = engine.generate(worlds.prompts(2), sampling)
        assert {r.version for r in rollouts.responses} == {expected[version]}
        exact = worlds.rollout_engine("exact", models[expected[version]]).generate(worlds.prompts(2), sampling)
        for a, b in zip(rollouts.responses, exact.responses, strict=True):
            assert torch.equal(a.logp_mu, b.logp_mu) and torch.equal(a.tokens, b.tokens)


@pytest.mark.parametrize("cache", ["kept", "recomputed"])
def test_a_switch_changes_what_comes_after_it(cache):
    """Tokens before the switch have the old weights' bits; after it, with its own cache, the newest weights'."""
    models, T, switch = trained(2), 12, 5
    engine = worlds.SandboxEngine(
        models[0].config, (StaleWeights(versions=1, switch_at=switch / T, cache=cache),), stop_token=worlds.STOP
    )
    for version, model in enumerate(models):
        engine.load_model(model, version)
    rollouts = engine.generate(worlds.prompts(6), Sampling(max_tokens=T, num_responses=4, seed=2))
    assert {r.version for r in rollouts.responses} == {0}
    old, new = (worlds.training_engine(m).score(rollouts, PassRouting("natural")).logp_BT for m in models)
    batch = rollouts.padded()
    is_late_T = torch.arange(T) >= switch
    early_BT, late_BT = batch.is_response_BT & ~is_late_T, batch.is_response_BT & is_late_T
    assert late_BT.sum() > 50
    assert torch.equal(batch.logp_mu_BT[early_BT], old[early_BT])
    assert not (batch.logp_mu_BT == new)[early_BT].any()
    assert torch.equal(batch.logp_mu_BT[late_BT], new[late_BT]) == (cache == "recomputed")
    if cache == "kept":
        # Neither model alone; closer to the new one, whose weights compute these tokens.
        distance_old, distance_new = ((batch.logp_mu_BT - logp)[late_BT].abs().mean() for logp in (old, new))
        assert 0 < distance_new < distance_old


def test_a_restored_engine_remembers_its_weights():
    """state_tensors, then the newest weights: the engine goes on from the same version with the same bits."""
    models, sampling = trained(4), Sampling(max_tokens=6, num_responses=2)
    defects = (WeightPrecision(), StaleWeights(versions=2, switch_at=0.5))
    first, second = (worlds.SandboxEngine(models[0].config, defects) for _ in range(2))
    for version, model in enumerate(models[:3]):
        first.load_model(model, version)
    second.load_state_tensors({**first.state_tensors(), "model.norm": torch.ones(3)})
    second.load_model(models[2], version=2)
    for engine in (first, second):
        engine.load_model(models[3], version=3)
    a, b = (engine.generate(worlds.prompts(2), sampling) for engine in (first, second))
    assert {r.version for r in b.responses} == {1}
    assert all(torch.equal(x.logp_mu, y.logp_mu) for x, y in zip(a.responses, b.responses, strict=True))
    small = worlds.SandboxEngine(worlds.model_config(num_experts=4), defects)
    with pytest.raises(ValueError, match=r"stale weight .* of version \d is \(8, .*expected \(4, "):
        small.load_state_tensors(first.state_tensors())


def test_versions_do_not_go_back():
    """Weights older than the newest are refused by an engine that orders them."""
    weights = worlds.model()
    engine = worlds.SandboxEngine(weights.config, (StaleWeights(),))
    engine.load_model(weights, version=5)
    with pytest.raises(ValueError, match="at least 5, got 4"):
        engine.load_model(weights, version=4)


# ---- sampling --------------------------------------------------------------------------------------------------------

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
    """What is drawn from is the tempered distribution, renormalised over the kept tokens; ties go to lower ids."""
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
    with pytest.raises(ValueError, match=f"one scored policy, got {type(defect).__name__}"):
        engine.enumerate(worlds.prompts(1)[0], PrefixTree(worlds.VOCABULARY, 1))


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_engine_config_names_the_defect_it_does_not_know():
    """An unknown kind is refused."""
    with pytest.raises(ValueError, match="router_jitter"):
        EngineConfig.model_validate({"defects": [{"kind": "router_jitter"}]})


def test_engine_config_takes_one_history_and_one_sampler():
    """Two stale_weights or two samplers have no meaning together."""
    for defect in (StaleWeights(), SamplingMismatch()):
        with pytest.raises(ValueError, match=f"expected at most 1 {defect.kind}, got 2"):
            EngineConfig(defects=(defect, defect))


def test_an_int8_cache_needs_a_scale():
    """Integers without a scale would keep no fraction of a key."""
    with pytest.raises(ValueError, match="expected token or tensor with int8"):
        KVPrecision(format="int8")
