"""The findings: docs/findings.md, and the README's lines of it, from the border study's pages and the ledger.

`python -m tests.pages.findings` writes them, after `tests.pages.ledger` and `tests.pages.border`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.markdown import markdown_table
from sandbox.border.study import paragraph
from sandbox.ledger.summary import ORDER, ClaimLine, state_words
from tests.pages.ledger import made
from tests.pages.study import ROOT, Part

README, PAGE = Part(ROOT / "README.md", "border"), ROOT / "docs/findings.md"
REMEDIES, BORDER, LONGER, AGE, PAPERS = (Part(PAGE, name) for name in ("remedies", "border", "longer", "age", "papers"))

SOURCES = ("MiniRL", "R3", "Pr2")
"""The papers whose findings are claims, by the first word of a claim's source."""
TRIED_AGAIN = "tried again"


@dataclass(frozen=True)
class Counts:
    """The counts of the border study, as its two pages print them: `102 of 106`."""

    clipped: Mapping[str, str]
    """Collapsed runs of GRPO at N = 8 and router noise 0.5, by remedy."""
    never: Mapping[str, str]
    """The same where gradients are never clipped; a dash without runs."""
    stale: tuple[str, str, str]
    """With weights one rollout old: no remedy, R3, Token-TIS."""
    kept: tuple[str, str, str]
    """With partial rollouts kept: no remedy, R3, Token-TIS."""
    stale_dual: tuple[str, str]
    """With old weights and a dual clip: no other remedy, Token-TIS."""
    border: str
    """x* with its interval."""
    rate: str
    slower: str
    """Runs that collapse at half of the rate."""
    longer: Mapping[str, tuple[str, str]]
    """By remedy: the runs of 400 and of 4,000 updates that collapse at half of the rate; a dash without any."""
    dual_border: str
    """x* with a dual clip, in words."""


def counts(page: str, tables: str) -> Counts:
    """The numbers of docs/border.md and docs/border-tables.md; ValueError where one is not there exactly once."""
    rows = re.findall(
        r"^\| ([\w ]+) \| (\d+ of \d+|–) \| [\d.–]+ \| (\d+ of \d+|–) \| [\d.–]+ \|$", tables, re.MULTILINE
    )
    named = [(re.sub("token TIS|TIS", "Token-TIS", name), *ofs) for name, *ofs in rows]
    aged = dict(re.findall(r"^\| (kept, [\w ]+) \| (\d+ of \d+) \|", page, re.MULTILINE))
    (stale,) = re.findall(
        r"^\| weights one rollout old \|[^|]+\|[^|]+\| (\d+ of \d+), \S+ \| (\d+ of \d+), \S+ \| (\d+ of \d+), ",
        page, re.MULTILINE,
    )  # fmt: skip
    dual = dict(
        re.findall(
            r"^\| weights one rollout old \| 8 \| ([\w ]+) \| [^|]+\| [^|]+\| (\d+ of \d+) \|", page, re.MULTILINE
        )
    )
    longer = re.findall(
        r"^\| ([\w ]+) \| (\d+ of \d+|–) \| (\d+ of \d+) \| (?:[\d,]+|–) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE
    )
    # The page's lines are wrapped, so that any space of it may be a line break.
    flat = " ".join(page.split())
    ((border, rate),) = re.findall(r"passes x\* = (\S+ \(\S+ to [^)]+\)) at a learning rate of (\S+), half", flat)
    (slower,) = re.findall(r"\) (\d+ of \d+) runs collapse, where `KL x N` alone expects", flat)
    return Counts(
        clipped={name: clipped for name, clipped, _ in named},
        never={name: never for name, _, never in named},
        stale=stale,
        kept=(aged["kept, no remedy"], aged["kept, R3"], aged["kept, token TIS"]),
        stale_dual=(dual["no remedy"], dual["token TIS"]),
        border=border,
        rate=rate,
        slower=slower,
        longer={name.replace("token TIS", "Token-TIS"): ofs for name, *ofs in longer},
        dual_border=_dual_border(flat),
    )


