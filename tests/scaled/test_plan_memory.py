"""Laws of the memory count: shares add up to the model, schedules keep what Megatron's keep, recomputation orders."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from types import SimpleNamespace

import pytest
import torch

from lab.strict import ConfigError
from scaled.config import ScaledRun, TrainingBlock
from scaled.plan import division, engine_memory, feasibility, memory, parameters, payloads
from scaled.plan.assumptions import sentences
from scaled.plan.compute import lengths_of, step_compute
from scaled.plan.hardware import GPUS, gpu_named
from scaled.plan.host_memory import host_memory, most_stored_bytes
from scaled.plan.memory import GIB
from scaled.plan.summary import step_payloads
from scaled.vllm_engine.quantize import is_quantised
from tests.scaled.plan_world import EACH_SHAPE, MOONLIGHT, QWEN, loaded
from theory.top_tokens import TopTokens


def recipe(*overrides: str) -> ScaledRun:
    """The Qwen3-30B recipe with R3, changed."""
    return loaded("qwen3_30b_a3b", "--algorithm.replay.mode", "R3", *overrides)


@EACH_SHAPE
def test_stages_and_expert_ranks_hold_the_model_once(shape):
    """Without TP the dense weights of all stages and the experts of all EP ranks are the model's weights, each once."""
    for pp in (n for n in (1, 2, 3, 4) if shape.num_layers % n == 0):
        training = TrainingBlock(num_ranks=8 * pp, pipeline_parallel=pp, expert_parallel=8)
        stages = [parameters.rank_parameters(shape, training, stage) for stage in range(pp)]
        assert sum(s.dense + 8 * s.experts for s in stages) == shape.num_parameters


@EACH_SHAPE
def test_optimizer_states_of_all_ranks_are_twelve_bytes_a_weight(shape):
    """Sharded by the distributed optimizer, all ranks together hold 12 bytes a weight, without it DP times as much."""
    training = TrainingBlock(num_ranks=16, expert_parallel=8)
    found = parameters.rank_parameters(shape, training)
    assert 16 * parameters.optimizer_bytes(found, training) == pytest.approx(12 * shape.num_parameters, rel=1e-8)
    whole = training.model_copy(update={"distributed_optimizer": False})
    assert parameters.optimizer_bytes(found, whole) == 12 * found.total


@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_chunks_in_flight_are_megatrons_warm_up_and_one(pp, vpp):
    """A stage has at most its warm-up passes and one more in flight, as Megatron's own schedule counts them."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for stage in range(pp):
        for microbatches in (pp, 2 * pp, 8 * pp):
            group = SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage)
            communicator = SimpleNamespace(
                pp_group=group, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None
            )
            total, _, warm_up, _ = schedules.get_pp_rank_microbatches(
                microbatches, vpp, pp, p2p_communicator=communicator
            )
            training = TrainingBlock(num_ranks=pp, pipeline_parallel=pp, virtual_pipeline=vpp)
            assert memory.chunks_in_flight(training, stage, microbatches) == min(total, warm_up + 1)


@EACH_SHAPE
def test_recomputation_orders_the_activations(shape):
    """Activations shrink from none to selective to full. But for the rotary tables, which responses and heads share,
    they are linear in tokens and split exactly by TP; CP splits the tables, too."""
    sizes = {
        recompute: memory.activation_bytes(shape, TrainingBlock(recompute=recompute), 0, 4096, 1)
        for recompute in ("none", "selective", "full")
    }
    assert sizes["full"] < sizes["selective"] < sizes["none"]
    training = TrainingBlock(micro_batch_size=1)
    one = memory.activation_bytes(shape, training, 0, 4096, 1)
    rotary = 4096 * shape.num_layers * memory.rotary_activations(shape, 2)
    three = memory.activation_bytes(shape, TrainingBlock(micro_batch_size=3), 0, 4096, 1)
    assert three - rotary == 3 * (one - rotary)
    assert memory.activation_bytes(shape, training, 0, 8192, 1) == 2 * one
    for tp, cp in ((2, 1), (1, 4), (2, 2)):
        training = TrainingBlock(micro_batch_size=1, num_ranks=4, tensor_parallel=tp, context_parallel=cp)
        assert tp * cp * memory.activation_bytes(shape, training, 0, 4096, 1) - tp * rotary == one - rotary


def test_selective_keeps_what_attention_keeps():
    """Under selective a layer keeps its attention and the inputs of norm and router, and adds one layer's experts."""
    training = TrainingBlock(micro_batch_size=1, recompute="selective")
    D = QWEN.hidden_size
    attention, experts = memory.attention_activations(QWEN, 2), memory.mlp_activations(QWEN, 0, 2)
    found = memory.activation_bytes(QWEN, training, 0, 1000, 1)
    assert found == 1000 * (48 * (attention + 2 * 2 * D + 4 * 2 * 128) + experts - 2 * 2 * D)
    # 2 D + the projection's 32 + 2 x 4 heads, 32 + 4 rotated, 32 of the output, 32 copied for their norm, bf16; fp32
    # log-sum-exp of 32 heads. Where TP leaves one head of keys a rank, nothing is copied.
    assert attention == 2 * (2 * D + (40 + 36 + 32 + 32) * 128) + 4 * 32
    assert memory.attention_activations(QWEN, 2, tensor_parallel=4) == attention - 2 * 32 * 128
    assert experts == 2 * (2 * D + 8 * (D + 6 * 768)) + 9 * 128 + 20 * 8


