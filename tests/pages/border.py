"""docs/border.md, its pictures, the README's words on it; `python -m tests.pages.border` writes all from the rows."""

from __future__ import annotations

import re

from sandbox.border.page import markdown
from sandbox.border.pictures import gains, phase_diagram, svg
from sandbox.border.table import places, runs, where
from sandbox.claims import REGIMES
from sandbox.ledger.summary import waiting_text
from tests.pages.ledger import found, kept
from tests.pages.study import ROOT, Part

README, DOCS = ROOT / "README.md", ROOT / "docs"
PART = Part(README, "border")
STUDY = range(36, 50)
"""Numbers of the claims that the study tries."""


def page() -> str:
    """docs/border.md."""
    (regime,) = (one for one in REGIMES if one.name == "border")
    return markdown(kept(), regime, [one for one in found() if one.claim.number in STUDY], waiting_text(found()))


def block(text: str) -> str:
    """The README's words on the study, between its two marks: counts and the best number, from its tables."""
    own, stale = (_collapsed(part) for part in text.split("## A gap without an error"))
    name, border, low, high = re.findall(
        r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", text, re.MULTILINE
    )[0]
    (verdict,) = re.findall(r"^- Claim 49: .* \*\*(.+)\.\*\*$", text, re.MULTILINE)
    fallen = [own[name] for name in ("no remedy", "R2", "R3", "token TIS", "an exact engine")]
    words = "{} runs without a remedy and in {} with R2,\n  in {} with R3, {} with Token-TIS, {} with an exact engine"
    return (
        "- **The border of stability** (counts and a fit, exploratory). At eight\n"
        f"  updates per rollout and the largest gap, training collapsed in {words.format(*fallen)}.\n"
        "  Of all numbers made of gap and staleness (N updates per rollout) one tells collapse best: half of the runs\n"
        f"  without a remedy collapse at {name} = {border} ({low} to {high}); [study](docs/border.md).\n"
        f"  Weights one rollout old, in an engine that computes exactly, end training too (claim 49: {verdict}).\n"
        f"  Collapsed: {stale['no remedy']} runs, {stale['R3']} with R3, {stale['token TIS']} with Token-TIS.\n"
    )


def _collapsed(text: str) -> dict[str, str]:
    """A remedy's runs that collapsed, of how many, in the first table of the text that has a line for it."""
    return dict(reversed(re.findall(r"^\| ([\w ]+) \| (\d+ of \d+) \|", text, re.MULTILINE)))


def pictures() -> dict[str, str]:
    """File name to SVG text: the phase diagram, and what each remedy gains by N."""
    (regime,) = (one for one in REGIMES if one.name == "border")
    table = runs(kept(), regime)
    grpo = where(table, preset="grpo")
    return {"border.svg": svg(phase_diagram(places(grpo))), "border-gains.svg": svg(gains(grpo))}


if __name__ == "__main__":
    text = page()
    (DOCS / "border.md").write_text(text, encoding="utf-8")
    PART.write(block(text))
    for name, text in pictures().items():
        (DOCS / "images" / name).write_text(text, encoding="utf-8")
