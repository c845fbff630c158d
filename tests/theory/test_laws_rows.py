"""The law of where a row stands: row s of response b is row b * width + s of the flattened batch, at every width."""

from __future__ import annotations

import pytest
import torch

from tests.theory.tiny_moe import LAYERS, D, E, K, draw_record
from theory.routing.gates import GATES
from theory.routing.passes import RoutingPlan
from theory.routing.replay import ReplayContext
from theory.streams import stream

NUM_ROWS = [4, 2, 3]


@pytest.mark.parametrize("width", [4, 5, 8])
def test_rows_stand_where_their_tokens_stand(width: int) -> None:
    """Routes, records and features of a replay, compared token by token: also where the batch is padded to a multiple.

    A record padded to its own longest response sends rows to other tokens as soon as the tokens are padded further
    (verl #5989), and is its own inverse: recording and replaying by the same wrong rule changes nothing.
    """
    record, generator = draw_record(0, NUM_ROWS), stream(0, "rows")
    N, gate = len(NUM_ROWS) * width, GATES["qwen3"]
    hidden, logits = torch.randn(N, D, generator=generator), torch.randn(N, E, generator=generator)
    rows = tuple(torch.tensor([0, n - 1]) for n in NUM_ROWS)
    routing = RoutingPlan("replay", record=record, feature_rows=rows, keep_hidden=True)
    with ReplayContext(routing, NUM_ROWS, width) as context:
        chosen = {number: context.route(number, hidden, logits, K, gate)[0] for number in LAYERS}
    used, natural, features = context.used, context.natural, context.features
    assert used is not None
    assert natural is not None
    assert features is not None
    assert features.hidden is not None
    for b, n in enumerate(NUM_ROWS):
        for s in range(n):
            at = b * width + s
            for i, number in enumerate(LAYERS):
                recorded = record.rows(b)[s, i].tolist()
                assert chosen[number][at].tolist() == recorded == used.rows(b)[s, i].tolist()
                assert natural.rows(b)[s, i].tolist() == sorted(logits[at].topk(K).indices.tolist())
        for place, s in enumerate((0, n - 1)):
            assert torch.equal(features.logits[2 * b + place, 0], logits[b * width + s])
            assert torch.equal(features.hidden[2 * b + place, 0], hidden[b * width + s])
        for at in range(b * width + n, (b + 1) * width):
            assert chosen[LAYERS[0]][at].tolist() == sorted(logits[at].topk(K).indices.tolist())
