"""docs/border.md and its tables, its pictures, its map to click and its lines in the README.

`python -m tests.pages.border` writes all of it from the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from lab.markdown import markdown_table
from sandbox.border import dual_clip
from sandbox.border.curves import entropy_picture, fit_picture
from sandbox.border.explorer import explorer
from sandbox.border.page import markdown
from sandbox.border.peaks import picture, shown_seed
from sandbox.border.pictures import gains, phase_diagram, svg
from sandbox.border.study import BorderStudy
from sandbox.border.table import places
from sandbox.border.tables_page import markdown as tables_markdown
from sandbox.claims import REGIMES
from sandbox.ledger.summary import waiting_text
from sandbox.ledger.verdicts import Finding
from tests.pages import peaks
from tests.pages.ledger import found, kept
from tests.pages.study import ROOT, Part

README, DOCS = ROOT / "README.md", ROOT / "docs"
PART = Part(README, "border")
(BORDER,) = (one for one in REGIMES if one.name == "border")
STUDY = (*range(36, 51), 58, 59, 60, *range(62, 65), 66, 67)
"""Numbers of the claims that the study tests; those that repeat one of them belong to it, too."""


@cache
def study() -> BorderStudy:
    """The study of the kept rows."""
    return BorderStudy(kept(), BORDER)


def page() -> str:
    """docs/border.md."""
    return markdown(study(), _own(), peaks.kept())


def tables() -> str:
    """docs/border-tables.md."""
    return tables_markdown(study(), _own(), waiting_text(found()))


def _own() -> list[Finding]:
    return [one for one in found() if {one.claim.number, one.claim.repeats} & set(STUDY)]


def block(text: str, tables: str) -> str:
    """The README's table and lines on the study, between its two marks: counts and x*, from the study's two pages."""
    found = re.findall(
        r"^\| ([\w ]+) \| (\d+ of \d+|–) \| [\d.–]+ \| (\d+ of \d+|–) \| [\d.–]+ \|$", tables, re.MULTILINE
    )
    counts = [(re.sub("token TIS|TIS", "Token-TIS", name), *ofs) for name, *ofs in found]
    never = {name: of for name, _, of in counts}
    aged = dict(re.findall(r"^\| (kept, [\w ]+) \| (\d+ of \d+) \|", text, re.MULTILINE))
    ((stale, stale_r3, stale_tis),) = re.findall(
        r"^\| weights one rollout old \|[^|]+\|[^|]+\| (\d+ of \d+), \S+ \| (\d+ of \d+), \S+ \| (\d+ of \d+), ",
        text, re.MULTILINE,
    )  # fmt: skip
    # The page's lines are wrapped, so that any space of it may be a line break.
    flat = " ".join(text.split())
    ((border, rate),) = re.findall(r"passes x\* = (\S+ \(\S+ to [^)]+\)) at a learning rate of (\S+), half", flat)
    dual = re.findall(r"another remedy collapse at (\S+ \(\S+ to [^)]+\)) with a dual clip", flat)
    other = re.findall(r"With a dual clip `KL x N` orders the collapses less well", flat)
    assert len(dual) + len(other) == 1
    remark = ", an extrapolation" if dual and f"{dual[0].split()[0]} is an extrapolation" in flat else ""
    of_dual = f"with a dual clip at {dual[0]}{remark}" if dual else "not so with a dual clip"
    ((slower,),) = [re.findall(r"\) (\d+ of \d+) runs collapse, where `KL x N` alone expects", flat)]
    claims = _verdicts(text)
    old = dict(
        re.findall(
            r"^\| weights one rollout old \| 8 \| ([\w ]+) \| [^|]+\| [^|]+\| (\d+ of \d+) \|", text, re.MULTILINE
        )
    )
    return (
        "Collapsed runs of GRPO, N = 8 updates per rollout, router noise 0.5 (exploratory):\n\n"
        f"{markdown_table(('', 'gradients clipped', 'never clipped'), counts)}\n"
        "- **Off policy, R3, the token weight and a dual clip prevent most collapses**, and R3\n"
        f"  raises accuracy. Each has limits. Without gradient clipping {never['R3']} runs of R3 collapse,\n"
        "  unless the weight or a dual clip helps. A dual clip alone prevents only some collapses.\n"
        "  At N = 1 and a large gap the weight lowers accuracy. At twice the noise runs with R3,\n"
        "  the weight or both collapse\n"
        f"  ({_counted(claims, ('46', '52', '55', '59', '60', '62', '63', '64', '66'))};\n"
        "  [where training breaks](docs/border.md)).\n"
        f"- **Half of the runs without a remedy collapse at KL x N = {border}**, KL before training;\n"
        f"  {of_dual}. At half the learning rate of {rate}, {slower} do ([the border](docs/border.md)).\n"
        "- **Age ends training, too.** With an exact engine and weights one rollout old,\n"
        f"  {stale} runs collapse, {stale_r3} with R3, {stale_tis} with Token-TIS. Of partial rollouts\n"
        f"  {aged['kept, no remedy']}, {aged['kept, R3']} and {aged['kept, token TIS']} do. Of old weights\n"
        f"  with a dual clip {old['no remedy']} do, {old['token TIS']} with Token-TIS\n"
        f"  ({_counted(claims, ('49', '50', '67'))}; [study](docs/border.md)).\n"
    )


def _counted(claims: dict[str, str], numbers: Sequence[str]) -> str:
    """These claims by verdict: `claims 55, 59: reproduced; 60: inconclusive`."""
    words = dict.fromkeys(claims[one] for one in numbers)
    grouped = (f"{', '.join(one for one in numbers if claims[one] == word)}: {word}" for word in words)
    return f"claims {'; '.join(grouped)}"


def _verdicts(text: str) -> dict[str, str]:
    """The verdict by a claim's number: of those that the page has in full, and of those that it has by number."""
    found = dict(re.findall(r"^\| (\d+) \| [^|]+ \| ([a-z ]+) \|$", text, re.MULTILINE))
    for line in re.findall(r"^The others, by number: ([^.]*)\.$", text, re.MULTILINE):
        for part in " ".join(line.split()).split("; "):
            word, _, numbers = part.partition(": ")
            found |= dict.fromkeys(numbers.split(", "), word)
    return found


def map_to_click() -> str:
    """docs/border-map.html."""
    return explorer(kept(), BORDER)


def pictures() -> dict[str, str]:
    """File name to SVG text: the phase diagram, the gain of each remedy by N, the fit, and the entropy."""
    of, looked_at = study(), peaks.kept()
    return {
        "border.svg": svg(phase_diagram(places(of.grpo), border=of.borders["KL x N"].border)),
        "border-gains.svg": svg(gains(of.grpo)),
        "border-fit.svg": svg(fit_picture(of.unaided, of.slowed, dual_clip.unaided(of))),
        "border-peaks.svg": svg(picture(looked_at, shown_seed(looked_at))),
        "border-entropy.svg": svg(entropy_picture(of.table, of.rows)),
    }


if __name__ == "__main__":
    text, tables_text = page(), tables()
    (DOCS / "border.md").write_text(text, encoding="utf-8")
    (DOCS / "border-tables.md").write_text(tables_text, encoding="utf-8")
    (DOCS / "border-map.html").write_text(map_to_click(), encoding="utf-8")
    PART.write(block(text, tables_text))
    for name, text in pictures().items():
        (DOCS / "images" / name).write_text(text, encoding="utf-8")
