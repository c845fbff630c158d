"""The loop, seen by the engines: what it asks of them, with which numbers, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from theory.advantages import advantages_of, overlong_penalty
from theory.algorithm import Algorithm
from theory.contracts import (
    MiniBatch,
    NamedTensors,
    Prompt,
    Response,
    RolloutEngine,
    Rollouts,
    Sampling,
    Task,
    TokenScores,
    TrainingEngine,
    UpdateStats,
)
from theory.loop import global_step
from theory.objectives import Objective, preset
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

P, G, SEED, STEP = 4, 3, 11, 5


@dataclass
class Scripted:
    """Both engines and the task: random tokens, log-probs of -1, and a list of what was asked.

    A group's rewards are mixed where its prompt's number is odd, else all 1.
    """

    asked: list = field(default_factory=list)

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        self.asked.append(("prompts", step, num_prompts))
        return [Prompt(f"{step}-{p}", (2,) * (1 + p), str(p)) for p in range(num_prompts)]

    def held_out(self) -> Sequence[Prompt]:
        return ()

    def reward(self, prompt: Prompt, response: Response) -> float:
        return float(response.tokens[0]) if int(prompt.answer) % 2 else 1.0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        self.asked.append(("generate", len(prompts), sampling))
        draws = stream(sampling.seed, "scripted")
        responses = []
        for prompt in prompts:
            for g in range(sampling.num_responses):
                tokens = torch.randint(2, (1 + g,), generator=draws)
                tokens[0] = g % 2
                responses.append(
                    Response(prompt, tokens, torch.full((1 + g,), -1.0), torch.ones(1 + g, dtype=torch.bool), "stop", 7)
                )
        return Rollouts(tuple(responses))

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.asked.append(("load", dict(named_tensors), version))

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        self.asked.append(("score", rollouts, plan))
        like = rollouts.padded().logp_mu_BT
        return TokenScores(like - 0.25, torch.ones_like(like))

    def score_reference(self, rollouts: Rollouts) -> Tensor:
        self.asked.append(("reference", rollouts))
        return rollouts.padded().logp_mu_BT - 0.5

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        self.asked.append(("update", minibatch, objective, plan))
        index = float(minibatch.index)
        return UpdateStats({"actor/grad_norm": index, "rollout_corr/weight_max": index}, minibatch.logp_old_BT)

    def named_tensors(self, folded: bool = False) -> NamedTensors:
        return [("weight", torch.tensor([3.0]))]

    def predictor_weights(self) -> dict[int, Tensor]:
        return {}

    def of(self, kind: str) -> list[tuple]:
        return [entry[1:] for entry in self.asked if entry[0] == kind]


def run(step: int = STEP, seed: int = SEED, **changes):
    """One global step over the scripted engines, and what they were asked."""
    settings = {"objective": preset("minirl"), "num_prompts": P, "num_responses": G, "num_minibatches": 2} | changes
    engines = Scripted()
    assert isinstance(engines, RolloutEngine) and isinstance(engines, TrainingEngine) and isinstance(engines, Task)
    result = global_step(step, Algorithm(**settings), engines, engines, engines, seed)
    return engines, result


def test_a_step_asks_in_this_order() -> None:
    """Prompts, rollout, old pass, N updates, weights: each once, the weights as the next step's version."""
    engines, _ = run()
    assert [entry[0] for entry in engines.asked] == ["prompts", "generate", "score", "update", "update", "load"]
    assert engines.of("prompts") == [(STEP, P)]
    ((weights, version),) = engines.of("load")
    assert weights == {"weight": torch.tensor([3.0])} and version == STEP + 1


def test_sampling_is_the_recipes() -> None:
    """Length, group size and temperature are the algorithm's; the draw is named by seed and step; no features."""
    engines, _ = run(max_tokens=9, temperature=0.7)
    ((num, sampling),) = engines.of("generate")
    assert num == P
    assert (sampling.max_tokens, sampling.num_responses, sampling.temperature) == (9, G, 0.7)
    assert sampling.num_features == 0
    seeds = {run(step, seed)[0].of("generate")[0][1].seed for step in (0, 1) for seed in (0, 1)}
    assert len(seeds) == 4


