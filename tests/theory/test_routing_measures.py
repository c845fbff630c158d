"""Routing measures: R3's and Pr2's definitions by brute force over rows, and what missing rows may not do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from theory.contracts import Prompt, Response, Rollouts, TokenScores
from theory.metrics import REGISTRY
from theory.routing import measures, record
from theory.routing.features import RouterFeatures
from theory.routing.measures import (
    difference_counts,
    route_distances,
    route_kl,
    route_tv,
    router_disagreement,
    router_disagreement_by_layer,
    router_level_histogram,
    routing_metrics,
    sequence_level_histogram,
    token_disagreement,
    token_level_histogram,
)
from theory.routing.passes import PASSES
from theory.routing.payloads import pack_record
from theory.routing.record import MISSING, RoutingRecord, index_dtype
from theory.step_metrics import old_pass_metrics
from theory.streams import stream

LAYERS = (0, 3)
E = 6
seeds = st.integers(0, 9999)
num_rows_lists = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def draw_record(seed: int, num_rows: list[int], K: int, num_missing: int = 0) -> RoutingRecord:
    """A random record over two layers; `num_missing` row-layers of each response are lost."""
    generator = stream(seed, "record")
    payloads = []
    for n in num_rows:
        # Few experts in play, so that two records agree about as often as not.
        # Expert 0 stays out: a top-1 layer that holds nothing else is refused as an unfilled buffer.
        ids = torch.rand(n, len(LAYERS), K + 1, generator=generator).argsort(dim=-1)[..., :K] + 1
        ids[torch.randperm(n, generator=generator)[:num_missing], 1] = MISSING
        payloads.append(ids)
    return pack_record(payloads, [n + 1 for n in num_rows], LAYERS, E)


def brute_force(a: RoutingRecord, b: RoutingRecord) -> dict[str, list[float]]:
    """d of every comparable (row, layer), token and sequence, one at a time as App. H writes them."""
    routers, tokens, sequences = [], [], []
    for i in range(len(a)):
        in_sequence = []
        for row_a, row_b in zip(a.rows(i).tolist(), b.rows(i).tolist(), strict=True):
            d = [len(x) - len(set(x) & set(y)) if x[0] >= 0 and y[0] >= 0 else None
                 for x, y in zip(row_a, row_b, strict=True)]  # fmt: skip
            routers += [x for x in d if x is not None]
            if None not in d:
                in_sequence.append(sum(d))
        tokens += in_sequence
        if in_sequence:
            sequences.append(sum(in_sequence) / len(in_sequence))
    return {"routers": routers, "tokens": tokens, "sequences": sequences}


def shares(values: list[float], largest: int) -> list[float]:
    """The share of values in [x, x + 1) for x = 0..largest."""
    return [sum(x <= v < x + 1 for v in values) / len(values) for x in range(largest + 1)]


@given(seed=seeds, num_rows=num_rows_lists, K=st.integers(1, 4), num_missing=st.integers(0, 1))
def test_measures_are_the_papers_definitions(seed: int, num_rows: list[int], K: int, num_missing: int) -> None:
    """Histograms and scalars equal loops over tokens and layers; missing rows are left out (R3 App. H, Pr2 5.4)."""
    num_rows = [*num_rows, 3]  # at least one whole row
    a, b = draw_record(seed, num_rows, K, num_missing), draw_record(seed + 1, num_rows, K)
    truth = brute_force(a, b)
    routers, tokens, sequences = truth["routers"], truth["tokens"], truth["sequences"]
    assert router_level_histogram(a, b).tolist() == pytest.approx(shares(routers, K))
    assert token_level_histogram(a, b).tolist() == pytest.approx(shares(tokens, 2 * K))
    assert sequence_level_histogram(a, b).tolist() == pytest.approx(shares(sequences, 2 * K))
    expected = {
        "routing/router_disagreement": sum(x > 0 for x in routers) / len(routers),
        "routing/token_disagreement": sum(x > 0 for x in tokens) / len(tokens),
        "routing/sequence_mean_difference": sum(sequences) / len(sequences),
        "routing/topk_agreement": sum(1 - x / K for x in routers) / len(routers),
        "routing/zero_deviation": sum(x == 0 for x in routers) / len(routers),
        "routing/one_deviation": sum(x == 1 for x in routers) / len(routers),
    }
    found = routing_metrics(a, b)
    assert found == pytest.approx(expected)
    # The same bits without the one that groups rows by response.
    del found["routing/sequence_mean_difference"]
    assert routing_metrics(a, b, has_sequences=False) == found
    for measure in (router_disagreement, token_disagreement):
        assert measure(a, b) == pytest.approx(expected[f"routing/{measure.__name__}"])


@pytest.mark.parametrize("block", [1, 5])
def test_a_record_is_checked_and_counted_some_rows_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by ones and twos give the same counts, of rows, layers and differences, and name the same misplaced id."""
    a, b = draw_record(0, [4, 0, 5], 2, 1), draw_record(1, [4, 0, 5], 2)
    whole = measures.route_counts(a, b)
    monkeypatch.setattr(measures, "COUNTED", block)
    monkeypatch.setattr(record, "CHECKED", block)
    parts = measures.route_counts(a, b)
    for name in ("num_d", "sum_R", "num_missing_R"):
        assert torch.equal(getattr(parts, name), getattr(whole, name)), name
    none = a.select([1])
    assert measures.route_counts(none, none).num_d.tolist() == [0, 0, 0]
    bad = b.experts.clone()
    bad[7, 1] = bad[7, 1].flip(0)
    with pytest.raises(ValueError, match=rf"response 2, row 3, layer {LAYERS[1]}: expected distinct"):
        RoutingRecord(bad, b.offsets, b.layer_numbers, b.num_experts)


