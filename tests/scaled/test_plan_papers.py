"""The plan's formulas reproduce the numbers that the papers print, and say under which reading of their units."""

from __future__ import annotations

import pytest

from scaled.plan import compute, payloads
from scaled.plan.hardware import gpu_named
from scaled.plan.memory import GIB
from tests.scaled.plan_world import MOONLIGHT, OLMOE, QWEN, loaded

MB = 1e6
KI = 1024


def test_r3_table_9_bytes_a_token():
    """R3 Table 9: a token of Qwen3-30B takes 2 x 48 x (512 + 512) bytes of KV and 2 x 48 x 8 of routing, 1 / 128."""
    kv, mask = payloads.kv_bytes_per_token(QWEN, 2), payloads.routing_bytes(QWEN, 1, 2)
    assert kv == 2 * 48 * (512 + 512) == 98_304
    assert mask == 2 * 48 * 8 == 768
    assert kv == 128 * mask
    # Ids 0 to 127 and -1 fit in 8 bits: our records take half of it.
    assert payloads.id_bytes(QWEN) == payloads.id_bytes(MOONLIGHT) == payloads.id_bytes(OLMOE) == 1


def test_r3_table_9_tokens_in_40_gb():
    """R3 Table 9: 40 GB hold the KV of 437K tokens, whose masks take 0.3 GB, 2.5 GB on eight GPUs: GB is GiB, K 1e3.

    With GB as 1e9 bytes 40 GB would hold 407K tokens.
    """
    tokens = 40 * GIB / payloads.kv_bytes_per_token(QWEN, 2)
    assert round(tokens / 1e3) == 437
    mask = tokens * payloads.routing_bytes(QWEN, 1, 2)
    assert round(mask / GIB, 1) == 0.3
    assert 8 * mask / GIB == 2.5


def test_r3_g2_mask_of_a_global_step():
    """R3 App. G.2: 2 B G N L K = 48 GB at B 256, G 8, N 32768, and 1.5 GB on each of 32 nodes: GB is GiB, exactly."""
    size = payloads.routing_bytes(QWEN, 256 * 8 * 32_768, 2)
    assert size == 48 * GIB
    assert size / 32 == 1.5 * GIB


@pytest.mark.parametrize(
    ("shape", "T", "T_c", "index_mb", "feature_mb", "mflop", "ratio_percent"),
    [
        (QWEN, 16 * KI, 2 * KI, "25.2", "453", "25.2", "0.69"),
        (MOONLIGHT, 1 * KI, 1 * KI, "0.64", "116", "6.82", "0.19"),
        (OLMOE, 1 * KI, 1 * KI, "0.52", "71.3", "4.19", "0.26"),
    ],
    ids=["qwen3", "moonlight", "olmoe"],
)
def test_pr2_table_3(shape, T, T_c, index_mb, feature_mb, mflop, ratio_percent):
    """Pr2 Table 3, to every printed digit, with MB as 1e6 bytes, K as 1024, and Moonlight's 26 MoE layers of 27.

    With MiB, or with K as 1000, Qwen3's index cache would be 24.0 MiB or 24.6 MB.
    """

    def printed(value: float, like: str) -> str:
        decimals = len(like.partition(".")[2])
        return f"{value:.{decimals}f}"

    assert printed(payloads.routing_bytes(shape, T, payloads.INT32_BYTES) / MB, index_mb) == index_mb
    assert printed(payloads.feature_bytes(shape, T_c) / MB, feature_mb) == feature_mb
    flops = 2 * payloads.predictor_parameters(shape)
    assert printed(flops / 1e6, mflop) == mflop
    assert printed(100 * flops / payloads.expert_flops_per_token(shape), ratio_percent) == ratio_percent


@pytest.mark.parametrize(
    ("shape", "billions", "active_billions"),
    [(QWEN, "30.5", "3.4"), (MOONLIGHT, "16.0", "2.9"), (OLMOE, "6.9", "1.3")],
    ids=["qwen3", "moonlight", "olmoe"],
)
def test_parameter_counts(shape, billions, active_billions):
    """The models have the weights that their names and cards say: 30.5B (A3.3B), 16B (A3B), 6.9B (A1.3B)."""
    assert f"{shape.num_parameters / 1e9:.1f}" == billions
    assert f"{shape.num_active_parameters / 1e9:.1f}" == active_billions


def test_mean_length_is_r3_table_8():
    """R3 Table 8: 203,989,395 tokens in 10 steps of 256 x 8 sequences of at most 32K are 30 % of the longest."""
    assert round(203_989_395 / (10 * 256 * 8 * 32_768), 2) == compute.MEAN_LENGTH_SHARE


@pytest.mark.parametrize(("recipe", "updates"), [("n1", 1), ("n8_r3", 8)])
def test_minirl_gpu_hours(recipe, updates):
    """MiniRL sec. 4.2 spends 5 to 6 GPU hours a gradient step; rollout and training without padding, on 64 GPUs of
    which half wait, 6.2 to 6.9. The two must agree to a factor of 1.5: cluster, concurrency, mean length and packing
    are not printed. Our own step has lengths that spread and padding as well: 7.9 with eight updates, and 15.2 with
    one, which waits for the longest of 1,024 responses. (With places for sequences of full length alone, 24 instead of
    80, it was 12 to 14 without padding.)
    """
    config = loaded(f"minirl/{recipe}")
    gpu = gpu_named(config.cluster.gpu)
    mean = round(compute.MEAN_LENGTH_SHARE * config.rollout.max_model_len)
    step = compute.step_compute(config, QWEN, gpu, mean, mean)
    whole = compute.step_compute(config, QWEN, gpu)
    assert whole.gpu_hours / updates == pytest.approx({1: 15.2, 8: 7.9}[updates], abs=0.05)
    hours = 64 * (step.rollout_s + step.training_s) / 3600
    assert 5.5 / 1.5 < hours / updates < 5.5 * 1.5