def _dual_border(flat: str) -> str:
    found = re.findall(r"another remedy collapse at (\S+ \(\S+ to [^)]+\)) with a dual clip", flat)
    other = re.findall(r"With a dual clip `KL x N` orders the collapses less well", flat)
    if len(found) + len(other) != 1:
        raise ValueError(f"docs/border.md: expected one sentence on the border with a dual clip, got {found + other}")
    if not found:
        return "With a dual clip the number orders the collapses less well"
    remark = ", an extrapolation" if f"{found[0].split()[0]} is an extrapolation" in flat else ""
    return f"With a dual clip it is {found[0]}{remark}"


def front(of: Counts, verdicts: Mapping[int, str]) -> str:
    """The README's two findings of the border study."""
    clipped, longer = of.clipped, {name: total for name, (_, total) in of.longer.items()}
    head = "Half the learning rate buys time:" if verdicts[70] == "reproduced" else "At half the learning rate"
    collapses = paragraph(
        "- **Off policy, a gap ends training; R3 or a token weight prevents most collapses.** With eight updates per",
        f"rollout GRPO collapses in {clipped['no remedy']} runs, with an exact engine in {clipped['an exact engine']},",
        f"with R2 in {clipped['R2']}, with R3 in {clipped['R3']}, with Token-TIS in {clipped['Token-TIS']}",
        "([where training breaks](docs/border.md)). TRL's own trainer agrees: 8 of 8 without a remedy, 0 of 8 with",
        "Token-TIS ([the demo in TRL](docs/in-trl.md)).",
    )
    number = paragraph(
        f"- **One number says where: half of the runs without a remedy collapse at KL x N = {of.border}**, the KL",
        f"between the engines before training times the updates per rollout. {head} {of.slower} collapse within 400",
        f"updates; within 4,000 {longer['no remedy']} collapse or overflow, with R3 {longer['R3']}, with Token-TIS",
        f"{longer['Token-TIS']} ([the border](docs/border.md)).",
    )
    return _indented(collapses) + _indented(number)


def _indented(item: str) -> str:
    first, *others = item.splitlines()
    return "".join(f"{line}\n" for line in (first, *(f"  {line}" for line in others)))


def remedies(of: Counts, verdicts: Mapping[int, str]) -> str:
    """The remedies that prevent collapses, and where they do not."""
    table = [(name, clipped, of.never[name]) for name, clipped in of.clipped.items()]
    claims = _counted(verdicts, (46, 52, 55, 59, 60, 62, 63, 64, 66))
    return (
        "Collapsed runs of GRPO, N = 8, router noise 0.5 (exploratory):\n\n"
        f"{markdown_table(('', 'gradients clipped', 'never clipped'), table)}\n"
        "R3, the token weight and a dual clip prevent most collapses, and R3 raises accuracy. Each has limits.\n\n"
        f"- Without gradient clipping {of.never['R3']} runs of R3 collapse, unless the weight or a dual clip helps.\n"
        "- A dual clip alone prevents only some collapses.\n"
        "- At N = 1 and a large gap the weight lowers accuracy.\n"
        "- At twice the noise runs with R3, the weight or both collapse.\n\n"
        f"{claims} ([where training breaks](border.md), [clipping](border-tables.md#clipping)).\n"
    )


def border(of: Counts) -> str:
    """The number at which half of the runs collapse, and its learning rate."""
    return paragraph(
        f"Half of the runs without a remedy collapse at KL x N = {of.border}, where KL is that between the engines",
        f"before training. {of.dual_border}. The number holds at its learning rate, {of.rate}, alone: at half of it",
        f"{of.slower} runs collapse in 400 updates. Exploratory ([the border](border.md#one-number-for-the-border)).",
    )


