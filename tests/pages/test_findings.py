"""docs/findings.md and the README's findings have the study's numbers and the ledger's verdicts, whatever these are."""

from __future__ import annotations

import re
from dataclasses import replace

from sandbox.claims import CLAIMS
from tests.pages.findings import ROOT, TRIED_AGAIN, border, counts, front, longer, papers, remedies, states
from tests.pages.ledger import made

BORDER, TABLES = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("border", "border-tables"))


def test_the_number_has_its_rate_and_the_dual_clip() -> None:
    """x* stands beside its learning rate and the runs at half of it, and a border with a dual clip is told with it."""
    said = " ".join(border(counts(BORDER, TABLES)).split())
    assert re.search(
        r"KL x N = \S+ \(\S+ to \S+\), .* With a dual clip the number orders the collapses less well\. "
        r".* rate, 2e-3, alone: at half of it \d+ of \d+ runs collapse in 400",
        said,
    )
    other = re.sub(r"With a dual clip `KL x N` orders the collapses less well.*?no x\*\.", "x", BORDER, flags=re.DOTALL)
    own = "another remedy collapse at 5.6 (4.3 to 9.3) with a dual clip, so 5.6 is an extrapolation."
    with_own = " ".join(border(counts(f"{other}\n{own}", TABLES)).split())
    assert "With a dual clip it is 5.6 (4.3 to 9.3), an extrapolation." in with_own


def test_the_readme_counts_what_the_study_counts() -> None:
    """Another count of the table is another one in the README, in its own place."""
    found = counts(BORDER, TABLES)
    for name in ("no remedy", "an exact engine", "R2", "R3", "Token-TIS"):
        changed = replace(found, clipped={**found.clipped, name: "7 of 9"})
        said = " ".join(front(changed, states()).split())
        where = "collapses in 7 of 9 runs" if name == "no remedy" else f"with {name} in 7 of 9"
        assert where in said and where not in " ".join(front(found, states()).split())


def test_longer_runs_are_told_with_their_verdict() -> None:
    """The counts of 4,000 updates in the README and in the findings; time is bought only where claim 70 says so."""
    found, verdicts = counts(BORDER, TABLES), states()
    changed = replace(found, longer={**found.longer, "no remedy": ("1 of 3", "7 of 9"), "R3": ("–", "2 of 9")})
    said = " ".join(front(changed, {**verdicts, 70: "reproduced"}).split())
    assert (
        "Half the learning rate buys time:" in said
        and "updates; within 4,000 7 of 9 collapse or overflow, with R3 2 of 9" in said
    )
    assert "buys time" not in front(changed, {**verdicts, 70: "inconclusive"})
    told = " ".join(longer(changed, {**verdicts, 70: "inconclusive"}).split())
    assert "1 of 3 runs without a remedy collapse in 400 updates, and 7 of 9 collapse or" in told
    assert "with R3 2 of 9," in told and "Claim 70: inconclusive (" in told


def test_claims_are_told_with_their_verdicts() -> None:
    verdicts = states()
    assert "Claims 46, 52, 55," in remedies(counts(BORDER, TABLES), verdicts)
    other = remedies(counts(BORDER, TABLES), {**verdicts, 46: "inconclusive"})
    assert "Claims 46: inconclusive; 52, 55," in other


def test_every_finding_of_a_paper_has_its_last_verdict() -> None:
    """One row for each claim of a paper, but for those tried again, whose second trial stands in their place."""
    lines = made()
    table = papers(lines)
    rows = re.findall(r"^\| (.+?) \| .+? \| \[([\w ]+)\]\(ledger\.md#claim-(\d+)\) \|$", table, re.MULTILINE)
    of = {line.claim.number: line for line in lines}
    assert all(of[int(number)].claim.sentence == sentence for sentence, _, number in rows)
    assert all(of[int(number)].state == word != TRIED_AGAIN for _, word, number in rows)
    expected = {c.number for c in CLAIMS if not c.source.startswith("here") and of[c.number].state != TRIED_AGAIN}
    assert {int(number) for *_, number in rows} == expected
    tallies = re.findall(r"(\d+) (reproduced|not reproduced|opposite|inconclusive|out of reach)(?=[,.])", table)
    assert sum(int(count) for count, _ in tallies) == len(rows)
