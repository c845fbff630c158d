"""Every schema of returned routes becomes the same record; stores keep the right row and a uniform sample."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.hf import ModelShape, parse_shape
from scaled.vllm_engine import routes
from scaled.vllm_engine.capture import EngineStep, FeatureRequest, FeatureStore, RouteStore
from theory.streams import stream

NUM_PROMPT, NUM_TOKENS, E, K = 4, 9, 8, 2


def shape(dense: tuple[int, ...] = (1,)) -> ModelShape:
    return parse_shape(
        {
            "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_experts": E,
            "num_experts_per_tok": K, "moe_intermediate_size": 128, "intermediate_size": 256,
            "mlp_only_layers": list(dense), "norm_topk_prob": True,
        }
    )  # fmt: skip


def ids(num_rows: int, num_layers: int = 3, dtype: str = "int64") -> np.ndarray:
    """Distinct ids that differ from row to row and layer to layer, in descending order."""
    first = np.arange(num_rows)[:, None] + 2 * np.arange(num_layers)
    return np.stack([(first + 3) % E, first % E], -1).astype(dtype)


FULL = ids(NUM_TOKENS - 1)
MOE = FULL[:, [0, 2]]
SCHEMAS = {
    "joined": lambda: routes.joined(FULL.astype("uint8")),
    "joined, uint16": lambda: routes.joined(FULL.astype("uint16")),
    "joined, MoE layers only": lambda: routes.joined(MOE.astype("uint8")),
    "joined, n rows": lambda: routes.joined(np.concatenate([FULL, ids(1)])),
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.filterwarnings("ignore:dropped one trailing row:UserWarning")  # theory says so; n rows are its case
def test_every_schema_gives_the_same_record(name):
    """S - 1 rows over the MoE layers by number, ids ascending, int8 for 8 experts, whatever came."""
    record = routes.record([SCHEMAS[name]()], [NUM_TOKENS], shape())
    assert record.layer_numbers == (0, 2)
    assert record.experts.dtype == torch.int8
    assert torch.equal(record.experts.long(), torch.from_numpy(np.sort(MOE, -1)))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16"])
def test_routes_are_not_copied_before_they_are_packed(dtype):
    """The rows of a response are the engine's own memory in its own type, until the record takes them."""
    rows = FULL.astype(dtype)
    assert np.shares_memory(routes.joined(rows).numpy(), rows)
    rows.flags.writeable = False  # as vLLM's arrays are that came from another process
    assert routes.joined(rows).numpy().tolist() == rows.tolist()