def test_updates_partition_the_groups() -> None:
    """Each mini-batch has whole groups with their own advantages and old log-probs, its index and N; one order a seed
    and step."""
    engines, result = run()
    updates = engines.of("update")
    assert [m.index for m, _, _ in updates] == [0, 1]
    assert {m.num_minibatches for m, _, _ in updates} == {2}
    ids = [[r.prompt.id for r in m.rollouts.responses] for m, _, _ in updates]
    assert sorted(ids[0] + ids[1]) == sorted(f"{STEP}-{p}" for p in range(P) for _ in range(G))
    for (minibatch, objective, routing), names in zip(updates, ids, strict=True):
        assert names == [names[0]] * G + [names[G]] * G
        assert objective == preset("minirl")
        for b, response in enumerate(minibatch.rollouts.responses):
            mixed = int(response.prompt.answer) % 2
            # Rewards 0, 1, 0 of a mixed group: mean 1/3.
            expected = float(response.tokens[0]) - 1 / 3 if mixed else 0.0
            assert float(minibatch.advantages_B[b]) == pytest.approx(expected, abs=1e-7)
        assert torch.equal(minibatch.logp_old_BT, minibatch.rollouts.padded().logp_mu_BT - 0.25)
        assert minibatch.logp_ref_BT is None and minibatch.features is None
        assert routing.source == "natural" and routing.record is None
        assert routing.feature_rows is not None and len(routing.feature_rows) == len(minibatch.rollouts)
    assert torch.equal(result.rewards_B.view(P, G)[1], torch.tensor([0.0, 1.0, 0.0]))
    orders = {tuple(str([r.prompt.answer for r in m.rollouts.responses]) for m, _, _ in run(s, k)[0].of("update"))
              for s in range(4) for k in range(4)}  # fmt: skip
    again = [[r.prompt.id for r in m.rollouts.responses] for m, _, _ in run()[0].of("update")]
    # 4! orders of the groups, 16 draws: about 12 distinct ones.
    assert again == ids and len(orders) > 6


def test_labels_err_where_the_recipe_says_so() -> None:
    """With label_noise 1 advantages are those of 1 - R, while metrics and records keep R; at 1/2 the errors are a draw
    named by seed and step."""
    plain, result = run()
    wrong, wrong_result = run(label_noise=1.0)
    for (one, _, _), (other, _, _) in zip(plain.of("update"), wrong.of("update"), strict=True):
        torch.testing.assert_close(other.advantages_B, -one.advantages_B, rtol=0, atol=1e-6)  # means of float32
    assert torch.equal(result.rewards_B, wrong_result.rewards_B)
    assert result.metrics["reward/mean"] == wrong_result.metrics["reward/mean"]
    draws = {tuple(torch.cat([m.advantages_B for m, _, _ in run(s, k, label_noise=0.5)[0].of("update")]).tolist())
             for s in range(3) for k in range(3)}  # fmt: skip
    assert len(draws) == 9


def test_advantages_see_lengths_and_their_penalty() -> None:
    """OPO's baseline is by the sampled tokens; an overlong penalty lowers what the advantages see, not the record."""
    engines, result = run(objective=preset("minirl", advantage="opo"))
    shaped, shaped_result = run(max_tokens=4, overlong_buffer=3, overlong_factor=0.5)
    assert torch.equal(result.rewards_B, shaped_result.rewards_B)
    rewards_PG = result.rewards_B.view(P, G)
    lengths_PG = torch.tensor([int(r.is_response.sum()) for r in result.rollouts.responses]).view(P, G)
    whole_PG = torch.tensor([len(r.is_response) for r in result.rollouts.responses]).view(P, G)
    penalty_PG = overlong_penalty(whole_PG, 4, 3, 0.5)
    assert penalty_PG.any()
    for got, wanted in (
        (engines, advantages_of("opo", rewards_PG, lengths_PG)),
        (shaped, advantages_of("group_mean", rewards_PG + penalty_PG)),
    ):
        # By prompt, as lengths are symmetric about their mean: sorted, the other sign of the penalty looks the same.
        seen = {m.rollouts.responses[b].prompt.id: m.advantages_B[b : b + G].tolist()
                for m, _, _ in got.of("update") for b in range(0, len(m.rollouts), G)}  # fmt: skip
        ids = [r.prompt.id for r in result.rollouts.responses[::G]]
        torch.testing.assert_close(torch.tensor([seen[name] for name in ids]), wanted.double(), rtol=0, atol=1e-6)


def test_feature_rows_are_a_named_draw() -> None:
    """T_c rows of each response from the row before its first token on, other ones in another step."""
    longer = {"num_responses": 8, "predictor": PredictorSettings(num_positions=2)}
    engines, _ = run(**longer)
    ((rollouts, routing),) = engines.of("score")
    for rows, response in zip(routing.feature_rows, rollouts.responses, strict=True):
        first = len(response.prompt.tokens) - 1
        assert len(rows) == min(2, len(response.tokens))
        assert all(first <= row < response.num_tokens - 1 for row in rows.tolist())
    assert [r.tolist() for r in run(STEP + 1, **longer)[0].of("score")[0][1].feature_rows] != [
        r.tolist() for r in routing.feature_rows
    ]


