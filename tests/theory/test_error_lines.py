"""The errors of a caller who got it wrong: one line with the field, what was expected and what came."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from theory.exact.groups import Group, classes, moments
from theory.objectives import combine_metrics, preset
from theory.objectives.kl_penalty import kl_pi_ref
from theory.routing.packed_rows import check_offsets
from theory.routing.payloads import pack_record
from theory.routing.record import MISSING, RoutingRecord, index_dtype

IDS = torch.tensor([[[0, 1]], [[1, 2]]])
LOGP = torch.tensor([[-1.0]])


def record() -> RoutingRecord:
    """Two rows over layer 3."""
    return pack_record([IDS], [3], (3,), 4)


def many_classes() -> None:
    """Groups of 32 from 10 classes: C(41, 9) vectors of counts."""
    rewards = torch.arange(10.0)
    moments(
        preset("minirl"), 32, classes(torch.full((10,), 0.1), rewards, torch.ones(10) > 0, torch.ones(10).long(), False)
    )


LINES: dict[str, Callable[[], object]] = {
    "expected at most 2147483648 experts, got 2147483649": lambda: index_dtype(2**31 + 1),
    "expected from 1 to 4 slots, got 5": lambda: RoutingRecord(
        torch.arange(5, dtype=torch.int8).view(1, 1, 5), torch.tensor([0, 1]), (3,), 4
    ),
    "expected a payload for each of 2 responses, got 1 payloads": lambda: pack_record([IDS], [3, 3], (3,), 4),
    "expected a payload for each of 0 responses, got 0 payloads": lambda: pack_record([], [], (3,), 4),
    "response 1: expected 2 slots as in response 0, got 1": lambda: pack_record([IDS, IDS[..., :1]], [3, 3], (3,), 4),
    "expected 0 <= start <= stop, got [2, 1)": lambda: record().part(rows=(2, 1)),
    "expected 0 <= start <= stop, got [-1, 1)": lambda: record().part(rows=(-1, 1)),
    "expected at least one record, got none": lambda: RoutingRecord.concat([]),
    "expected (layers, slots, experts) ((3,), 2, 4), got ((3,), 2, 5)": lambda: record().check_same_rows(
        pack_record([IDS], [3], (3,), 5)
    ),
    "response 0: expected ids of shape (rows, layers, slots), got (2, 2)": lambda: pack_record(
        [IDS[:, 0]], [3], (3,), 4
    ),
    "response 0: expected layers [1, 7], got a payload of [0, 1, 2] without [7]": lambda: pack_record(
        [IDS.expand(-1, 3, -1)], [3], (1, 7), 4, num_decoder_layers=3
    ),
    "expected offsets that rise from 0 to 2 rows, got []": lambda: check_offsets(torch.zeros(0, dtype=torch.int64), 2),
    "expected offsets that rise from 0 to 2 rows, got [1, 2]": lambda: check_offsets(torch.tensor([1, 2]), 2),
    "expected at least 1 response token in the parts together, got 0": lambda: combine_metrics([(0, {}), (0, {})]),
    "unknown KL estimator 'k4': did you mean 'k3'? (expected one of: k1, k2, k3, k3+, k3_is)": lambda: kl_pi_ref(
        LOGP, LOGP, "k4"
    ),
    "minirl: kl_coefficient: expected a number, got 'much'": lambda: preset("minirl", kl_coefficient="much"),
    "num_responses: expected at least 2 or None (infinitely many), got 1": lambda: Group(1),
    "unknown baseline 'median': did you mean 'mean'? (expected one of: mean, none)": lambda: Group(None, "median"),
    "expected a generator: 350,343,565 groups of 32 from 10 classes are too many to enumerate (at most 200,000)": (
        many_classes
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_the_line_is_this_one(line: str) -> None:
    """The whole message, to the character."""
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        LINES[line]()


def test_what_is_no_error() -> None:
    """The corners next to the errors: an empty window, a record without rows, E experts in as many slots."""
    assert record().part(rows=(1, 1)).num_rows_B == [0]
    assert len(record().select([])) == 0
    assert record().select([]).padded(0).shape[0] == 0
    assert pack_record([IDS[:0]], [1], (3,), 4).num_rows_B == [0]
    everything = torch.arange(4, dtype=torch.int8).view(1, 1, 4)
    assert RoutingRecord(everything, torch.tensor([0, 1]), (3,), 4).num_slots == 4
    assert pack_record([torch.full((2, 1, 2), MISSING)], [3], (3,), 4).num_missing_rows == 2