def test_predictor_and_reference_are_counted_where_there_are_some():
    """A KL penalty adds the weights once more; Pr2 adds 16 bytes a predictor weight, and its features."""
    plain = memory.training_memory(recipe(), QWEN, 0)
    penalised = memory.training_memory(recipe("--algorithm.objective.kl_coefficient", "1e-3"), QWEN, 0)
    assert penalised.total - plain.total == plain.parts["weights"]
    words = ["--algorithm.replay.mode", "Pr2", "--algorithm.replay.predictor.num_positions", "2048"]
    predicted = memory.training_memory(recipe(*words), QWEN, 0).parts
    assert predicted["predictor and its optimizer"] == 16 * 48 * 2048 * 128
    assert predicted["features of a micro-batch"] == payloads.feature_bytes(QWEN, 34_816 // 4)  # TP 4; short responses
    one = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
    predicted = memory.training_memory(recipe(*words, *one), QWEN, 0).parts
    assert predicted["features of a micro-batch"] == payloads.feature_bytes(QWEN, 2048 // 4)


def test_likeliest_tokens_are_counted_as_they_are_recorded():
    """Plan's bytes are those of a record of as many tokens, of which each machine has a share; without centering there
    are none, `full` is all of V."""
    centred = recipe("--algorithm.objective.centering", "top_k", "--algorithm.objective.centering_k", "8")
    algorithm = centred.algorithm.build()
    tokens = algorithm.num_prompts * algorithm.num_responses * algorithm.max_tokens
    top = TopTokens.of(torch.zeros(7, QWEN.vocab_size), 8, torch.tensor([0, 7]))
    payload = step_payloads(centred, QWEN)
    assert payload["mu's likeliest tokens"] == top.num_bytes // 7 * tokens == 8 * (4 + 4) * tokens
    assert host_memory(centred, QWEN).parts["mu's likeliest tokens"] == 8 * (4 + 4 + 4) * tokens // 4  # machines
    name = "mu's likeliest tokens of a micro-batch"
    last = centred.training.pipeline_parallel - 1
    budget = centred.training.max_tokens_per_micro_batch
    assert memory.training_memory(centred, QWEN, last).parts[name] == 48 * 8 * budget
    words = ["--algorithm.objective.centering", "top_k", "--algorithm.objective.centering_k", "8"]
    by_count = recipe(*words, "--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
    assert memory.training_memory(by_count, QWEN, last).parts[name] == 48 * 8 * algorithm.max_tokens
    assert name not in memory.training_memory(recipe(), QWEN, last).parts
    assert "mu's likeliest tokens" not in step_payloads(recipe(), QWEN)
    full = step_payloads(recipe("--algorithm.objective.centering", "full"), QWEN)
    assert full["mu's likeliest tokens"] == QWEN.vocab_size * 8 * tokens


def test_router_logits_are_counted_where_they_are_made():
    """Without a predictor, old's and pi's logits of 2**16 rows of the batch at most, shared out over the machines; with
    one, pi's on the rows that it learns from, beside what it learns from. Where updates learn, a machine fetches as
    much of the others' features as is dealt to it."""
    name, num = "router logits that are compared", 64 * 16
    machines = -(-recipe().training.num_ranks // 8)
    for mode in ("none", "R2", "R3"):
        parts = host_memory(recipe("--algorithm.replay.mode", mode), QWEN).parts
        assert parts[name] == 2 * 2**16 * 4 * 48 * 128 // machines
        assert "router features" not in parts
    predicted = host_memory(recipe("--algorithm.replay.mode", "Pr2"), QWEN).parts
    assert predicted[name] == num * 2048 * 4 * 48 * 128 // machines
    whole = num * 2048 * 48 * (2 * 2048 + 4 * 128)
    assert machines == 4 and predicted["router features"] == whole // 4
    words = ("--algorithm.replay.mode", "Pr2", "--algorithm.batch.num_minibatches", "2")
    assert host_memory(recipe(*words), QWEN).parts["router features"] == whole // 4 + whole * 3 // 16
    assert name not in host_memory(recipe(), replace(QWEN, dense_layers=tuple(range(48)))).parts


def test_routers_scores_are_counted():
    """Old's scores are 4 bytes for each of L x K experts of a token, on the machines that made them and on those to
    which updates deal their responses; pi's, of one mini-batch, are on the machines that made them."""
    words = ("--algorithm.objective.correction.name", "token_tis")  # on old/mu: the ratio that is scaled stays apart
    words += ("--algorithm.batch.num_minibatches", "4")
    shifted = recipe(*words, "--algorithm.objective.router_shift_floor", "0.8")
    algorithm, rows = shifted.algorithm.build(), shifted.rollout.max_model_len
    expected = 4 * 48 * 8 * algorithm.num_prompts * algorithm.num_responses * rows
    assert step_payloads(shifted, QWEN)["old's router scores, float32"] == expected
    name, machines = "router scores of old and pi", shifted.training.num_ranks // shifted.cluster.gpus_per_node
    of_pi = -(-expected // (algorithm.num_minibatches * machines))
    assert machines == 4 and host_memory(shifted, QWEN).parts[name] == expected // 4 + expected * 3 // 16 + of_pi
    assert name not in host_memory(recipe(), QWEN).parts


def test_rollout_memory_is_linear_in_sequences_and_halves_with_tp():
    """One more sequence costs its whole KV and logits; twice the GPUs halve weights and KV while there are KV heads."""
    sizes = [engine_memory.rollout_memory(recipe("--rollout.max_num_seqs", str(n)), QWEN) for n in (8, 9, 10)]
    steps = [b.total - a.total for a, b in pairwise(sizes)]
    assert steps[0] == steps[1] == 34_816 * 98_304 // 2 + 8 * QWEN.vocab_size
    bf16 = ("--rollout.precision.weights", "same", "--rollout.num_engines", "4")
    tp = "--rollout.tensor_parallel"
    two, four, eight = (engine_memory.rollout_memory(recipe(*bf16, tp, str(n)), QWEN).parts for n in (2, 4, 8))
    kv = "KV of 80 x 34816 tokens"
    assert two["weights"] == 2 * four["weights"] == 4 * eight["weights"] == QWEN.num_parameters
    assert two[kv] == 2 * four[kv] == 2 * eight[kv]  # 4 KV heads: from TP 4 on they are repeated


@pytest.mark.parametrize("weights", ["same", "fp8_block"])
def test_quantising_is_told_where_ranks_do(weights: str) -> None:
    """The sentence on a push has the seconds in which ranks quantise, unless they send what they train in."""
    config, gpu = recipe("--rollout.precision.weights", weights), gpu_named("H100-80GB")
    (push,) = (one for one in sentences(config, QWEN, gpu, step_compute(config, QWEN, gpu)) if "; a push" in one)
    assert ("in which ranks quantise" in push) == (weights == "fp8_block")


def test_latent_attention_caches_its_latents():
    """Moonlight's KV of a token is 27 layers of 512 + 64 numbers on each GPU, whatever TP."""
    assert payloads.kv_bytes_per_token(MOONLIGHT, 2) == 2 * 27 * (512 + 64)
    assert payloads.kv_bytes_per_token(MOONLIGHT, 2, 8) == payloads.kv_bytes_per_token(MOONLIGHT, 2)


@EACH_SHAPE
def test_quantised_weights(shape):
    """fp8 in blocks takes a byte and 4 / 128^2 for every weight that ranks quantise; embeddings, routers and MLA's
    compressions stay in bf16."""
    whole, fp8 = (payloads.weight_bytes(shape, name, 2) for name in ("same", "fp8_block"))
    matrices = payloads.quantised_parameters(shape)
    assert whole == 2 * shape.num_parameters
    assert whole - fp8 == pytest.approx(matrices * (1 - 4 / 128**2), abs=1)
    assert matrices == sum(prod(size) for name, size in shape.weights().items() if is_quantised(name))
    assert not shape.tied_head
    tables = 2 * shape.vocab_size * shape.hidden_size + len(shape.moe_layers) * shape.num_router_parameters
    latent = shape.latent_attention
    down = 0 if latent is None else shape.hidden_size * (latent.key_value_rank + latent.position_dim)
    kept = shape.num_parameters - matrices
    assert tables + shape.num_layers * down < kept < 1.002 * (tables + shape.num_layers * down)


def test_what_a_message_offers_fits():
    """Every single change that a misfit's line offers makes its pool fit, and one less of it does not."""
    gpu = gpu_named("H100-80GB")
    config = recipe("--rollout.max_num_seqs", "200")
    (line,) = feasibility.misfits(config, QWEN, gpu)
    number = int(line.split("rollout.max_num_seqs ")[1].split(" ")[0])
    fits = recipe("--rollout.max_num_seqs", str(number))
    beyond = recipe("--rollout.max_num_seqs", str(number + 1))
    assert feasibility.misfits(fits, QWEN, gpu) == []
    assert len(feasibility.misfits(beyond, QWEN, gpu)) == 1
    (line,) = feasibility.misfits(recipe("--training.recompute", "none"), QWEN, gpu)
    assert line.startswith("training: expected at most 79.6 GiB of H100-80GB's 79.6, got ")
    assert "training.recompute selective" in line
    assert feasibility.misfits(recipe("--training.recompute", "selective"), QWEN, gpu) == []


COLOCATED = ("--cluster.placement", "colocated", "--training.num_ranks", "8", "--rollout.num_engines", "4",
             "--cluster.num_nodes", "1", "--rollout.gpu_memory_utilization", "0.8")  # fmt: skip


def test_colocated_gpus_hold_both_in_turn():
    """Qwen3-30B on 8 H100 at 34,816 tokens: an update fits while engines sleep; what ranks keep does not, unless
    gradients and optimizer states are offloaded. Then ranks and engine fit a GPU together."""
    gpu = gpu_named("H100-80GB")
    (line,) = feasibility.misfits(recipe(*COLOCATED), QWEN, gpu)
    assert line.startswith("training, while engines are awake: expected at most 15.9 GiB of H100-80GB's 79.6")
    assert "42.7 are optimizer states" in line
    fits = recipe(*COLOCATED, "--training.offload", "[gradients, optimizer]")
    assert feasibility.misfits(fits, QWEN, gpu) == []
    assert division.gpus_needed(fits) == 8
    update, kept = memory.peak_training_memory(fits, QWEN), memory.resident_memory(fits, QWEN)
    engine = engine_memory.rollout_memory(fits, QWEN, lengths_of(fits, None, None))
    assert update.total + memory.CONTEXT <= gpu.memory_gib * GIB < update.total + engine.total
    assert kept.total + engine.total <= gpu.memory_gib * GIB
    assert set(kept.parts) == {"weights", "context and buffers"}
    own = parameters.rank_parameters(QWEN, fits.training)
    states = parameters.optimizer_bytes(own, fits.training)
    assert host_memory(fits, QWEN).parts["optimizer states while engines are awake"] == 8 * states


def test_engines_that_sample_meanwhile_leave_less():
    """One step off, colocated engines never sleep: a rank's update gets what vLLM's share leaves."""
    gpu = gpu_named("H200-141GB")
    words = (*COLOCATED, "--schedule.steps_off", "1")
    (line,) = feasibility.misfits(recipe(*words), QWEN, gpu)
    assert line.startswith("training: expected at most 28.1 GiB of H200-141GB's 140.4 at rollout.gpu_memory_util")
    with pytest.raises(
        ConfigError, match=r"training\.offload: expected nothing unless cluster\.placement is colocated"
    ):
        recipe(*words, "--training.offload", "[gradients]")
    with pytest.raises(ConfigError, match=r"offload: expected optimizer only under precision bf16 .*, got fp32"):
        recipe(*COLOCATED, "--training.offload", "[optimizer]", "--training.precision", "fp32")


def test_gpu_table_is_plausible():
    """fp8 doubles the bf16 rate where there is fp8, and memory is at most what the name says."""
    for name, gpu in GPUS.items():
        assert gpu.fp8_tflops is None or gpu.fp8_tflops / gpu.bf16_tflops == pytest.approx(2, rel=0.01)
        assert 0.9 * float(name.split("-")[-1].removesuffix("GB")) < gpu.memory_gib <= float(name.split("-")[-1][:-2])
        assert gpu.source


def test_the_buckets_of_a_push_are_counted() -> None:
    """Each rank of a machine keeps the memory of one bucket, which does not lie in the object store."""
    table = 2 * QWEN.vocab_size * QWEN.hidden_size  # a bucket has room for the largest weight
    for mib in (64, 1024):
        config = recipe("--cluster.bucket_mib", str(mib))
        assert host_memory(config, QWEN).parts["buckets that ranks keep"] == 8 * max(mib * 2**20, table)
        assert "buckets that ranks keep" not in most_stored_bytes(config, QWEN)


def test_the_copy_of_a_checkpoint_is_counted() -> None:
    """Asynchronous, the machine of the ranks that write has 2 bytes per weight, and each of two half of the 12 bytes of
    states; else there is no copy."""
    words = ("--cluster.num_nodes", "2", "--training.num_ranks", "16", "--training.expert_parallel", "8")
    words += ("--training.tensor_parallel", "1")
    plain, copied = (
        host_memory(recipe(*words, "--checkpoint.asynchronous", value), QWEN).parts for value in ("false", "true")
    )
    name = "copy of a checkpoint that is being written"
    assert copied[name] == pytest.approx((2 + 12 / 2) * QWEN.num_parameters, rel=1e-6) and name not in plain