def test_disjoint_routes_differ_in_every_slot() -> None:
    """Records without a common expert have d = K everywhere, and d = -1 marks rows that cannot be compared."""
    payload = torch.tensor([[[0, 1], [0, 1]], [[2, 1], [-1, -1]]])
    a = pack_record([payload], [3], LAYERS, E)
    b = pack_record([torch.tensor([[[4, 5], [4, 5]], [[1, 2], [1, 2]]])], [3], LAYERS, E)
    assert difference_counts(a, b).tolist() == [[2, 2], [0, -1]]
    assert router_disagreement(a, b) == pytest.approx(2 / 3)
    assert routing_metrics(a, b)["routing/sequence_mean_difference"] == 4
    assert token_level_histogram(a, b).tolist() == [0, 0, 0, 0, 1]


def test_a_layer_that_one_record_lacks_leaves_the_routers_of_the_others() -> None:
    """Without a whole row, router metrics are those of rows and layers that both have, and token metrics are absent."""
    whole = draw_record(0, [2, 3], 2)
    kept = whole.experts[:, :1].expand(-1, 2, -1).clone()
    part = whole.experts.flip(0).clone()
    part[:, 1] = MISSING
    offsets, layers = whole.offsets, whole.layer_numbers
    found = routing_metrics(whole, RoutingRecord(part, offsets, layers, E))
    # The same comparison with the layer that is left in both places: routers are then counted twice.
    twice = RoutingRecord(part[:, :1].expand(-1, 2, -1).clone(), offsets, layers, E)
    both = routing_metrics(RoutingRecord(kept, offsets, layers, E), twice)
    routers = ("router_disagreement", "topk_agreement", "zero_deviation", "one_deviation")
    assert found == pytest.approx({f"routing/{name}": both[f"routing/{name}"] for name in routers})
    assert found["routing/router_disagreement"] > 0


def test_no_data_is_an_error_not_a_zero() -> None:
    """Records with no common row, or over other rows, cannot be compared."""
    whole = draw_record(0, [2], 2)
    lost = pack_record([torch.full((2, 2, 2), MISSING)], [3], LAYERS, E)
    assert routing_metrics(whole, lost) == {}
    with pytest.raises(ValueError, match="present in both records, got none of 4"):
        router_disagreement(whole, lost)
    with pytest.raises(ValueError, match="at every layer, got none of 2"):
        token_disagreement(whole, lost)
    with pytest.raises(ValueError, match=r"expected \[2\] rows per response, got \[3\]"):
        difference_counts(whole, draw_record(0, [3], 2))
    for distance in (route_kl, route_tv):
        with pytest.raises(ValueError, match="at least 1 feature row, got 0"):
            distance(torch.zeros(0, 2, 3), torch.zeros(0, 2, 3))


@given(seed=seeds)
def test_route_kl_is_the_mean_over_rows_and_layers(seed: int) -> None:
    """KL(p || q) term by term, not negative, 0 for logits that differ by a shift, and directed."""
    generator = stream(seed, "logits")
    p, q = torch.randn(3, 2, 4, generator=generator), torch.randn(3, 2, 4, generator=generator)
    expected = 0.0
    for f in range(3):
        for i in range(2):
            x, y = p[f, i].softmax(0), q[f, i].softmax(0)
            expected += float((x * (x / y).log()).sum()) / 6
    assert route_kl(p, q).item() == pytest.approx(expected, rel=1e-10)
    assert route_kl(p, q).item() >= 0
    assert route_kl(p, p + 3).item() == pytest.approx(0, abs=1e-14)
    assert route_kl(p, q).item() != pytest.approx(route_kl(q, p).item(), rel=1e-6)


def test_a_replay_that_does_nothing_is_noticed() -> None:
    """routing/noop: every route equals the natural one although the engines disagree; one changed route clears it.

    Of a nan nothing is known.
    """
    record, other = draw_record(0, [3, 4], 2, num_missing=1), draw_record(1, [3, 4], 2)
    tokens, logp_T, sampled_T = torch.tensor([1, 2]), -torch.ones(2), torch.ones(2, dtype=torch.bool)
    prompts = [Prompt(str(n), (1,) * n, "") for n in (2, 3)]
    responses = tuple(Response(prompt, tokens, logp_T, sampled_T, "stop", 0) for prompt in prompts)

    def noop(natural: RoutingRecord, logp: float) -> float | None:
        scores = TokenScores(torch.full((2, 2), logp), torch.zeros(2, 2), experts=record, natural=natural)
        return old_pass_metrics(Rollouts(responses, record), scores, PASSES["R3"]).get("routing/noop")

    assert noop(record, -1.01) == 1
    assert noop(record, -1.0) == noop(other, -1.01) == 0
    assert noop(record, math.nan) is None


