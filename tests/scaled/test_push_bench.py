"""The benchmark of pushes runs: real ranks and engines, both ways that the bytes take."""

from __future__ import annotations

import re

import pytest

from scaled.cluster import push_bench


# Ray leaves its sockets and log files to the end of the process.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.slow
def test_both_ways_have_a_rate() -> None:
    """A sixteenth of a GiB, one round: a line for each way, with its median, least and most."""
    table = push_bench.main(1 / 16, 1)
    lines = re.findall(r"^\| ([a-z ]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)
    assert [way for way, *_ in lines] == ["from ranks to engines", "through the driver"]
    assert all(float(least) == float(middle) == float(most) > 0 for _, middle, least, most in lines)
