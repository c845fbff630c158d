"""Every row of lab/doctor/published.py, from which docs/reference-ranges.md is written, has a source."""

from __future__ import annotations

import re

from lab.doctor.published import REPORTS
from lab.doctor.standing import MEASURES


def test_every_report_says_where_it_is_from() -> None:
    """A row has a figure that is known, finite values above 0, and a link that its source names."""
    for report in REPORTS:
        assert report.figures and set(report.figures) <= set(MEASURES)
        assert all(value > 0 for values in report.figures.values() for value in values)
        if report.source.startswith("R3"):
            assert report.link == "https://arxiv.org/abs/2510.11370"
            continue
        repository, number = report.source.split("#")
        assert re.fullmatch(rf"https://github.com/[\w-]+/{repository}/(pull|issues)/{number}", report.link)
