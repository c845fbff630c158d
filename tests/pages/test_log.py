"""LOG.md keeps its form: entries of at most fifteen lines, newest first, and no prose wider than 120 columns."""

from __future__ import annotations

import re
from pathlib import Path

LOG = Path(__file__).parents[2] / "LOG.md"


def test_entries_are_short_and_newest_first() -> None:
    """A date and a question head each entry; empty lines do not count; titles and tables may be wider."""
    text = LOG.read_text(encoding="utf-8")
    entries = re.split(r"(?m)^## ", text)[1:]
    dates = [re.fullmatch(r"(\d{4}-\d\d-\d\d): .+", entry.split("\n", 1)[0]) for entry in entries]
    assert all(dates), [entry[:40] for entry, date in zip(entries, dates, strict=True) if date is None]
    assert [d[1] for d in dates if d] == sorted((d[1] for d in dates if d), reverse=True)
    for entry in entries:
        title, body = entry.split("\n", 1)
        lines = [line for line in body.split("\n") if line.strip()]
        assert len(lines) <= 15, f"{title}: {len(lines)} lines"
        assert max(len(line) for line in lines if not line.startswith("|")) <= 120, title
