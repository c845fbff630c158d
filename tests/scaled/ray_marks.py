"""The marks of tests that start Ray."""

from __future__ import annotations

import pytest

RAY = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked"),
    # Ray leaves its sockets and log files to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
