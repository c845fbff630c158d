"""Laws of the compute estimate: FLOPs as torch counts them, limits of the roofline, schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import OlmoeConfig, OlmoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lab.hf import parse_shape
from scaled.config import ScaledRun, TrainingBlock
from scaled.megatron_engine.micro_batches import split
from scaled.megatron_engine.parallel import Layout
from scaled.plan import compute, engine_memory, flops, passes, payloads
from scaled.plan.hardware import gpu_named
from scaled.plan.host_memory import stored_bytes
from tests.scaled.plan_world import EACH_SHAPE, MOONLIGHT, OLMOE, QWEN, loaded
from theory.contracts import Prompt, Response, Rollouts

H100 = gpu_named("H100-80GB")

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24,
}  # fmt: skip


def recipe(*overrides: str) -> ScaledRun:
    return loaded("qwen3_30b_a3b", *overrides)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=24, norm_topk_prob=True), Qwen3MoeForCausalLM),
        (OlmoeConfig(**SIZES), OlmoeForCausalLM),
    ],
    ids=["qwen3_moe", "olmoe"],
)
@torch.no_grad()
def test_forward_flops_are_what_torch_counts(config, model):
    """A forward pass of transformers' model has our FLOPs, to the last one, with attention over all S x S pairs.

    Ours counts the causal half of them: (S + 1) / 2 of S.
    """
    config._experts_implementation = config._attn_implementation = "eager"
    # transformers 5 writes Qwen3's number of experts as num_local_experts; the published folders have num_experts.
    shape, S = parse_shape(config.to_dict() | {"num_experts": config.num_experts}), 10
    with FlopCounterMode(display=False) as counter:
        model(config)(torch.arange(S)[None])
    assert counter.get_total_flops() == S * (flops.matrix_flops(shape) + flops.attention_flops(shape, S))
    causal = S * flops.matrix_flops(shape) + S * flops.attention_flops(shape, S) * (S + 1) / (2 * S)
    assert flops.forward_flops(shape, S) == pytest.approx(causal, rel=1e-12)


@EACH_SHAPE
def test_short_sequences_cost_two_flops_an_active_weight(shape):
    """Without context a token costs 2 FLOPs an active weight, but for the embedding, which is only looked up."""
    expected = 2 * (shape.num_active_parameters - shape.vocab_size * shape.hidden_size)
    assert flops.forward_flops(shape, 1) == pytest.approx(expected, rel=1e-3)


def test_update_factor():
    """An update costs 3 forward passes and the head's once more, under selective the experts' too, 4 under full."""
    factors = {r: flops.update_factor(QWEN, TrainingBlock(recompute=r), 8192) for r in ("none", "selective", "full")}
    forward = flops.forward_flops(QWEN, 8192)
    head, experts = (8192 * num / forward for num in (2 * 151936 * 2048, 6 * 48 * 8 * 2048 * 768))
    assert factors["none"] == pytest.approx(3 + head) and factors["full"] == 4
    assert factors["selective"] == pytest.approx(3 + head + experts)
    assert 3 < factors["none"] < factors["selective"] < 4


def test_experts_touched():
    """One token reaches K experts, very many reach all E, and the count grows with tokens in between."""
    counts = [flops.experts_touched(QWEN, n) for n in (0, 1, 2, 16, 10_000)]
    assert counts[0] == 0 and counts[1] == pytest.approx(8) and counts[-1] == pytest.approx(128)
    assert counts == sorted(counts)


def test_decoding_is_bound_by_bytes_then_by_flops():
    """One sequence decodes at the bandwidth, thousands at the FLOP rate; a step never gets faster with more."""
    config = recipe()
    seconds = [compute.decode_step_seconds(config, QWEN, H100, n, 100) for n in (1, 4, 64)]
    assert seconds == sorted(seconds)
    # At batch 1: 8 of 128 experts and all that is no expert, in fp8 or bf16, once through half the bandwidth.
    touched = (30.53e9 - 28.99e9 - 0.62e9 - 0.0126e9) + 2 * (0.62e9 + 0.0126e9) + 28.99e9 * 8 / 128
    expected = touched / 2 / (3.35e12 * 0.5) + compute.STEP_OVERHEAD
    assert seconds[0] == pytest.approx(expected, rel=0.05)
    two, four = (compute.decode_step_seconds(config, QWEN, H100, n, 1) for n in (2000, 4000))
    slope = (four - two) / 2000
    token = flops.matrix_flops(QWEN) + flops.attention_flops(QWEN, 1)
    assert slope == pytest.approx(token / 2 / (1979e12 * 0.3), rel=1e-6)


def test_the_longest_response_bounds_the_rollout():
    """A rollout takes the longest response's steps at least, max_tokens at most, and beyond that grows with the
    responses of an engine."""
    few = recipe("--algorithm.batch.num_prompts", "8")
    seconds = compute.rollout_seconds(few, QWEN, H100, 10_000, 34_816)
    assert seconds > 32_768 * compute.STEP_OVERHEAD
    step = compute.step_compute(few, QWEN, H100, 1_000, 2_000)
    assert 2_000 * compute.STEP_OVERHEAD < step.rollout_s < 2_000 * 2 * compute.STEP_OVERHEAD
    one, two = (
        compute.rollout_seconds(recipe("--algorithm.batch.num_prompts", str(n)), QWEN, H100, 10_000, 34_816)
        for n in (512, 1024)
    )
    assert two == pytest.approx(2 * one)


def test_long_sequences_have_most_of_a_rollouts_tokens():
    """FLOPs and seconds of a rollout are those of its sequences one by one, whose contexts grow from nothing to their
    own lengths. Half the mean length, as the context of every token, would be 21% of the FLOPs short.
    """
    config = recipe("--rollout.max_num_seqs", "1")
    num, mean, longest = 1024, 10_445, 34_816
    lengths = passes.lengths(num, mean, longest)
    whole = sum(flops.forward_flops(QWEN, n) for n in lengths)
    assert compute.rollout_flops(config, QWEN, mean, longest) == pytest.approx(whole, rel=2e-3)
    assert num * flops.forward_flops(QWEN, mean) == pytest.approx(0.79 * whole, rel=5e-3)
    alone = sum(n * compute.decode_step_seconds(config, QWEN, H100, 1, n / 2) for n in lengths)
    found = compute.rollout_seconds(config, QWEN, H100, mean, longest)
    assert found == pytest.approx(alone / config.rollout.num_engines, rel=2e-3)


def test_schedules():
    """Synchronous steps add rollout and training; ahead of training, the longer hides the other; no push is hidden."""
    sync = compute.step_compute(recipe(), QWEN, H100)
    assert sync.step_s == pytest.approx(sync.rollout_s + sync.training_s + sync.push_s)
    overlapped = compute.step_compute(recipe("--schedule.steps_off", "1"), QWEN, H100)
    assert overlapped.step_s == pytest.approx(max(sync.rollout_s, sync.training_s) + sync.push_s)
    assert sync.gpu_hours == pytest.approx(64 * sync.step_s / 3600)
    assert sync.tokens == 1024 * sync.mean_tokens and sync.mean_tokens == round(0.3 * 34_816)


def test_training_time_follows_flops_ranks_and_bubble():
    """Training takes FLOPs over the ranks' rate; PP stretches it by 1 + (PP - 1) / (M VPP)."""
    num = 1e18
    flat = passes.training_seconds(recipe().training, QWEN.num_layers, H100, num, 128)
    assert flat == pytest.approx(num / (32 * 989e12 * passes.TRAINING_EFFICIENCY))
    words = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
    staged = recipe(*words, "--training.pipeline_parallel", "4")
    # TP 4 x PP 4 leaves DP 2, so M = 1024 / 2 micro-batches.
    assert compute.step_compute(staged, QWEN, H100).num_micro == 512
    assert passes.training_seconds(staged.training, QWEN.num_layers, H100, num, 512) / flat == pytest.approx(
        1 + 3 / 512
    )
    both = recipe(*words, "--training.pipeline_parallel", "4", "--training.virtual_pipeline", "3")
    assert passes.training_seconds(both.training, QWEN.num_layers, H100, num, 512) / flat == pytest.approx(
        1 + 3 / (512 * 3)
    )


