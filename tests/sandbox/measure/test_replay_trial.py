"""Laws of the replay trial: it measures the share of the gap that mu's experts cause, and refuses where it cannot."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from firstorder.cli import main
from lab.doctor.causes import Cause
from lab.doctor.diagnosis import diagnose, weigh
from lab.doctor.replay_trial import try_replay
from lab.doctor.words import CAUSED
from lab.traces import Trace
from sandbox.measure.layers import DecoderReference
from sandbox.model.checkpoint import save
from tests.contracts import worlds
from theory.contracts import Sampling
from theory.divergences import k3_kl_mu_old
from theory.routing.passes import RoutingPlan

REFERENCE = DecoderReference(worlds.model())


def traced(defects: str = "router-noise") -> Trace:
    """The trace of an engine, with the exact trainer's scores."""
    rollouts = worlds.rollout_engine(defects, worlds.model()).generate(
        worlds.prompts(8), Sampling(max_tokens=16, num_responses=8, seed=3)
    )
    scores = worlds.training_engine(worlds.model()).score(rollouts, RoutingPlan("natural"))
    return Trace.of(rollouts, scores, torch.zeros(len(rollouts)), step=0)


def scored(trace: Trace, reference: DecoderReference, temperature: float = 1.0, is_replayed: bool = False) -> Any:
    """The reference's log-probabilities of the response tokens, on its own experts or on mu's."""
    sequences = [part.long() for part in trace.tokens.tensor_split(trace.offsets[1:-1])]
    record = trace.record_mu if is_replayed else None
    rows = reference.routed(sequences, record, temperature).logp_R.split([len(s) - 1 for s in sequences])
    return torch.cat([own[n - 1 :] for own, n in zip(rows, trace.num_prompt.tolist(), strict=True)])


@pytest.mark.parametrize("temperature", [None, 1.0, 1.7])
def test_replay_removes_all_that_experts_cause(temperature: float | None) -> None:
    """Where mu is the model on other experts, replay removes the whole gap, at any temperature of the logits."""
    trace = traced()
    T = temperature or 1.0
    own = replace(
        trace,
        logp_mu=scored(trace, REFERENCE, T, is_replayed=True),
        logp_old=scored(trace, REFERENCE, T),
        temperature=temperature,
    )
    found = try_replay(own, REFERENCE)
    assert (found.precision, found.distance, found.replayed, found.removed) == ("fp32", 0, 0, 1)
    k3_n = k3_kl_mu_old(own.logp_old.double(), own.logp_mu.double())[own.is_response].sort().values
    assert found.natural == pytest.approx(k3_n[: math.ceil(0.995 * len(k3_n))].mean().item()) and found.natural > 1e-3
    assert "Replay removes 100 % of the gap: most of it comes through the routers." in found.sentence


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_trainers_precision_is_found(precision: Any) -> None:
    """Old in a rounded precision is the model in that precision, which then replays mu's experts in it."""
    rounded, trace = REFERENCE.rounded(precision), traced()
    own = replace(trace, logp_mu=scored(trace, rounded, is_replayed=True), logp_old=scored(trace, rounded))
    found = try_replay(own, REFERENCE)
    assert (found.precision, found.distance, found.removed) == (precision, 0, 1)


@pytest.mark.parametrize(
    ("defects", "is_through_routers", "name"),
    [
        ("router-noise", True, "routing"),
        ("weights-bf16", True, "precision"),
        ("experts-never-arrive", False, "stale"),
        ("logit-noise", False, "precision"),
    ],
)
def test_gaps_through_the_routers_are_told_from_others(defects: str, is_through_routers: bool, name: str) -> None:
    """Replay removes most of a gap that comes through the routers, by noise or by rounding (the random weights of this
    model are nearly ties), and little of one from old weights or noisy logits; rounding keeps its name."""
    found = diagnose(traced(defects), REFERENCE)
    assert found.trial is not None and (found.trial.removed >= CAUSED) == is_through_routers
    assert found.named[0].name == name and found.share_right is None


@pytest.mark.parametrize("defects", ["router-noise", "experts-never-arrive"])
def test_the_models_own_experts_stand_for_olds(defects: str) -> None:
    """Without old's experts, as in every framework's dump, the model has them: the diagnosis is the same."""
    trace = traced(defects)
    whole, bare = (diagnose(one, REFERENCE) for one in (trace, replace(trace, experts_old=None)))
    assert bare.seen == whole.seen and bare.verdict == whole.verdict and bare.lines() == whole.lines()


