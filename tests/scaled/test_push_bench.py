"""The benchmark of pushes runs: real ranks and engines, in every row."""

from __future__ import annotations

import re

from scaled.cluster import push_bench
from tests.scaled.ray_marks import RAY

pytestmark = RAY


def test_every_row_has_a_rate() -> None:
    """An eighth of a GiB, one round: a line for each row, with its median, least and most, and the GB that travel."""
    table = push_bench.main(1 / 8, 1)
    lines = re.findall(r"^\| ([a-z0-9, ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert [name for name, *_ in lines] == [*push_bench.WAYS, push_bench.BOUND]
    assert all(float(least) == float(middle) == float(most) > 0 for _, middle, least, most, _ in lines)
    # 2^27 bytes in bf16; ranks that quantise send a byte per weight, with 4 more for every 128 x 128.
    assert [sent for *_, sent in lines] == ["0.13", "0.13", "0.07", "0.07", "0.13", "0.00"]