def test_the_largest_stage_sets_the_pace():
    """Stages of 10, 10, 10 and 18 layers take 18 / 12 of the time of four equal ones; of equal ones nothing changes."""
    words = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
    equal = recipe(*words, "--training.pipeline_parallel", "4")
    uneven = recipe(*words, "--training.pipeline_parallel", "4", "--training.num_layers_in_last_pipeline_stage", "18")
    times = [passes.training_seconds(one.training, 48, H100, 1e18, 512) for one in (equal, uneven)]
    assert times[1] / times[0] == pytest.approx(18 / 12)


def test_reference_pass_is_counted():
    """A KL penalty doubles the scored FLOPs and leaves the others."""
    plain = compute.step_compute(recipe(), QWEN, H100, 5000)
    penalised = compute.step_compute(recipe("--algorithm.objective.kl_coefficient", "1e-3"), QWEN, H100, 5000)
    assert penalised.score_flops == 2 * plain.score_flops and penalised.update_flops == plain.update_flops
    assert plain.total_flops == plain.rollout_flops + plain.score_flops + plain.update_flops


def test_passes_for_the_routers_shift_are_counted():
    """Of 4 equal mini-batches three have a scoring pass of their own, under Pr2 four; of one mini-batch none."""
    words = ("--algorithm.objective.correction.name", "token_tis", "--algorithm.batch.num_minibatches")
    shifted = ("--algorithm.objective.router_shift_floor", "0.8", "--algorithm.replay.mode")
    found = {}
    for N, mode in (("4", "none"), ("4", "Pr2"), ("1", "none")):
        # All sequences as long as the longest, so that mini-batches are quarters.
        longest = recipe().rollout.max_model_len
        plain, scaled = (
            compute.step_compute(recipe(*words, N, *more), QWEN, H100, longest) for more in ((), (*shifted, mode))
        )
        assert scaled.update_flops == plain.update_flops
        found[N, mode] = scaled.score_flops / plain.score_flops
    assert found == pytest.approx({("4", "none"): 1.75, ("4", "Pr2"): 2.0, ("1", "none"): 1.0})


