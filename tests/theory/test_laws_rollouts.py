"""Laws of the containers between the engines: what is padded, selected and joined is what was sampled, and no more."""

from __future__ import annotations

import pickle
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from theory.contracts import Prompt, Response, Rollouts
from theory.objectives import preset
from theory.routing.features import RouterFeatures, sampling_rows
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.streams import stream

LENGTHS = ((3, 4), (1, 1), (5, 2))


def draw_rollouts() -> Rollouts:
    """Three ragged responses; the first has a tool's tokens in its middle and ends in a sampled one."""
    generator = stream(0, "rollouts")
    responses = []
    for b, (P, T) in enumerate(LENGTHS):
        is_response = torch.tensor([True, False, False, True]) if b == 0 else torch.ones(T, dtype=torch.bool)
        logp_mu = torch.where(is_response, -torch.rand(T, generator=generator) - 0.1, 0.0)
        tokens = torch.randint(1, 50, (P + T,), generator=generator)
        prompt = Prompt(str(b), tuple(tokens[:P].tolist()), "")
        responses.append(Response(prompt, tokens[P:], logp_mu, is_response, "stop", version=b))
    num_rows = [P + T - 1 for P, T in LENGTHS]
    ids = torch.rand(sum(num_rows), 2, 4, generator=generator).argsort(dim=-1)[..., :2].sort(dim=-1).values
    features = RouterFeatures(
        rows=torch.tensor([2, 0, 4]), offsets=offsets_of([1, 1, 1]),
        hidden=torch.rand(3, 2, 3, generator=generator), logits=torch.rand(3, 2, 4, generator=generator),
        layer_numbers=(0, 1),
    )  # fmt: skip
    return Rollouts(tuple(responses), RoutingRecord(ids.to(torch.int8), offsets_of(num_rows), (0, 1), 4), features)


def test_padding_keeps_every_token_and_every_hole() -> None:
    """Each response comes back from the padded batch: tokens, log-probs, holes and its last token; the rest is off."""
    rollouts = draw_rollouts()
    batch = rollouts.padded()
    for b, response in enumerate(rollouts.responses):
        P, T = LENGTHS[b]
        assert batch.tokens_BS[b, : P + T].tolist() == [*response.prompt.tokens, *response.tokens.tolist()]
        assert batch.is_response_BT[b, :T].tolist() == response.is_response.tolist()
        assert torch.equal(batch.logp_mu_BT[b, :T], response.logp_mu)
        assert not batch.is_response_BT[b, T:].any()
        # Row s predicts token s + 1: the one before the response's own position.
        assert batch.predicting_row_BT[b, :T].tolist() == [P + t - 1 for t in range(T)]
    assert batch.num_prompt_B.tolist() == [P for P, _ in LENGTHS]
    assert batch.num_tokens_B.tolist() == [P + T for P, T in LENGTHS]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_padding_of_a_selection_does_not_depend_on_what_was_padded_before(order: list[int]) -> None:
    """A selection's batch is that of its own responses, whether it is made afresh or from the whole's batch."""
    fresh, rollouts = draw_rollouts(), draw_rollouts()
    rollouts.padded()
    expected = fresh.select(order).padded()
    for batch in (rollouts.select(order).padded(), rollouts.without_records().select(order).padded()):
        for field in fields(expected):
            want, got = getattr(expected, field.name), getattr(batch, field.name)
            assert torch.equal(got, want) if isinstance(want, Tensor) else got == want, field.name
    # Pickled, as for another process, rollouts have the same bytes whether they were padded or not.
    assert len(pickle.dumps(rollouts)) == len(pickle.dumps(draw_rollouts()))


def test_rows_that_predict_sampled_tokens() -> None:
    """The batch's sampling rows are those of each response by itself, its holes left out."""
    rollouts = draw_rollouts()
    found = rollouts.padded().sampling_rows_B
    for rows, response in zip(found, rollouts.responses, strict=True):
        assert torch.equal(rows, sampling_rows(len(response.prompt.tokens), response.is_response))
    assert rollouts.padded().num_sampled_B == [2, 1, 2]


def test_tokens_that_mu_did_not_sample_are_in_no_objective() -> None:
    """The log-probs under a tool's tokens change neither value nor gradient (vime #70: 0 would be probability 1)."""
    batch = draw_rollouts().padded()
    A, objective = torch.tensor([1.0, -1.0, 0.5]), preset("minirl")
    results = []
    for filler in (0.0, -7.0):
        pi = torch.where(batch.is_response_BT, -1.0, filler).requires_grad_()
        value = objective(pi, pi.detach(), batch.logp_mu_BT, A, batch.is_response_BT).objective
        value.backward()
        assert pi.grad is not None
        assert torch.equal(pi.grad != 0, batch.is_response_BT)
        results.append((value.item(), pi.grad.tolist()))
    assert results[0] == results[1]
    assert int(batch.is_response_BT.sum()) == 5


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_selecting_and_joining_carry_every_field(order: list[int]) -> None:
    """Responses keep their own rows of record and features through `select` and `concat` (NeMo-RL #2849)."""
    rollouts = draw_rollouts()
    chosen = rollouts.select(order)
    joined = Rollouts.concat([rollouts.select([b]) for b in order])
    for same in (chosen, joined):
        assert [r.version for r in same.responses] == order
        assert same.experts is not None
        assert rollouts.experts is not None
        assert same.features is not None
        assert rollouts.features is not None
        for place, b in enumerate(order):
            assert torch.equal(same.experts.rows(place), rollouts.experts.rows(b))
            assert torch.equal(same.features.rows_of(place), rollouts.features.rows_of(b))
            assert torch.equal(same.features.logits[place], rollouts.features.logits[b])
    bare = Rollouts(rollouts.responses[:1])
    assert Rollouts.concat([rollouts, bare]).experts is None
