"""docs/reference-ranges.md: published figures, and the sandbox's check against them.

`python -m tests.pages.reference_ranges` writes the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.doctor.published import K3, REPORTS, Report
from lab.doctor.standing import GROUPS, MEASURES, reported
from lab.markdown import markdown_table
from lab.report.style import number
from tests.pages.reality import FIT_DRAWS, RESULTS, TEST_DRAWS, WITHIN, Prediction, read

INTRO = """# What is normal

Is a k3 KL of 1e-3 between vLLM and Megatron a lot? This page lists published figures of the mismatch between the engine
that samples (mu) and the trainer at the same weights (old), each with its source: papers, and issues and pull requests
of verl, prime-rl, NeMo-RL, miles and others. `firstorder doctor` compares a trace with them.

A range covers the values that were reported, which are not all harmless: people report the runs that they investigated.
Values are as printed, to four digits; several values in a cell are several steps or runs, named in the last column.
Most sources give one seed and no interval. The rows are in `lab/doctor/published.py`; this page is written by
`python -m tests.pages.reference_ranges > docs/reference-ranges.md`.

## The figures

rho = old/mu of a token that mu sampled.
"""

RANGES = """## Ranges

Reports that name a fault, or whose formats are not known, are left out. Dense models are included, and so are reports
of no stated precision, with the framework's default. *FP8 or MXFP8* is on one side or both. Of two middle values the
median is the larger. A figure is compared only with figures of the same formula.
"""

ROWS = """## Reports

"Not known" is a format that the source does not give. The last column says if a framework's default was assumed.
"""


REALITY = """## Does the sandbox have these figures?

The engine of the sandbox's model (`configs/arithmetic.yaml`, 2 layers of 8 experts) gets one noise, fitted to a
report's k3 KL alone. If its mismatch is like that of the report, its other figures are, too. The factor within which
each was expected was written down before the first run (`tests/pages/reality.py`). {fit} draws of a batch fit the
noise, {test} others are measured. "Off by" is found over published; for Pearson's r it compares 1 - r.

{score}
"""

READING = """
Under noise on next-token logits, k1 and chi2 follow from k3, as they must for small errors without a tail (chi2 is
about twice k3). The other figures do not carry over. At the same k3 the sandbox's probability and log-probability
differences are too small: its KL is concentrated on fewer tokens. Under noise on router logits the tail is also too
heavy (F(2) up to 44 times, chi2 3.4 times the reported value): one changed expert is half of a token's experts here,
and an eighth in Qwen3-30B-A3B. That tail makes k3 itself vary: on the measured draws it is up to 2.1 times the target.
Treat the sandbox's F(2) and chi2 under router noise as an upper end, not as a forecast. Moonlight's F(2) cannot be
tested on 82,000 tokens: the expected count is 1.4.
"""


def page() -> str:
    """The whole page."""
    measures = [(m.title, m.formula) for m in MEASURES.values()]
    parts = [
        f"{INTRO}\n{markdown_table(('figure', 'formula'), measures)}",
        f"{RANGES}\n{ranges()}",
        ROWS,
        *(f"### {MEASURES[name].title}\n\n{rows(name)}" for name in MEASURES),
        reality(read(RESULTS)),
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


def reality(predictions: Sequence[Prediction]) -> str:
    """The check against published runs: the number of figures as near as expected, each figure, and the conclusion."""
    out, held = [], []
    for p in predictions:
        for name in (name for name in p.published if name != K3):
            factor, within = p.factor(name), WITHIN[name]
            held.append(1 / within <= factor <= within)
            fitted = f"{p.found[K3]:.2g} for {p.published[K3]:.2g}"
            values = (f"{p.published[name]:.4g}", f"{p.found[name]:.4g}", f"{factor:.2g}", f"{within:g}")
            out.append(
                (p.model, p.source, p.family, fitted, MEASURES[name].title, *values, "yes" if held[-1] else "no")
            )
    titles = ("model", "source", "noise", "k3", "figure", "published", "found", "off by", "expected within", "held")
    score = f"{sum(held)} of {len(held)} figures are as near as expected."
    return REALITY.format(fit=FIT_DRAWS, test=TEST_DRAWS, score=score) + "\n" + markdown_table(titles, out) + READING


def rows(name: str) -> str:
    """Every report of a figure, those with a named fault last."""
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