def positions_computed(config: ScaledRun, lengths: list[int]) -> int:
    """Positions of all data-parallel ranks' micro-batches, of responses of these lengths to prompts of one token."""
    training, responses = config.training, []
    for length in lengths:
        tokens, sampled = torch.ones(length, dtype=torch.int64), torch.ones(length, dtype=torch.bool)
        responses.append(Response(Prompt("p", (1,), ""), tokens, torch.zeros(length), sampled, "stop", 0))
    batch, total = Rollouts(tuple(responses)).padded(), 0
    for rank in range(training.data_parallel):
        layout = Layout(dp_rank=rank, dp_size=training.data_parallel, tp_size=training.tensor_parallel)
        total += sum(micro.tokens_bS.numel() for micro in split(batch, layout, training, torch.device("cpu")))
    return total


@pytest.mark.parametrize("budget", ["null", "800"])
@pytest.mark.parametrize("tensor_parallel", [1, 4])
def test_training_counts_the_positions_that_it_computes(tensor_parallel: int, budget: str) -> None:
    """The positions that the plan counts are those of the micro-batches of a batch with the lengths that it assumes."""
    config = recipe(
        "--training.num_ranks", str(2 * tensor_parallel), "--training.tensor_parallel", str(tensor_parallel),
        "--training.expert_parallel", "1", "--training.micro_batch_size", "2",
        "--training.max_tokens_per_micro_batch", budget, "--rollout.max_model_len", "256",
        "--algorithm.sampling.max_tokens", "200", "--task.max_response_tokens", "200",
        "--algorithm.batch.num_prompts", "4", "--algorithm.batch.num_responses", "8",
        "--algorithm.batch.num_minibatches", "2",
    )  # fmt: skip
    step = compute.step_compute(config, QWEN, H100, 48, 205)
    scored, updated = passes.lengths(32, 48, 205), passes.lengths(16, 48, 205)
    assert step.score_tokens == positions_computed(config, [n - 1 for n in scored])
    assert step.update_tokens == 2 * positions_computed(config, [n - 1 for n in updated])
    if budget == "null":
        assert step.score_tokens == step.update_tokens == 32 * 204
    else:
        assert sum(scored) < step.score_tokens < 1.4 * sum(scored)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.7, 0.99, 1.0])
