"""docs/border.md, its pictures, its map to click and its lines in the README.

`python -m tests.pages.border` writes all of it from the rows.
"""

from __future__ import annotations

import re

from sandbox.border.explorer import explorer
from sandbox.border.page import markdown
from sandbox.border.pictures import gains, phase_diagram, svg
from sandbox.border.table import places, runs, where
from sandbox.claims import REGIMES
from sandbox.ledger.summary import waiting_text
from tests.pages.ledger import found, kept
from tests.pages.study import ROOT, Part

README, DOCS = ROOT / "README.md", ROOT / "docs"
PART = Part(README, "border")
(BORDER,) = (one for one in REGIMES if one.name == "border")
STUDY = range(36, 51)
"""Numbers of the claims that the study tests; those that repeat one of them belong to it, too."""


def page() -> str:
    """docs/border.md."""
    own = [one for one in found() if {one.claim.number, one.claim.repeats} & set(STUDY)]
    return markdown(kept(), BORDER, own, waiting_text(found()))


def block(text: str) -> str:
    """The README's lines on the study, between its two marks: counts and the best number, from the page's tables."""
    before, _, after = text.partition("## A gap without an error")
    own, stale, aged = (_collapsed(part) for part in (before, *after.split("## Partial rollouts")))
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| [^|]+ \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|", text, re.MULTILINE)
    ((tried, names),) = re.findall(
        r"^(Of \d+ numbers tried, .* (?:equally well|best))[:.](.*(?:\n.*)?)", text, re.MULTILINE
    )
    # Of numbers that are alike the one in which the regimes are placed, whichever leads by a hair today.
    name, border, low, high = next((row for row in rows if row[0] == "KL x N" and "`KL x N`" in names), rows[0])
    claims = dict(re.findall(r"^- Claim (\d+): .* \*\*(.+)\.\*\*$", text, re.MULTILINE))
    bare, r2, r3, tis, exact = (own[name] for name in ("no remedy", "R2", "R3", "token TIS", "an exact engine"))
    return (
        "- **Off policy, R3 and the token weight prevent most collapses** (counts, exploratory). With eight updates\n"
        f"  per rollout and the largest gap, training collapsed in {bare} runs without a remedy, {r2} with R2,\n"
        f"  {r3} with R3, {tis} with Token-TIS and {exact} with an exact engine. At one update per rollout\n"
        f"  the weight lowers accuracy (claim 46: {claims['46']}). {tried.replace('`', '')};\n"
        f"  half of the runs without a remedy collapse at {name} = {border} ({low} to {high}),\n"
        "  N being the updates per rollout; [where training breaks](docs/border.md).\n"
        "- **Age ends training, too.** With an exact engine whose weights are one rollout old\n"
        f"  (claim 49: {claims['49']}), {stale['no remedy']} runs collapse, {stale['R3']} with R3 and\n"
        f"  {stale['token TIS']} with Token-TIS; with partial rollouts (claim 50: {claims['50']}) "
        f"{aged['kept, no remedy']},\n"
        f"  {aged['kept, R3']} and {aged['kept, token TIS']} ([study](docs/border.md)).\n"
    )


def _collapsed(text: str) -> dict[str, str]:
    """Per remedy, `n of m` collapsed runs, from the first table of the text that has a row for it."""
    # Reversed, so that of several tables the first one wins.
    return dict(reversed(re.findall(r"^\| ([\w, ]+) \| (\d+ of \d+) \|", text, re.MULTILINE)))


def map_to_click() -> str:
    """docs/border-map.html."""
    return explorer(kept(), BORDER)


def pictures() -> dict[str, str]:
    """File name to SVG text: the phase diagram, and the gain of each remedy by N."""
    grpo = where(runs(kept(), BORDER), preset="grpo")
    return {"border.svg": svg(phase_diagram(places(grpo))), "border-gains.svg": svg(gains(grpo))}


if __name__ == "__main__":
    text = page()
    (DOCS / "border.md").write_text(text, encoding="utf-8")
    (DOCS / "border-map.html").write_text(map_to_click(), encoding="utf-8")
    PART.write(block(text))
    for name, text in pictures().items():
        (DOCS / "images" / name).write_text(text, encoding="utf-8")