def test_a_cached_prefix_is_missing():
    """Rows of -1 are missing rows; rows of a lost request are all missing."""
    masked = FULL.copy()
    masked[:3] = -1
    record = routes.record([routes.joined(masked), routes.unknown(8, 3, K)], [NUM_TOKENS] * 2, shape())
    assert (record.rows(0)[:3] == -1).all() and (record.rows(0)[3:] >= 0).all()
    assert (record.rows(1) == -1).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: routes.record([routes.joined(FULL[:-1])], [NUM_TOKENS], shape()), "8 rows for 9 tokens, got 7"),
        (lambda: routes.record([routes.joined(ids(8, 5))], [NUM_TOKENS], shape()), "or all 3 decoder layers, got 5"),
        (lambda: routes.joined(FULL[:, 0]), r"expected integer ids \(rows, layers, slots\), got int64 \(8, 2\)"),
        (lambda: routes.joined(FULL.astype("float32")), "got float32"),
        (lambda: routes.record([routes.joined(FULL + E)], [NUM_TOKENS], shape()), r"expert ids in \[0, 8\)"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused(make, message):
    """Lost rows, unknown layers, and other ranks and types raise ValueError."""
    with pytest.raises(ValueError, match=message):
        make()


def table(blocks: dict[str, list[int]], size: int = 2):
    """Cache slots from a block table, as the worker computes them."""
    return lambda name, start, stop: np.array([blocks[name][p // size] * size + p % size for p in range(start, stop)])


def test_a_shared_block_brings_its_routes():
    """A request that starts after cached rows gets the routes under their cache slots, those of this very step too."""
    store = RouteStore(3, K, E, 16)
    blocks = table({"a": [5, 2, 7], "b": [5, 2, 3]})
    rows = ids(5)
    # b is in the same step as a, and shares the blocks that a computes in it; b's row is first in the batch.
    store.add(EngineStep(["b", "a"], [4, 0], [1, 5]), np.concatenate([rows[4:], rows]), blocks)
    assert np.array_equal(store.take("b", 5), rows)
    store.forget_cache()
    store.add(EngineStep(["c"], [4], [1]), rows[4:], table({"c": [5, 2, 1]}))
    taken = store.take("c", 5)
    assert (taken[:4] == -1).all() and np.array_equal(taken[4:], rows[4:])


def test_the_last_run_of_a_row_wins_and_overruns_are_cut():
    """A preempted request's rows are those of its second run; rows past the end, of no run at all, are cut or -1."""
    store = RouteStore(3, K, E, 0)
    first, second = ids(4), (ids(6) + 1) % E
    store.add(EngineStep(["a"], [0], [4]), first, table({}))
    store.add(EngineStep(["a"], [0], [3]), second[:3], table({}))
    assert np.array_equal(store.take("a", 4), np.concatenate([second[:3], first[3:]]))
    store.add(EngineStep(["a"], [0], [6]), second, table({}))
    assert np.array_equal(store.take("a", 5), second[:5])
    assert (store.take("never run", 2) == -1).all()


def drawn_rows(seed: int, num_prompt: int, num_rows: int, num_features: int, cuts: list[int]) -> list[int]:
    """The feature rows of a request of so many rows, run in steps that begin at the cuts, and two rows too many."""
    store = FeatureStore()
    keys = torch.rand(40, generator=stream(seed, "keys"), dtype=torch.float64)
    store.open("a", FeatureRequest(num_prompt, num_features, keys))
    edges = sorted({0, *(c for c in cuts if c < num_rows), num_rows + 2})
    for start, stop in itertools.pairwise(edges):
        hidden = torch.arange(start, stop).float()[None, :, None]
        store.add(EngineStep(["b", "a"], [0, start], [1, stop - start]), torch.cat([-hidden[:, :1], hidden], 1),
                  torch.cat([-hidden[:, :1], hidden], 1).repeat(1, 1, E))  # fmt: skip
    rows, hidden, logits = store.take("a", num_rows)
    assert torch.equal(hidden[:, 0, 0].long(), rows)
    assert torch.equal(logits[:, 0], rows[:, None].float().expand(-1, E))
    return rows.tolist()


@given(
    st.integers(0, 1000), st.integers(1, 9), st.integers(1, 20), st.integers(1, 6), st.lists(st.integers(0, 30))
)  # fmt: skip
def test_a_draw_does_not_depend_on_the_steps(seed, num_prompt, length, num_features, cuts):
    """min(T_c, n) rows of those that predict response tokens, the same for every division into engine steps."""
    num_rows = num_prompt - 1 + length
    rows = drawn_rows(seed, num_prompt, num_rows, num_features, cuts)
    assert rows == drawn_rows(seed, num_prompt, num_rows, num_features, [])
    assert len(rows) == min(num_features, length)
    assert rows == sorted(rows) and rows[0] >= num_prompt - 1 and rows[-1] < num_rows


@pytest.mark.parametrize("length", [5, 9])
def test_rows_are_drawn_uniformly_whatever_the_length(length):
    """Each of n rows is among T_c = 3 with frequency 3 / n, within 4 binomial standard errors over 1,000 draws."""
    draws = 1000
    counts = Counter(row for seed in range(draws) for row in drawn_rows(seed, 2, 1 + length, 3, [4]))
    p = 3 / length
    assert set(counts) == set(range(1, 1 + length))
    assert all(abs(count / draws - p) <= 4 * (p * (1 - p) / draws) ** 0.5 for count in counts.values())


def test_features_that_could_be_cut_later_are_of_more_rows():
    """The rows drawn from any beginning of n rows are T_c (1 + H_n - H_T_c) on average, about T_c (1 + ln(n / T_c)): as
    many would have to be kept for a cut afterwards. Row i is drawn from its own beginning with probability T_c / i; the
    mean of 200 draws is within 4 standard errors."""
    num, n, draws = 3, 24, 200
    chances = [min(1.0, num / i) for i in range(1, n + 1)]
    counts = [
        len(set().union(*(drawn_rows(seed, 1, length, num, []) for length in range(1, n + 1)))) for seed in range(draws)
    ]
    error = (sum(p * (1 - p) for p in chances) / draws) ** 0.5
    assert abs(sum(counts) / draws - sum(chances)) <= 4 * error
    assert sum(chances) == pytest.approx(num * (1 + sum(1 / i for i in range(num + 1, n + 1))))
