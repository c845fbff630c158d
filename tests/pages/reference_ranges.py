"""docs/reference-ranges.md: figures that others have published, and what the sandbox says of them.

`python -m tests.pages.reference_ranges` writes the page.
"""

from __future__ import annotations

from lab.doctor.published import REPORTS, Report
from lab.doctor.standing import GROUPS, MEASURES, reported
from lab.ladder import markdown_table
from lab.report.style import number

INTRO = """# What is normal

Published figures of the mismatch between a sampling engine (mu) and a trainer (old), each with its source. `firstorder
doctor` says where a trace stands among them. The rows are `lab/doctor/published.py`; this page is written by
`python -m tests.pages.reference_ranges > docs/reference-ranges.md`.

A range is of what was reported, not of what is harmless: people report what they looked at. Values are as printed, to
four digits; several in a cell are several steps or runs, named in the last column. Most sources give one seed and no
interval.

## The figures

rho = old/mu of a token that mu sampled.
"""

RANGES = """## Ranges

Over reports in which no fault is named. A formula is compared with the same formula alone.
"""

ROWS = """## Reports

"Not known" is a format that the source does not give. Where a framework's default was taken, the last column says so.
"""


def page() -> str:
    """The whole page."""
    measures = [(m.title, m.formula) for m in MEASURES.values()]
    parts = [
        f"{INTRO}\n{markdown_table(('figure', 'formula'), measures)}",
        f"{RANGES}\n{ranges()}",
        ROWS,
        *(f"### {MEASURES[name].title}\n\n{rows(name)}" for name in MEASURES),
    ]
    return "\n".join(parts)


def ranges() -> str:
    """The least, the median and the largest value of each figure in each group that has any."""
    out = []
    for name, measure in MEASURES.items():
        for group in GROUPS:
            if known := reported(name, group):
                ends = (number(known[0]), number(known[len(known) // 2]), number(known[-1]))
                out.append((measure.title, group, len(known), *ends))
    return markdown_table(("figure", "reported for", "values", "least", "median", "largest"), out)


def rows(name: str) -> str:
    """Every report of a figure, those of a named fault last."""
    kept = sorted((report for report in REPORTS if name in report.figures), key=lambda report: bool(report.fault))
    titles = ("model", "engines", "formats, mu and old", "routes replayed", "value", "source", "fault", "note")
    return markdown_table(titles, [_row(report, name) for report in kept])


def _row(report: Report, name: str) -> tuple[str, ...]:
    formats = ", ".join(form or "not known" for form in report.formats)
    values = ", ".join(f"{value:.4g}" for value in report.figures[name])
    replayed = "yes" if report.replay else "no"
    link = f"[{report.source}]({report.link})"
    return (report.model, report.engines, formats, replayed, values, link, report.fault, report.note)


if __name__ == "__main__":
    print(page(), end="")
