"""Laws of the prefix cache: with it every call gives the bits that it gives without it, wherever a pass repeats itself;
what it remembers are the routes under which tokens were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sandbox.engines import LogitNoise, RouterNoise, StaleWeights
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.engines.prefix_cache import CachedPrefix, PrefixCache
from sandbox.model import MoE
from sandbox.model.checkpoint import to_hf
from tests.contracts import worlds
from tests.sandbox.engines.turns_world import VOCABULARY, Counting, Talk, Watched, assert_same, model, prompts
from theory.contracts import Draw, Prompt, Rollouts, Sampling
from theory.streams import stream
from theory.turns import roll_out

SAMPLING = Sampling(max_tokens=14, num_responses=2, seed=3, num_features=3)
REPEATING = ["exact", "activations-fp8", "cache-fp8", "processed-scores"]
"""Engines in which a token has the same bits in any batch, in prefill and in decoding: what was computed can stand for
what would be (the other formats of the contract suite repeat themselves for the same reason)."""


def engine_of(defects: Sequence[Defect], weights: MoE, prefixes: PrefixCache | None) -> SandboxEngine:
    """An engine with these defects; stale weights have a set before them to sample from."""
    engine = SandboxEngine(weights.config, defects, (worlds.STOP,), prefixes=prefixes)
    if any(isinstance(defect, StaleWeights) for defect in defects):
        engine.load_weights(to_hf(model(seed=1)), version=0)
    engine.load_model(weights, version=1)
    return engine


def talks(
    engine: SandboxEngine, between: Sequence[MoE] = (), sampling: Sampling = SAMPLING
) -> tuple[Rollouts, Watched]:
    """Conversations of up to three turns, and what each of the engine's calls gave."""
    watched = Watched(engine, [to_hf(weights) for weights in between])
    return roll_out(watched, Talk(), prompts(), sampling, max_turns=3), watched


def equal_with_and_without(
    defects: Sequence[Defect], weights: MoE, cache: Counting, **options
) -> tuple[Rollouts, Watched]:
    """Merged rollouts and each call's own, which are the same with the cache and without it."""
    (a, first), (b, second) = (talks(engine_of(defects, weights, c), **options) for c in (None, cache))
    assert_same(a, b)
    assert len(first.calls) == len(second.calls) == 3
    for x, y in zip(first.calls, second.calls, strict=True):
        assert_same(x, y)
    return a, first


@pytest.mark.parametrize("name", [*REPEATING, "stale"])
def test_the_cache_changes_no_bit(name: str) -> None:
    """Tokens, log-probs, routes, features of every call, and merged, are those without the cache; and every later
    turn computed nothing but the last token and what came back."""
    defects = (StaleWeights(versions=1),) if name == "stale" else worlds.DEFECTS[name]
    assert not any(defect.breaks & {"batch", "prefill"} for defect in defects)
    cache = Counting()
    rollouts, watched = equal_with_and_without(defects, model(), cache)
    # Ragged, with ends in every turn, and some cut by the budget: what is said here is said of these.
    num_turns = [int((r.tokens[r.is_response] == worlds.STOP).sum()) for r in rollouts.responses]
    assert set(num_turns) >= {1, 2, 3} and {r.finish for r in rollouts.responses} == {"stop", "length"}
    asked = [len(r.prompt.tokens) for call in watched.calls[1:] for r in call.responses]
    later = cache.found[len(prompts()) :]
    assert [length for _, length in later] == asked
    assert all(1 <= length - hit <= 4 for hit, length in later)


@pytest.mark.parametrize("dense_layers", [(1,), (0, 1, 2)])
def test_layers_without_routers_have_no_rows_to_keep(dense_layers: tuple[int, ...]) -> None:
    """The law holds where some layers, or all, are dense."""
    equal_with_and_without((), model(dense_layers=dense_layers), Counting())


def test_weights_that_switch_leave_nothing_behind() -> None:
    """Where the newest weights continue in mid-response, nothing is kept: no later turn finds keys of two sets."""
    cache = Counting()
    _, watched = equal_with_and_without((StaleWeights(versions=1, switch_at=0.5),), model(), cache)
    second = cache.found[len(prompts()) : len(prompts()) + len(watched.calls[1])]
    assert second and all(hit == 0 for hit, _ in second)


@pytest.mark.parametrize("version", ["same", "other"])
def test_other_weights_reuse_nothing(version: str) -> None:
    """Weights handed over between two turns, the same ones too, empty the cache; a response's version is its oldest."""
    between, cache = [model(seed=2 if version == "other" else 0)], Counting()
    rollouts, watched = equal_with_and_without((), model(), cache, between=between)
    num = len(prompts())
    second = cache.found[num : num + len(watched.calls[1])]
    # Prompts of one group share their beginning, and are prefilled in one pass: nothing of them was kept before it.
    assert all(hit == 0 for hit, _ in second)
    assert {r.version for r in rollouts.responses} == {1}