def test_assumed_lengths_have_the_mean_and_the_limit(share: float) -> None:
    """Quantiles of the cut-off exponential law: their mean is the one asked for, the last is the longest."""
    longest = 32_768
    found = passes.lengths(4096, round(share * longest), longest)
    assert found == sorted(found) and found[-1] == longest and found[0] >= 2
    assert sum(found) / 4096 == pytest.approx(share * longest, abs=longest / 4096)
    if share < 0.5:  # shorter ones are likelier, by one factor for each step in length
        counts, _ = np.histogram(found, bins=8, range=(0, 8 * min(share, 0.12) * longest))
        assert all(a > b for a, b in itertools.pairwise(counts))


def test_a_token_budget_takes_the_padding_away() -> None:
    """Qwen3-30B at N = 8: 4,455 s of training padded to the longest, 689 s for even lengths, 899 s by a budget.

    875 s are those of the same lengths without any padding: attention grows with the length of each.
    """
    config = loaded("minirl/n8_r3")
    words = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
    fixed = loaded("minirl/n8_r3", *words)
    padded, even = (compute.step_compute(fixed, QWEN, H100, None, longest) for longest in (None, 10_445))
    assert padded.training_s == pytest.approx(4455, abs=1) and even.training_s == pytest.approx(689, abs=1)
    packed = compute.step_compute(config, QWEN, H100)
    assert packed.training_s == pytest.approx(899, abs=1)
    bare = sum(flops.forward_flops(QWEN, n - 1) for n in passes.lengths(8192, 10_445, 34_816))
    assert passes.training_seconds(config.training, QWEN.num_layers, H100, (1 + 4) * bare, 1) == pytest.approx(
        875, abs=1
    )
    assert packed.update_tokens / packed.tokens == pytest.approx(1.03, abs=5e-3)
    with pytest.raises(ValueError, match=r"--longest-tokens: expected from the mean, 10445, to .* = 34816, got 10000"):
        compute.step_compute(config, QWEN, H100, None, 10_000)


def test_a_push_goes_through_the_object_store() -> None:
    """61 GB in bf16 take 22 s at 2.8 GB/s and seven minutes where the object store spills, 31 GB in fp8 half of it. It
    spills where it holds the weights alone, but not beside the records of the step, which grow with the mean length.
    """
    for weights, gib in (("same", 57), ("fp8_block", 29)):
        words = ("--rollout.precision.weights", weights, "--cluster.object_store_gib")
        size = engine_memory.engine_weights(recipe(*words, "80"), QWEN)
        assert size / 2**30 == pytest.approx(gib, abs=0.5)
        quantised = compute.quantise_seconds(recipe(*words, "80"), QWEN)
        assert (quantised > 0) == (weights == "fp8_block")
        full, half = (str(sum(stored_bytes(recipe(*words, "80"), QWEN, n).values()) / 2**30) for n in (34_816, 17_408))
        for room, mean, rate in (
            ((full,), 34_816, 2.8e9), ((half,), 34_816, 0.14e9), ((half,), 17_408, 2.8e9),
            ((str(gib + 1),), 17_408, 0.14e9), (("1", "--cluster.address", "auto"), 34_816, 2.8e9),
        ):  # fmt: skip
            found = compute.push_seconds(recipe(*words, *room), QWEN, mean)
            assert found == pytest.approx(size / rate + quantised), (room, mean)
    # Ranks send the engines' type: in bf16 half of what they train in.
    half, whole = (
        recipe("--rollout.precision.weights", "same", "--rollout.precision.compute", c) for c in ("bf16", "fp32")
    )
    sizes = [engine_memory.engine_weights(config, QWEN) for config in (half, whole)]
    assert sizes == [2 * QWEN.num_parameters, 4 * QWEN.num_parameters]


