"""Laws of the probe, and of rewards computed ahead, over the sandbox's engines in this process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from scaled.cluster.probe import Probe, ProbeError, allowed, describe
from scaled.cluster.rewards import AheadEngine, AheadTask
from scaled.cluster.schedule import Synchronous
from scaled.config import PrecisionBlock, ProbeBlock, ScheduleBlock, TrainingBlock
from tests.contracts import worlds
from tests.scaled.cluster_world import ShareEngine
from tests.scaled.schedule_world import Watched, weights, world
from theory.contracts import Response, Rollouts, Sampling
from theory.streams import stream


class One:
    """Several engines as a group shows them to the probe."""

    def __init__(self, *engines: ShareEngine):
        self.engines = engines

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        return [engine.score(sequences) for engine in self.engines]


def probe(limit: float = 1e-4, is_predicted: bool = False) -> Probe:
    return Probe(ProbeBlock(num_sequences=5, num_tokens=8), limit, "fp32", 0, is_predicted)


def test_engines_with_the_trainers_weights_pass() -> None:
    """The exact engine agrees with the trainer to rounding, also where W_p is folded into its gates."""
    for mode in ("R3", "Pr3"):
        recipe, engine, learner, task = world(mode)
        if learner.predictor is not None:
            for number, parameter in learner.predictor.parameters.items():
                parameter.data.normal_(0, 0.3, generator=stream(0, "probe", number))
        schedule = Synchronous(recipe, engine, learner, task, 3, ScheduleBlock())
        schedule.start(0)
        recent = engine.generate(worlds.prompts(4), Sampling(6, 2))
        found = probe(is_predicted=mode == "Pr3")(One(engine), learner, 0, recent)
        # Folding adds W_p before the product instead of after it: rounding of float32, measured 3e-7.
        assert found["probe/mean_abs_diff"] <= found["probe/max_abs_diff"] < 1e-5
        if mode == "Pr3":
            with pytest.raises(ProbeError):  # the unbiased trainer is not what the engine holds
                probe()(One(engine), learner, 0, recent)


def test_one_wrong_weight_stops_the_run() -> None:
    """Two experts of one layer exchanged in the second of two engines: a ProbeError with its number and both levels."""
    _, engine, learner, _ = world()
    tensors = weights(learner)
    engine.load_weights(tensors.items(), 4)
    a, b = (f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
    tensors[a], tensors[b] = tensors[b], tensors[a]
    wrong = Watched()
    wrong.load_weights(tensors.items(), 4)
    with pytest.raises(
        ProbeError,
        match=r"^engine 1 \(fp32\) disagrees with the trainer after the push of version 4: mean .* is \S+ nats per "
        r"token, allowed 0.0001",
    ):
        probe()(One(engine, wrong), learner, 4, engine.generate(worlds.prompts(4), Sampling(6, 2)))


def test_a_failed_probe_leaves_its_tokens_and_scores(tmp_path: Path) -> None:
    """The file that the error names gives the error's number again, for the engine that it names."""
    _, engine, learner, _ = world()
    engine.load_weights(weights(learner).items(), 3)
    amiss = Amiss(engine, range(1, 2))
    recent = engine.generate(worlds.prompts(4), Sampling(6, 2))
    evidence = tmp_path / "evidence"
    one = replace(probe(), evidence=evidence)
    one(One(engine), learner, 3, recent)
    assert not evidence.exists()
    with pytest.raises(ProbeError) as raised:
        one(amiss, learner, 3, recent)
    (path,) = tmp_path.rglob("*.*")
    words = str(raised.value)
    assert words.endswith(f"; tokens and scores are in {path}") and "\n" not in words
    found = safetensors.torch.load_file(path)
    lengths = found["offsets"].diff()
    assert len(lengths) == 5 and lengths.sum() == len(found["tokens"]) == len(found["logp_old"]) + 5
    diff = (found["logp_mu"][0] - found["logp_old"])[found["is_sampled"]].abs().clamp(max=1)
    assert f"is {diff.double().mean().item():.3g} nats per token" in words
    first = found["tokens"][: lengths[0]].tolist()
    assert any([*r.prompt.tokens, *r.tokens.tolist()][-len(first) :] == first for r in recent.responses)
    path.unlink()
    path.mkdir()  # a place where no file can be written does not hide the disagreement
    with pytest.raises(ProbeError, match=r"disagrees .*; cannot write "):
        one(amiss, learner, 3, recent)


class Amiss(One):
    """One engine whose log-probabilities of the first sequences are 5 nats off at those places from the end."""

    def __init__(self, engine: ShareEngine, places: range, num_sequences: int | None = None):
        super().__init__(engine)
        self.places, self.num_sequences = places, num_sequences

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        (scores,) = super().score(sequences)
        for logp in scores[: self.num_sequences]:
            logp[[-k for k in self.places if k <= len(logp)]] += 5.0
        return [scores]