@pytest.mark.parametrize("name", ["exact", "reduction-order", "router-noise", "fp8-and-noise"])
def test_routes_are_remembered_not_made_again(name: str) -> None:
    """With the cache the last turn's own record goes back to the first prompt with the routes under which each token
    was sampled, in every engine; without it noisy routers find others."""
    weights = model()
    for cache in (PrefixCache(), None):
        rollouts, watched = talks(engine_of(worlds.DEFECTS[name], weights, cache))
        is_same = []
        for call in watched.calls[1:]:
            for i, response in enumerate(call.responses):
                before = response.prompt.tokens
                said = before[: max(s for s, token in enumerate(before) if token == worlds.STOP)]
                found = [b for b, r in enumerate(rollouts.responses) if _begins(r.prompt.tokens, r.tokens, said)]
                own = call.experts.rows(i)
                assert bool((own >= 0).all())
                if len(found) == 1:  # what began alike shares what the first of them computed
                    is_same.append(torch.equal(own, rollouts.experts.rows(found[0])[: len(own)]))
        assert len(is_same) > 3
        assert all(is_same) == (cache is not None or name not in ("router-noise", "fp8-and-noise"))


def _begins(prompt: tuple[int, ...], tokens: torch.Tensor, said: tuple[int, ...]) -> bool:
    return (*prompt, *tokens.tolist())[: len(said)] == said


def test_noise_on_logits_is_the_same_policy() -> None:
    """Noise that touches neither keys nor routes is drawn anew after a cached prompt: 3,000 first tokens are spread as
    without the cache, each token's share within 4 standard errors of the difference."""
    defects, weights, n = (LogitNoise(std=0.3),), model(), 3000
    shares = []
    for cache in (PrefixCache(), None):
        engine = engine_of(defects, weights, cache)
        prompt = prompts(2)[1]
        engine.generate([prompt], Sampling(max_tokens=2, seed=1))
        again = engine.generate([prompt] * n, Sampling(max_tokens=1, seed=3 if cache is None else 4))
        tokens = torch.stack([r.tokens[0] for r in again.responses])
        shares.append(torch.bincount(tokens, minlength=VOCABULARY) / n)
    p = (shares[0] + shares[1]) / 2
    assert bool(((shares[0] - shares[1]).abs() <= 4 * (2 * p * (1 - p) / n).sqrt()).all())


def test_a_noisy_engine_goes_on_from_what_it_computed() -> None:
    """Router noise that is drawn once: two calls on a cached prompt have equal routes before its last token, where two
    calls without the cache have not."""
    prompt, sampling = prompts(2)[1], Sampling(max_tokens=3, seed=1)
    for cache in (PrefixCache(), None):
        engine = engine_of((RouterNoise(std=2.0),), model(), cache)
        first, again = (engine.generate([prompt], replace(sampling, seed=seed)).experts for seed in (1, 2))
        rows = len(prompt.tokens) - 1
        assert torch.equal(first.rows(0)[:rows], again.rows(0)[:rows]) == (cache is not None)


def test_prompts_that_share_a_part_in_tight_positions() -> None:
    """Misses, prompts found in part and prompts found whole, in one call whose passes must be split so that none
    pads beyond the model's last position: all bits are those of an engine that computes everything."""
    config = replace(worlds.model_config(), max_positions=24)
    weights = MoE(config, stream(3, "tight"))
    draws = stream(4, "tight")
    base = tuple(torch.randint(2, VOCABULARY, (20,), generator=draws).tolist())
    seen = [Prompt("long", base, ""), Prompt("short", base[:4], ""), Prompt("other", (base[0] % 11 + 2, 5, 7), "")]
    cut = [Prompt(str(n), base[:n] + (12, 3)[: max(0, 20 - n)], "") for n in (20, 18, 12, 5, 1)]
    asked = [*cut, Prompt("new", (base[0] % 10 + 3, 4, 4, 4), ""), Prompt("far", base[:2] + base[:17], "")]
    sampling = Sampling(max_tokens=4, num_responses=2, seed=1, num_features=2)
    cache = Counting()
    engines = [SandboxEngine(config, (), (worlds.STOP,), prefixes=c) for c in (None, cache)]
    for engine in engines:
        engine.load_model(weights, version=0)
        engine.generate(seen, sampling)
    cache.found.clear()
    assert_same(*(engine.generate(asked, sampling) for engine in engines))
    hits = [hit for hit, _ in cache.found]
    assert hits[0] == 19 and 0 in hits and len(set(hits)) >= 4