def test_a_record_agrees_with_itself() -> None:
    """Equal records differ in nothing; every scalar carries a name of the registry."""
    record = draw_record(0, [2], 2)
    found = routing_metrics(record, record)
    assert found == {
        "routing/router_disagreement": 0,
        "routing/token_disagreement": 0,
        "routing/sequence_mean_difference": 0,
        "routing/topk_agreement": 1,
        "routing/zero_deviation": 1,
        "routing/one_deviation": 0,
    }
    assert set(found) <= set(REGISTRY)


@given(st.integers(0, 10_000), st.floats(0.0, 5.0))
@example(1, 2.617949001192777e-10)  # a KL that rounding makes negative
@example(242, 1.9845139782008135e-08)
def test_route_tv_is_a_mean_within_pinskers_bound(seed: int, scale: float) -> None:
    """The mean over rows and layers of half the summed differences; symmetric, and at most sqrt(route_kl / 2)."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    q = p + scale * torch.randn(4, 2, 3, generator=generator, dtype=torch.float64)
    expected = sum(
        float((p[f, layer].softmax(0) - q[f, layer].softmax(0)).abs().sum()) / 2 for f in range(4) for layer in range(2)
    )
    assert route_tv(p, q).item() == pytest.approx(expected / 8, abs=1e-12)
    assert route_tv(p, q).item() == route_tv(q, p).item()
    # A row's KL is a sum of three p log(p / q): float64 rounds each p log p, at most 1/e, to 4e-17 or better.
    assert route_kl(p, q).item() >= 0
    assert route_tv(p, q).item() <= math.sqrt((route_kl(p, q).item() + 1e-15) / 2)


@pytest.mark.parametrize("num_experts", [5, 64, 128, 300])
@pytest.mark.parametrize("num_slots", [1, 3, 4])
def test_counts_of_rows_in_blocks_are_those_of_sets(num_experts, num_slots, monkeypatch):
    """Of every type of ids and width of a row, over several blocks, d is K less what two sets have in common."""
    monkeypatch.setattr(measures, "BLOCK", 7)
    draws = stream(0, "blocks", num_experts, num_slots)
    ids = torch.rand(2, 10, 3, num_experts, generator=draws).argsort(dim=-1)[..., :num_slots].sort(dim=-1).values
    ids[1, ::2] = ids[0, ::2]  # half of the rows are equal
    ids[0, 3], ids[1, 4], ids[:, 5] = -1, -1, -1
    offsets, kind = torch.tensor([0, 10]), index_dtype(num_experts)
    a, b = (RoutingRecord(one.to(kind), offsets, (0, 1, 2), num_experts) for one in ids)
    for row in range(10):
        for layer in range(3):
            left, right = (set(r.experts[row, layer].tolist()) for r in (a, b))
            expected = -1 if -1 in left | right else num_slots - len(left & right)
            assert difference_counts(a, b)[row, layer] == expected
    assert len(difference_counts(a, b).unique()) > 2


@given(seeds, num_rows_lists)
def test_a_layer_by_itself_is_a_record_of_that_layer(seed: int, num_rows: list[int]) -> None:
    """The disagreement by layer is that of records cut to one layer; a layer without a row in both is left out."""
    a, b = draw_record(seed, num_rows, 2, num_missing=1), draw_record(seed + 1, num_rows, 2)
    found = router_disagreement_by_layer(a, b)
    for column, number in enumerate(LAYERS):
        cut = [RoutingRecord(r.experts[:, [column]], r.offsets, (number,), r.num_experts) for r in (a, b)]
        if bool((difference_counts(*cut) != MISSING).any()):
            assert found[number] == pytest.approx(router_disagreement(*cut), rel=1e-6)
        else:
            assert number not in found


def test_route_distances_of_equal_logits_are_zero_and_of_nothing_known_nan() -> None:
    """(0, 0) for a router compared with itself, as both measures give; an infinite or undefined logit leaves a nan."""

    def features(logits_FLE: torch.Tensor) -> RouterFeatures:
        return RouterFeatures(
            torch.arange(len(logits_FLE)), torch.tensor([0, len(logits_FLE)]), None, logits_FLE, (0, 2)
        )

    logits = torch.randn(5, 2, 4, generator=stream(0, "equal"))
    same = features(logits), features(logits.clone())
    assert route_distances(*same) == (0.0, 0.0) == (route_kl(logits, logits).item(), route_tv(logits, logits).item())
    for bad in (math.inf, math.nan):
        logits[3, 1, 2] = bad
        assert all(math.isnan(distance) for distance in route_distances(features(logits), features(logits.clone())))