def strengths(seen: dict[str, float]) -> dict[str, float]:
    found: dict[Cause, float] = weigh(seen)
    return {cause.name: strength for cause, strength in found.items()}


RIVALS = {
    "wrong_weights": {"size": 2.0, "sure_ratio": 1.0, "flips_per_size": 0.1, "kl_per_flip": 0.1},
    "stale": {"size": 0.5, "flips_per_size": 0.1, "kl_per_flip": 1.0},
}


@pytest.mark.parametrize("rival", RIVALS)
def test_the_outcome_decides_between_the_routers_and_other_weights(rival: str) -> None:
    """A large gap that replay removes is the routers', whatever the clues say; one that it leaves is not theirs."""
    clues = RIVALS[rival] | {"k3_kl": 0.1, "num_flips": 100.0}
    assert max(strengths(clues).items(), key=lambda item: item[1])[0] == rival
    tried = strengths(clues | {"replay_removes": 0.7})
    assert max(tried.items(), key=lambda item: item[1])[0] == "routing" and tried[rival] < 0.1
    without = strengths(clues | {"replay_removes": 0.1, "flips_per_size": 5.0})
    assert without["routing"] < 1e-3  # at half a logit the clues of the trace still have (0.2 / 0.5)^8 of their weight


def test_rounding_keeps_its_name_where_it_comes_through_the_routers() -> None:
    """Below a fifth of a logit replay leaves the choice between noise and rounding to the clues of the trace."""
    small = {"size": 0.05, "k3_kl": 1e-4, "kl_per_flip": 1e-3, "num_flips": 100.0, "replay_removes": 0.9}
    few, many = (strengths(small | {"flips_per_size": rate}) for rate in (0.2, 2.0))
    assert few["precision"] > 0.9 > 0.1 > few["routing"] and many["routing"] > 0.9


def test_nothing_is_tried_where_there_is_no_gap() -> None:
    """Equal sides are diagnosed as without a model."""
    found = diagnose(traced("exact"), REFERENCE)
    assert found.trial is None and found.named[0].name == "nothing"


class Deaf(DecoderReference):
    """A reference that cannot replay."""

    @property
    def replays(self) -> bool:
        return False


def test_a_trial_that_would_tell_nothing_is_refused() -> None:
    """Other weights, replayed routes, no experts, no gap and a model that cannot replay are each one line."""
    trace, other = traced(), DecoderReference(worlds.model(seed=1))
    with pytest.raises(ValueError, match=r"^--model: expected old's weights, at most 0.1 of mu's k3 KL of .* from old"):
        try_replay(trace, other)
    with pytest.raises(ValueError, match=r"^--model: expected a trace that old scored on its own experts, got one"):
        try_replay(replace(trace, old_pass="replay_rollout"), REFERENCE)
    with pytest.raises(ValueError, match=r"^experts_mu: expected mu's experts for --model, got none$"):
        try_replay(replace(trace, experts_mu=None), REFERENCE)
    with pytest.raises(ValueError, match=r"^logp_old: expected a gap for --model to explain, got a k3 KL of 0$"):
        try_replay(replace(trace, logp_old=trace.logp_mu), REFERENCE)
    with pytest.raises(ValueError, match=r"^--model: expected a model that can replay experts, got .* sandbox"):
        try_replay(trace, Deaf(worlds.model()))


def test_the_command_tries_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--model says the outcome below the first thing to do, in JSON too; a folder of steps is refused."""
    traced().save(tmp_path / "step.safetensors")
    save(worlds.model(), tmp_path / "model")
    words = ["doctor", str(tmp_path / "step.safetensors"), "--model", str(tmp_path / "model")]
    assert main([*words, "--out", str(tmp_path / "page.html")]) == 3
    verdict, _, *rest = capsys.readouterr().out.splitlines()
    assert "it looks like routers that choose other experts" in verdict
    assert any(line.startswith("Tried: the model's k3 KL from mu is ") for line in rest)
    assert "Replay removes" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert main([*words, "--json"]) == 3
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert told["replay"]["removed"] == pytest.approx(1 - told["replay"]["replayed"] / told["replay"]["natural"])
    assert told["clues"]["replay_removes"] == told["replay"]["removed"] and told["share_right"] is None
    save(worlds.model(seed=1), tmp_path / "other")
    assert main([*words[:3], str(tmp_path / "other")]) == 2
    assert f"{tmp_path / 'step.safetensors'}: --model: expected old's weights" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--model", str(tmp_path / "model")]) == 2
    assert "--model: expected the trace of one step beside it, got the folder" in capsys.readouterr().err