def test_ranks_quantise_at_the_same_time() -> None:
    """One rank of Qwen3-30B takes three minutes, 32 ranks six seconds: experts over all, attention over DP = 8."""
    one = recipe(*(w for f in ("num_ranks", "tensor_parallel", "expert_parallel") for w in (f"--training.{f}", "1")))
    assert 170 < compute.quantise_seconds(one, QWEN) < 190
    assert compute.quantise_seconds(recipe(), QWEN) == pytest.approx(6.0, abs=0.05)
    for shape in (QWEN, MOONLIGHT, OLMOE):
        whole = compute.yielded_parameters(shape, one.training)
        assert whole == payloads.quantised_parameters(shape)
        attention = shape.num_layers * shape.num_attention_parameters
        split = one.training.model_copy(update={"num_ranks": 4, "tensor_parallel": 2, "expert_parallel": 2})
        gathered = split.model_copy(update={"expert_tensor_parallel": 2})
        experts = len(shape.moe_layers) * shape.num_experts * shape.num_expert_parameters
        assert compute.yielded_parameters(shape, split) == (whole - experts) // 2 + experts // 4 > attention // 2
        assert compute.yielded_parameters(shape, gathered) == (whole - experts) // 2 + experts // 2
        staged = split.model_copy(update={"num_ranks": 8, "pipeline_parallel": 2})
        if not shape.dense_layers and shape.num_layers % 2 == 0:
            assert 2 * compute.yielded_parameters(shape, staged) == compute.yielded_parameters(shape, split)


def test_offloaded_states_go_to_the_host_and_back():
    """Qwen3-30B on 8 colocated GPUs: 45.86 GB of states per rank, at the rates of one GPU; gradients go nowhere."""
    words = ("--cluster.placement", "colocated", "--cluster.num_nodes", "1", "--training.num_ranks", "8",
             "--rollout.num_engines", "4", "--training.offload")  # fmt: skip
    none, gradients, both = (
        compute.step_compute(recipe(*words, offload), QWEN, H100)
        for offload in ("null", "[gradients]", "[gradients, optimizer]")
    )
    assert none.turn_s == gradients.turn_s == 0
    assert both.turn_s == pytest.approx(45.86 / 1.5 + 45.86 / 9, rel=1e-3)
    assert both.step_s - none.step_s == pytest.approx(both.turn_s)


def test_a_model_without_experts_has_no_expert_terms() -> None:
    """A step of one sequence reads every weight once; a token reaches no expert and costs 2 FLOPs a weight."""
    dense = replace(QWEN, num_experts=0, dense_size=6144, dense_layers=tuple(range(48)))
    config = recipe("--rollout.precision.weights", "same")
    assert flops.experts_touched(dense, 100) == 0 and dense.num_active_parameters == dense.num_parameters
    read = 2 * dense.num_parameters / 2 / (3.35e12 * 0.5)  # on TP 2
    # rel: keys and values of one token.
    assert compute.decode_step_seconds(config, dense, H100, 1, 1) == pytest.approx(read + 0.01, rel=1e-4)
    assert compute.step_compute(config, dense, H100).step_s > 0
