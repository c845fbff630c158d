"""Compiled kernels on several threads: no bit depends on their number, and a forked child has threads of its own."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sandbox.engines.buffers import PassRecorder
from sandbox.engines.engine import SandboxEngine
from sandbox.kernels import EAGER
from sandbox.kernels.compiled.build import library
from sandbox.model.kv_cache import KVCache
from tests import forks
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED, MODELS, engine, model, trainer
from tests.sandbox.engines import test_defect_chain as chain
from tests.sandbox.kernels.test_compiled_gradients import cases, gradients
from tests.sandbox.kernels.test_compiled_kernels import drawn
from theory.contracts import MiniBatch, Sampling
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.routing.replay import NaturalRouting
from theory.streams import stream

THREADS = 1, 2, 3
SAMPLING = Sampling(max_tokens=10, num_responses=8, seed=5)


@pytest.fixture(autouse=True)
def _one_thread_afterwards():
    before = torch.get_num_threads()
    yield
    library().threads = 1
    torch.set_num_threads(before)


def on_each(call) -> list:
    """The outputs of `call` on each number of threads."""
    results = []
    for number in THREADS:
        COMPILED.set_threads(number)
        results.append(call())
    return results


def all_equal(results: list[list[Tensor]]) -> bool:
    first, *others = results
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", cases())
def test_an_operator_has_the_same_bits_on_any_number_of_threads(name):
    """Value and gradient by every input are equal bit for bit on 1, 2 and 3 threads, sums over rows included."""
    function, *inputs = cases()[name]
    assert all_equal(on_each(lambda: gradients(lambda *x: function(COMPILED, *x), *inputs)))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_has_the_same_bits_on_any_number_of_threads(name):
    """Tokens, log-probs, routes, and after two updates every weight, are equal bit for bit on 1, 2 and 3 threads."""
    weights = model(name)

    def step() -> list[Tensor]:
        rollouts = engine(weights).generate(worlds.prompts(4), SAMPLING)
        learner = trainer(weights)
        scores = learner.score(rollouts, RoutingPlan("natural"))
        minibatch = MiniBatch(rollouts, scores.logp_BT, torch.linspace(-1, 1, 32), index=0, num_minibatches=1)
        for _ in range(2):
            stats = learner.update(minibatch, preset("minirl"), RoutingPlan("natural"))
        batch = rollouts.padded()
        routes = [] if rollouts.experts is None else [rollouts.experts.experts, scores.experts.experts]
        found = [batch.tokens_BS, batch.logp_mu_BT, scores.logp_BT, scores.entropy_BT, stats.logp_pi_BT, *routes]
        return [*found, *(p.detach() for p in learner.model.parameters())]

    assert all_equal(on_each(step))


def test_an_engine_that_rounds_has_the_same_bits_on_any_number_of_threads():
    """Roundings of activations and caches, router noise between the halves of a layer: equal on 1, 2 and 3 threads."""
    weights = model("qwen3")
    defects = [chain.BROKEN[name] for name in ("activations-fp8", "cache-fp8", "router-noise")]
    rolls = SandboxEngine(weights.config, defects, (worlds.STOP,), kernels=COMPILED)
    rolls.load_model(weights, version=0)

    def sampled() -> list[Tensor]:
        rollouts = rolls.generate(worlds.prompts(4), SAMPLING)
        batch = rollouts.padded()
        return [batch.tokens_BS, batch.logp_mu_BT, rollouts.experts.experts]

    assert all_equal(on_each(sampled))


@pytest.mark.parametrize("recorder", [lambda: PassRecorder(True), lambda: PassRecorder(False), NaturalRouting])
def test_a_whole_pass_writes_what_one_thread_writes(recorder):
    """Hidden states, caches, recorded routes and features of 40 sequences are equal on 1, 2 and 3 threads."""
    weights = model("deepseek_v3")
    tokens_BS = torch.randint(0, weights.config.vocab_size, (40, 9), generator=stream(1, "tokens"))

    def whole() -> list[Tensor]:
        cache, routing = KVCache(weights.config, 40, 16), recorder()
        with torch.no_grad():
            hidden = weights.forward_hidden(tokens_BS, routing, cache=cache)
        kept = (getattr(routing, name, []) for name in ("experts", "hidden", "logits"))
        return [
            hidden,
            *(t[..., :9, :].clone() for t in (cache.k_LBhCd, cache.v_LBhCd)),
            *(t for ts in kept for t in ts),
        ]

    assert all_equal(on_each(whole))


def test_sequences_of_more_rows_than_there_are_threads_stay_whole():
    """One long sequence, and fewer rows than a part holds, give the bits that they give beside others."""
    weights = model("qwen3")
    tokens_BS = torch.randint(0, weights.config.vocab_size, (9, 30), generator=stream(2, "tokens"))
    COMPILED.set_threads(3)
    with torch.no_grad():
        together = weights.forward_hidden(tokens_BS)
        for b in range(9):
            assert torch.equal(weights.forward_hidden(tokens_BS[b : b + 1])[0], together[b])
        assert torch.equal(weights.forward_hidden(tokens_BS[:2, :3]), together[:2, :3])


# -- the pool


def product() -> Tensor:
    """A product of so many rows that every thread finds a part."""
    return COMPILED.linear(drawn(3, 4000, 64), drawn(4, 64, 64))


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def in_a_fork(call) -> bool:
    """Whether `call` is true in a forked child; one that takes longer than 30 seconds hangs, and is killed."""

    def act() -> int:
        signal.alarm(30)
        return 0 if call() else 1

    return forks.end(forks.begin(act, Path(os.devnull))) == 0


def test_a_forked_child_has_threads_of_its_own():
    """A child forked from a process with a pool computes the same bits, on as many threads; its own child does too."""
    COMPILED.set_threads(3)
    expected = product()

    def child() -> bool:
        alone = num_threads()
        is_same = torch.equal(product(), expected)
        return is_same and (alone, num_threads()) == (1, 3)

    assert in_a_fork(child)
    assert in_a_fork(lambda: child() and in_a_fork(child))
    assert torch.equal(product(), expected)


def test_a_fork_while_another_thread_computes_does_not_hang():
    """A child forked in the middle of a call of another thread computes the same bits."""
    COMPILED.set_threads(3)
    expected = product()
    with ThreadPoolExecutor(1) as other:
        busy = other.submit(lambda: [product() for _ in range(200)])
        assert all(in_a_fork(lambda: torch.equal(product(), expected)) for _ in range(5))
        assert all(torch.equal(one, expected) for one in busy.result())


def test_threads_are_made_when_they_are_asked_for():
    """One thread makes none, three make two more once, and few rows keep to the caller."""

    def child() -> bool:
        seen = []
        for number in (1, 3, 3, 2):
            COMPILED.set_threads(number)
            COMPILED.linear(drawn(3, 20, 8), drawn(4, 8, 8))
            seen.append(num_threads())
            product()
            seen.append(num_threads())
        return seen == [1, 1, 1, 3, 3, 3, 3, 3]

    assert in_a_fork(child)


def test_every_thread_takes_part():
    """Of a long piece of work no thread of the pool does less than a tenth of what another does.

    Threads that are woken and find nothing to do run for some hundredths of it.
    """
    x, weight = drawn(3, 4000, 64), drawn(4, 64, 64)

    def child() -> bool:
        COMPILED.set_threads(3)
        until = time.monotonic() + 10
        spent = [0]
        while time.monotonic() < until and not (len(spent) == 3 and 2e7 < max(spent) < 10 * min(spent)):
            COMPILED.linear(x, weight)
            # The first number: nanoseconds that the thread has run.
            spent = [int((task / "schedstat").read_text().split()[0]) for task in Path("/proc/self/task").iterdir()]
        return time.monotonic() < until

    assert in_a_fork(child)


def test_calls_at_the_same_time_do_not_meet():
    """Python threads that call the kernels at once get what each gets alone."""
    COMPILED.set_threads(2)
    inputs = [(drawn(n, 900, 32), drawn(n + 50, 48, 32)) for n in range(8)]
    expected = [COMPILED.linear(*one) for one in inputs]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(20):
            found = list(callers.map(lambda one: COMPILED.linear(*one), inputs))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- who sets their number


def test_torch_has_one_thread_beside_compiled_kernels():
    """Compiled kernels take the threads and leave torch one; torch's operators are torch's threads."""
    EAGER.set_threads(2)
    assert torch.get_num_threads() == 2
    COMPILED.set_threads(3)
    assert (library().threads, torch.get_num_threads()) == (3, 1)