def test_rows_for_metrics_alone_are_bounded_over_the_batch() -> None:
    """Where no predictor learns from them, a batch keeps router logits of 2**16 rows, and one of each response at
    least; of few responses, and for a predictor, T_c of each."""
    bounded, learned = (Algorithm(preset("minirl"), mode=mode) for mode in ("R3", "Pr2"))
    for num, rows in ((1, 2048), (32, 2048), (64, 1024), (8192, 8), (100_000, 1)):
        assert bounded.num_feature_rows(num) == rows
        assert learned.num_feature_rows(num) == 2048
    engines, _ = run(mode="none", num_responses=8, predictor=PredictorSettings(num_positions=2))
    ((rollouts, routing),) = engines.of("score")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("theory.algorithm.COMPARED_ROWS", len(rollouts))
        engines, _ = run(mode="none", num_responses=8, predictor=PredictorSettings(num_positions=2))
    ((_, fewer),) = engines.of("score")
    for all_rows, one in zip(routing.feature_rows, fewer.feature_rows, strict=True):
        assert len(one) == 1 and set(one.tolist()) <= set(all_rows.tolist())


def test_the_reference_scores_what_is_penalised() -> None:
    """With a KL penalty, however small, each mini-batch carries the reference's log-probs of its own responses."""
    engines, _ = run(objective=preset("minirl", kl_coefficient=0.01))
    ((rollouts,),) = engines.of("reference")
    assert len(rollouts) == P * G
    for minibatch, _, _ in engines.of("update"):
        assert torch.equal(minibatch.logp_ref_BT, minibatch.rollouts.padded().logp_mu_BT - 0.5)
    assert run()[0].of("reference") == []


def test_dynamic_sampling_draws_until_groups_are_mixed() -> None:
    """Half of a draw's groups are mixed here: two rounds fill the batch with P mixed groups; one round keeps all."""
    engines, result = run(dynamic_sampling_rounds=3)
    assert engines.of("prompts") == [(STEP * 3, P), (STEP * 3 + 1, P)]
    assert len({sampling.seed for _, sampling in engines.of("generate")}) == 2
    assert result.metrics["sampling/rounds"] == 2 and result.metrics["sampling/kept_group_fraction"] == 1
    assert torch.equal(result.rewards_B.view(P, G), torch.tensor([0.0, 1.0, 0.0]).expand(P, G))
    ids = [r.prompt.id for r in result.rollouts.responses[::G]]
    assert ids == [f"{STEP * 3}-1", f"{STEP * 3}-3", f"{STEP * 3 + 1}-1", f"{STEP * 3 + 1}-3"]
    once = run()[1]
    assert once.metrics["sampling/rounds"] == 1 and once.metrics["sampling/kept_group_fraction"] == 0.5


def test_metrics_of_updates_are_means_and_maxima() -> None:
    """Over the N updates: what ends in _max is the largest, everything else the mean; N is counted."""
    metrics = run(num_minibatches=4)[1].metrics
    assert metrics["actor/grad_norm"] == 1.5
    assert metrics["rollout_corr/weight_max"] == 3
    assert metrics["actor/num_updates"] == 4
    # mu says -1 and old -1.25 of every token: k3 = rho - 1 - log rho with rho = old/mu = exp(-0.25).
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(torch.tensor(-0.25).exp().item() - 1 + 0.25, rel=1e-6)
    assert metrics["staleness/k3_kl"] == 0
    # pi is old here, so that the whole ratio is the discrepancy alone.
    assert metrics["actor/k3_kl_mu_pi"] == pytest.approx(metrics["rollout_corr/k3_kl"], rel=1e-6)
    assert metrics["response_length/mean"] == 2 and metrics["response_length/max"] == 3
    assert metrics["response_length/clip_ratio"] == 0
    assert metrics["progress/num_tokens"] == P * 6 and metrics["progress/num_responses"] == P * G
    # Two groups of 0, 1, 0 and two of ones: 8 of 12 are 1.
    assert metrics["reward/mean"] == pytest.approx(2 / 3) and metrics["reward/std"] == pytest.approx(2**0.5 / 3)


RECORDS = "experts recorded by the"
NEEDS = {
    "R2": f"needs {RECORDS} old pass",
    "R3": f"needs {RECORDS} rollout engine",
    "Pr2": "needs a training engine with a predictor",
    "Pr3": f"needs {RECORDS} rollout engine",
}


@pytest.mark.parametrize("mode", NEEDS)
def test_a_mode_that_replays_needs_what_it_replays(mode: str) -> None:
    """These engines record no experts and have no predictor: one line that names what is missing."""
    with pytest.raises(ValueError, match=f"^replay mode {mode} {NEEDS[mode]}, got none$"):
        run(mode=mode)