def test_only_sampled_tokens_are_compared() -> None:
    """Tokens of prompts and of tools may differ by any amount; the last token that was sampled may not.

    A tool's answer that is longer than the probe ends the sequence; what was sampled before it is still compared.
    """
    _, engine, learner, _ = world()
    engine.load_weights(weights(learner).items(), 0)
    whole = engine.generate(worlds.prompts(4), Sampling(3, 2))
    kept = [r for r in whole.responses if len(r.tokens) == 3]
    assert len(kept) >= 5
    sampled = Rollouts(tuple(kept))
    assert probe()(Amiss(engine, range(4, 9)), learner, 0, sampled)["probe/max_abs_diff"] < 1e-5
    with pytest.raises(ProbeError, match=r"allowed 0\.0001"):
        probe()(Amiss(engine, range(1, 2)), learner, 0, sampled)

    def answered(response: Response) -> Response:
        tokens = torch.cat([response.tokens, response.tokens.new_zeros(12)])
        mask = torch.cat([response.is_response, torch.zeros(12, dtype=torch.bool)])
        return replace(
            response, tokens=tokens, is_response=mask, logp_mu=torch.nn.functional.pad(response.logp_mu, (0, 12))
        )

    with_tool = Rollouts(tuple(answered(r) for r in kept))
    assert probe()(Amiss(engine, range(4, 9)), learner, 0, with_tool) == probe()(One(engine), learner, 0, sampled)
    with pytest.raises(ProbeError, match=r"allowed 0\.0001"):
        probe()(Amiss(engine, range(1, 2)), learner, 0, with_tool)


def test_one_token_counts_at_most_one_nat() -> None:
    """A router that is nearly tied moves one token by nats, and stops nothing that a format's rounding may do.

    5 of 15 tokens, each 5 nats off, have a mean of 1/3, not of 5/3; 1 of 15 has 1/15.
    """
    _, engine, learner, _ = world()
    engine.load_weights(weights(learner).items(), 0)
    whole = engine.generate(worlds.prompts(4), Sampling(3, 2))
    sampled = Rollouts(tuple(r for r in whole.responses if len(r.tokens) == 3))
    for num, limit in ((1, 1 / 15), (5, 1 / 3)):
        amiss = Amiss(engine, range(1, 2), num)
        found = probe(limit + 1e-5)(amiss, learner, 0, sampled)
        assert found["probe/mean_abs_diff"] == pytest.approx(limit, abs=1e-5)
        assert found["probe/max_abs_diff"] == pytest.approx(5.0, abs=1e-5)
        with pytest.raises(ProbeError, match="at most 1 each"):
            probe(limit - 1e-5)(amiss, learner, 0, sampled)


def test_not_a_number_is_a_disagreement() -> None:
    """An engine whose log-probabilities are NaN fails the probe, whatever the limit."""
    _, engine, learner, _ = world()
    tensors = weights(learner)
    engine.load_weights(tensors.items(), 0)
    recent = engine.generate(worlds.prompts(4), Sampling(6, 2))
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    engine.load_weights(tensors.items(), 0)
    with pytest.raises(ProbeError, match="is nan nats per token"):
        probe(limit=1e9)(One(engine), learner, 0, recent)


def test_the_limit_is_the_configs_or_the_precisions() -> None:
    """The config's number wins; else the coarser arithmetic of the two engines, plus quantised weights and cache."""
    bf16, fp32 = TrainingBlock(precision="bf16"), TrainingBlock(precision="fp32")
    exact = PrecisionBlock(compute="fp32")
    assert allowed(ProbeBlock(max_mean_abs_diff=0.5), exact, fp32) == 0.5
    assert allowed(ProbeBlock(), exact, fp32) == 1e-4
    assert allowed(ProbeBlock(), exact, bf16) == allowed(ProbeBlock(), PrecisionBlock(compute="bf16"), fp32)
    ladder = [
        allowed(ProbeBlock(), PrecisionBlock(**p), fp32)
        for p in ({"compute": "fp32"}, {"compute": "fp16"}, {}, {"weights": "int8"}, {"weights": "fp8_block"},
                  {"weights": "fp8_block", "kv_cache": "fp8"})
    ]  # fmt: skip
    assert ladder == sorted(ladder) and len(set(ladder)) == len(ladder)
    assert describe(PrecisionBlock(weights="int8", kv_cache="fp8")) == "bf16, int8 weights, fp8 cache"


# -- rewards computed ahead


def test_rewards_ahead_are_the_tasks_own_and_several_at_a_time() -> None:
    """Every response gets the task's own reward, two are graded at the same time, and a grader's error is raised."""
    together = threading.Barrier(2)

    class Slow(worlds.EvenTokens):
        def reward(self, prompt, response) -> float:
            together.wait(timeout=30)  # one at a time would wait for ever
            return super().reward(prompt, response)

    task = AheadTask(Slow(), num_threads=2)
    engine = AheadEngine(worlds.rollout_engine("exact", worlds.model()), task)
    rollouts = engine.generate(worlds.prompts(2), Sampling(6, 2))
    expected = [worlds.EvenTokens().reward(r.prompt, r) for r in rollouts.responses]
    assert [task.reward(r.prompt, r) for r in rollouts.responses] == expected
    task.close()

    class Broken(worlds.EvenTokens):
        def reward(self, prompt, response) -> float:
            raise RuntimeError("the grading process did not start")

    task = AheadTask(Broken(), num_threads=1)
    task.expect(rollouts)
    with pytest.raises(RuntimeError, match="did not start"):
        task.reward(rollouts.responses[0].prompt, rollouts.responses[0])
    task.close()