def longer(of: Counts, verdicts: Mapping[int, str]) -> str:
    """Runs of ten times the updates at half of the rate."""
    total = {name: count for name, (_, count) in of.longer.items()}
    return paragraph(
        f"At half the rate, N = 8 and router noise 0.5, {of.longer['no remedy'][0]} runs without a remedy collapse in",
        f"400 updates, and {total['no remedy']} collapse or overflow in 4,000. With an exact engine",
        f"{total['an exact engine']} do, with R3 {total['R3']}, with Token-TIS {total['Token-TIS']}.",
        f"{_counted(verdicts, (70,))} ([ten times the updates](border.md#ten-times-the-updates)).",
    )


def age(of: Counts, verdicts: Mapping[int, str]) -> str:
    """Old weights and partial rollouts under an exact engine."""
    stale, kept, dual = of.stale, of.kept, of.stale_dual
    return paragraph(
        f"Here the engine is exact. With weights one rollout old {stale[0]} runs collapse, {stale[1]} with R3 and",
        f"{stale[2]} with Token-TIS. If responses in progress are kept over a step, {kept[0]} do, {kept[1]} with R3",
        f"and {kept[2]} with Token-TIS. Of old weights with a dual clip {dual[0]} do, {dual[1]} with Token-TIS, too.",
        f"{_counted(verdicts, (49, 50, 67))} ([old weights](border.md#is-it-routing-or-any-gap),",
        "[partial rollouts](border.md#partial-rollouts)).",
    )


def papers(lines: Iterable[ClaimLine]) -> str:
    """Each paper's findings with their verdicts, in the paper's order; of a claim tried again, the second trial."""
    kept = [line for line in lines if line.state != TRIED_AGAIN]
    blocks = []
    for paper in SOURCES:
        own = [line for line in kept if line.claim.source.startswith(paper)]
        # A second trial stands where its first would.
        own.sort(key=lambda line: line.claim.repeats or line.claim.number)
        tally = ", ".join(f"{n} {state_words(word)}" for word in ORDER if (n := sum(o.state == word for o in own)))
        number = re.findall(r"arXiv ([\d.]+)", own[0].claim.source)[0]
        rows = [(line.claim.sentence, _place(line), _verdict(line)) for line in own]
        table = markdown_table((f"{paper} (arXiv {number})", "there", "here"), rows)
        blocks.append(f"**{paper}: {tally}.**\n\n{table}")
    return "\n".join(blocks)


def _place(line: ClaimLine) -> str:
    """Where the paper has it, without its name; of two papers the first place."""
    return re.sub(r"^\w+ \(arXiv [\d.]+\) ", "", line.claim.source.split(";")[0])


def _verdict(line: ClaimLine) -> str:
    return f"[{state_words(line.state)}](ledger.md#claim-{line.claim.number})"


def states() -> dict[int, str]:
    """Every claim's verdict by number."""
    return {line.claim.number: line.state for line in made()}


def _counted(verdicts: Mapping[int, str], numbers: Sequence[int]) -> str:
    """These claims by verdict: `Claims 55, 59: reproduced; 60: inconclusive`."""
    words = dict.fromkeys(verdicts[one] for one in numbers)
    grouped = (f"{', '.join(str(one) for one in numbers if verdicts[one] == word)}: {word}" for word in words)
    return f"{'Claim' if len(numbers) == 1 else 'Claims'} {'; '.join(grouped)}"


PARTS = (README, REMEDIES, BORDER, LONGER, AGE, PAPERS)


def text(part: Part) -> str:
    """One of the parts, from docs/border.md, docs/border-tables.md and the ledger's lines."""
    if part is PAPERS:
        return papers(made())
    page, tables = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("border", "border-tables"))
    of, verdicts = counts(page, tables), states()
    return {
        README: front(of, verdicts),
        REMEDIES: remedies(of, verdicts),
        BORDER: border(of),
        LONGER: longer(of, verdicts),
        AGE: age(of, verdicts),
    }[part]


if __name__ == "__main__":
    for one in PARTS:
        one.write(text(one))