def test_a_full_cache_forgets_and_nothing_changes() -> None:
    """With room for a few sequences the bits are the same, and the memory stays within its bound."""
    size = Counting()
    talks(engine_of((), model(), size))
    cache = Counting(size.nbytes // 4)
    equal_with_and_without((), model(), cache)
    assert 0 < cache.nbytes <= size.nbytes // 4 and len(cache) < len(size)
    later = cache.found[len(prompts()) :]
    assert 0 < sum(hit > 0 for hit, _ in later) < len(later)


def computed(tokens: Sequence[int]) -> CachedPrefix:
    """A stand-in for an engine's computation: keys name the token, values the prefix, routes both."""
    ids = torch.tensor(tokens)
    k = ids.float().expand(2, 1, -1)[..., None].clone()
    return CachedPrefix(k, ids.cumsum(0).float().expand(2, 1, -1)[..., None].clone(), ids[:, None, None].to(torch.int8))


sequences = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@given(steps=st.lists(st.tuples(st.booleans(), sequences), max_size=30), room=st.integers(0, 20))
def test_the_least_recently_used_goes_first(steps: list[tuple[bool, tuple[int, ...]]], room: int) -> None:
    """Against a plain list in order of use: a find gives the longest shared beginning, but for the prompt's last token;
    a new sequence takes the place of its own beginning; while the sum exceeds the bound, the longest unused goes."""
    each = computed((0,)).nbytes
    cache, used = PrefixCache(room * each), []
    for is_find, tokens in steps:
        if is_find:
            found, wanted = cache.find(tokens), tokens[:-1]
            shared = [
                next((i for i, (a, b) in enumerate(zip(u, wanted, strict=False)) if a != b), min(len(u), len(wanted)))
                for u in used
            ]
            longest = max(shared, default=0)
            assert (0 if found is None else found.length) == longest
            if found is not None:
                assert all(
                    torch.equal(x, y)
                    for x, y in zip(vars(found).values(), vars(computed(tokens[:longest])).values(), strict=True)
                )
                # Of equally good ones either may be taken, and counts as used.
                best = next(u for u in cache._kept if u == next(reversed(cache._kept)))
                assert shared[used.index(best)] == longest
                used.remove(best)
                used.append(best)
            continue
        cache.put(tokens, computed(tokens))
        longer = next((u for u in used if u[: len(tokens)] == tokens), None)
        if longer is not None:
            used.remove(min(u for u in [longer, *used] if u[: len(tokens)] == tokens))
            used.append(next(reversed(cache._kept)))
        else:
            used = [*(u for u in used if tokens[: len(u)] != u), tokens]
        while sum(map(len, used)) > room:
            used.pop(0)
        assert list(cache._kept) == used and cache.nbytes == each * sum(map(len, used)) <= room * each
    cache.clear()
    assert len(cache) == cache.nbytes == 0 and cache.find((0, 1, 2)) is None


def test_what_is_kept_is_a_copy() -> None:
    """Writing over what was handed in changes nothing that is found later."""
    found, cache = computed((1, 2, 3)), PrefixCache()
    cache.put((1, 2, 3), found)
    for tensor in vars(found).values():
        tensor.zero_()
    assert torch.equal(cache.find((1, 2, 3, 4)).k_LhSd, computed((1, 2, 3)).k_LhSd)


def test_a_response_with_a_draw_of_its_own_is_cut_and_not_changed() -> None:
    """A shorter limit, or other company, leaves a response the beginning of what it would be, routes and all."""
    engine, asked = engine_of((), model(), None), prompts()
    whole = engine.generate(asked, Sampling(max_tokens=20, seed=1, draws=tuple(Draw(100 + b, 20) for b in range(4))))
    limits = (1, 7, 20, 12)
    draws = tuple(Draw(100 + b, limit) for b, limit in enumerate(limits))
    cut = engine.generate(asked, Sampling(max_tokens=20, seed=2, draws=draws))
    for b, (response, long) in enumerate(zip(cut.responses, whole.responses, strict=True)):
        num = min(limits[b], len(long.tokens))
        assert torch.equal(response.tokens, long.tokens[:num]) and torch.equal(response.logp_mu, long.logp_mu[:num])
        assert response.finish == ("stop" if response.tokens[-1] == worlds.STOP else "length")
        assert torch.equal(cut.experts.rows(b), whole.experts.rows(b)[: response.num_tokens - 1])
    alone = engine.generate(asked[1:2], Sampling(max_tokens=7, seed=3, draws=draws[1:2]))
    assert_same(alone, cut.select([1]))
    for wrong in (draws[:3], (Draw(1, 21), *draws[1:]), (Draw(1, 0), *draws[1:])):
        with pytest.raises(ValueError, match=r"sampling\.draws: expected 4 draws of 1 to 20 tokens, got"):
            engine.generate(asked, Sampling(max_tokens=20, draws=wrong))


def test_a_finished_row_needs_no_further_positions() -> None:
    """A long prompt with little room left and a short one with much fit a model that holds each of them alone."""
    weights = MoE(replace(worlds.model_config(), max_positions=16), stream(3, "tight"))
    engine = SandboxEngine(weights.config, ())
    engine.load_model(weights, version=0)
    asked = [Prompt("long", tuple(range(2, 13)) + (2, 3), ""), *(Prompt(str(i), (2 + i,), "") for i in range(5))]
    draws = (Draw(0, 2), *(Draw(1 + i, 14) for i in range(5)))
    rollouts = engine.generate(asked, Sampling(max_tokens=14, draws=draws))
    assert [len(r.tokens) for r in rollouts.responses] == [2, *[14] * 5]
