"""`firstorder plan` refuses what does not divide or fit, in one line with exit code 2 that says what to change."""

from __future__ import annotations

import re

import pytest

from tests.scaled.test_plan_command import CONFIG, FILE, plan

WAYS_OUT = [
    (
        ["--training.recompute", "none"],
        r"training: expected at most 79\.6 GiB of H100-80GB's 79\.6, got \d+\.\d, of which \d+\.\d are activations; "
        r"fits with training\.recompute selective \(\d+\.\d GiB\), or .*",
    ),
    (
        ["--training.expert_parallel", "1"],
        r"training: expected at most .* are (gradients, fp32|optimizer states); fits with training\.expert_parallel "
        r"\d+ .*",
    ),
    (["--rollout.max_num_seqs", "200"], r"rollout: .* are KV of 200 sequences; fits with rollout\.max_num_seqs 107 .*"),
    (["--rollout.tensor_parallel", "4"],
     r"rollout\.precision\.weights: .* expert_size / tensor_parallel = 192.*; rollout\.tensor_parallel may be 1, 2"),
    (
        ["--training.tensor_parallel", "8"],
        r"training\.tensor_parallel: expected a divisor of 4 key-value heads, got 8; it may be 1, 2, 4",
    ),
    (
        ["--training.num_ranks", "20", "--training.tensor_parallel", "1", "--training.expert_parallel", "5",
         "--algorithm.batch.num_responses", "20"],
        r"training\.expert_parallel: expected a divisor of 128 experts, got 5; it may be 1, 2, 4, 8, 16, 32, 64",
    ),
    (
        ["--cluster.num_nodes", "4"],
        r"cluster\.num_nodes: expected at least 64 GPUs for 32 ranks and 16 engines of 2, separate, got 4 x 8 = 32; "
        r"fits from 8 on; `firstorder plan CONFIG --search` lists layouts of the GPUs that there are",
    ),
    (["--cluster.placement", "colocated", "--rollout.num_engines", "32"],
     r"rollout\.num_engines: expected at most training\.num_ranks = 32 GPUs for colocated engines, got 32 .* = 64"),
    (["--cluster.object_store_gib", "0.5"], r"cluster\.object_store_gib: expected at least 2 for two buckets .*"),
    (["--cluster.host_gib", "300"],
     r"cluster\.object_store_gib: expected at most cluster\.host_gib = 300, .* the store \(/dev/shm\), got 320"),
    (["--cluster.num_nodes", "1", "--training.num_ranks", "4", "--training.expert_parallel", "4",
      "--rollout.num_engines", "2"],
     r"training: .* no single change fits: take a larger GPU, or change several; `firstorder plan CONFIG --search` .*"),
    (["--cluster.placement", "colocated", "--schedule.steps_off", "1"],
     r"schedule\.steps_off: expected 0 where cluster\.placement is colocated, got 1"),
    (["--probe.num_tokens", "40000"], r"probe\.num_tokens: expected less than rollout\.max_model_len = 34816, got .*"),
    (["--rollout.precision.compute", "fp32"], r"rollout\.precision\.compute: expected bf16 or fp16 with native .*"),
    (["--simulate", "4", "--training.tensor_parallel", "8"], r"training\.tensor_parallel: expected a divisor of 4 .*"),
    (["--simulate", "4", "--rollout.timeout_s", "60"], r"rollout\.timeout_s: expected more than the estimated .*"),
    (["--cluster.gpu", "H900"], r"cluster\.gpu: expected one of A100-80GB, .*, got H900"),
    (["--rollout.max_model_len", "50000", "--training.max_tokens_per_micro_batch", "50000"],
     r"rollout\.max_model_len: expected at most .* 40960 positions, got 50000"),
    (["--rollout.max_model_len", "33000"], r"rollout\.max_model_len: .* = 2048 \+ 32768 = 34816, got 33000"),
    (["--rollout.max_num_batched_tokens", "32", "--rollout.max_num_seqs", "33"],
     r"rollout\.max_num_batched_tokens: expected at least rollout\.max_num_seqs = 33, got 32"),
    (["--rollout.max_num_batched_tokens", "1" + 20 * "0"],
     r"rollout\.max_num_batched_tokens: expected a value less than or equal to 2147483648, got 1000*"),
    (["--rollout.timeout_s", "60"],
     r"rollout\.timeout_s: expected more than the estimated \d+ s of a piece of 32 responses of 32,768 .*, got 60"),
    (["--mean-tokens", "99999"], r"--mean-tokens: expected from 2 to rollout\.max_model_len = 34816, got 99999"),
    (["--algorithm.batch.num_prompts", "1000000000000"],
     r"algorithm\.batch: expected at most 1,000,000 responses, got 16,000,000,000,000"),
    (["--algorithm.batch.num_responses", "1000000000000", "--search"],
     r"algorithm\.batch: expected at most 1,000,000 responses, got .*"),
    (["--evaluation.max_prompts", "40000"],
     r"evaluation: expected at most 1,000,000 responses, got 1,280,000 \(32 of each of 40,000 problems, max_prompts, "
     r"as a plan reads no problem file\)"),
    (["--rollout.num_engines", "1000000000000"],
     r"rollout\.num_engines: expected a value less than or equal to 65536, got 1000000000000"),
    (["--model.shape", "qwen9"], r"model\.shape: expected one of .*, got qwen9"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), WAYS_OUT, ids=[" ".join(words)[2:40] for words, _ in WAYS_OUT])
def test_what_does_not_fit_says_what_to_change(capsys, words, line):
    """A layout that does not divide or fit ends with exit code 2 and one line: field, both numbers, a way out."""
    code, _, err = plan(capsys, *words)
    assert code == 2
    assert err.count("\n") == 1 and re.fullmatch(f"error: {line if line.startswith('--') else FILE + line}\n", err), err


def test_each_misfit_has_a_line_with_its_way_out(capsys):
    """Two pools that do not fit are two lines, neither cut off; changes that need more GPUs are not proposed."""
    code, _, err = plan(
        capsys, "--rollout.max_num_seqs", "500", "--training.recompute", "none", "--cluster.gpu", "A100-80GB"
    )
    training, rollout = err.splitlines()
    assert code == 2 and training.startswith(f"error: {CONFIG}: training: ")
    assert rollout.startswith(f"error: {CONFIG}: rollout: ")
    assert re.search(r"; fits with training\.recompute selective \(", training)
    assert re.search(r"; fits with rollout\.max_num_seqs \d+ \([\d.]+ GiB\)", rollout)
    few = ("--training.num_ranks", "4", "--training.expert_parallel", "4", "--rollout.num_engines", "2")
    _, _, err = plan(capsys, *few, "--cluster.num_nodes", "1")
    assert "GiB" in err and "training.num_ranks" not in err  # 16 ranks would fit, but not on 8 GPUs
