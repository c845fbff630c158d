"""The README is short, and its findings are those of the pages that it links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/findings.md").read_text(encoding="utf-8")
FINDINGS = {
    f"README, {text[4:30]}": text
    for text in re.findall(
        r"^- .*?(?=^- |^<|^\n)", re.split(r"^## ", README, flags=re.MULTILINE)[2], re.MULTILINE | re.DOTALL
    )[:3]
} | {f"docs, {text.splitlines()[0]}": text for text in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]}
"""The findings of the README and of the page that has all of them, each with its links."""


def test_it_is_short() -> None:
    """At most 900 words, code and the generated lines included: a stranger reads it in five minutes.

    A table's rules are no words.
    """
    assert len([word for word in README.split() if word.strip("|-")]) <= 900


def test_there_are_findings() -> None:
    """Three in the README, each with a link, and nine sections on the page; else the next test would see nothing."""
    front = [text for name, text in FINDINGS.items() if name.startswith("README")]
    assert len(front) == 3 and all("](docs/" in finding for finding in front) and len(FINDINGS) == 3 + 9


@pytest.mark.parametrize("name", FINDINGS)
def test_a_findings_numbers_stand_in_the_pages_that_it_links(name: str) -> None:
    """Each measured number of a finding is, verbatim, in one of its pages; a page that changes fails this test."""
    folder = ROOT if name.startswith("README") else ROOT / "docs"
    linked = {folder / path for path in re.findall(r"\]\(([\w/-]+\.md)", FINDINGS[name])}
    if ROOT / "docs/ledger.md" in linked:  # on the site it includes this page
        linked.add(ROOT / "results/claims/ledger.md")
    # "5 of 48" may stand at the end of a line and the beginning of the next.
    pages = " ".join(word for path in linked for word in path.read_text(encoding="utf-8").split())
    numbers = re.findall(r"\d+ of \d+|\d+(?:\.\d+)?%|\d\.\d+(?:e-\d+)?", re.sub(r"\d{4}\.\d{5}", "", FINDINGS[name]))
    assert [number for number in numbers if number not in pages] == []


def test_the_league_has_as_many_objectives_as_said() -> None:
    (count,) = re.findall(r"\[league table\]\(league\.md\) of (\d+)\s+objectives", PAGE)
    assert re.search(rf"^{count} of them on", (ROOT / "docs/league.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_link_leads_somewhere() -> None:
    """Relative links and pictures of the README are files of the checkout, and what follows a # is a heading there."""
    for path, anchor in re.findall(r"\]\((?!\.\.)([^):#]+)(?:#([\w-]+))?\)", README):
        assert (ROOT / path).exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], f"{path}#{anchor}"


def test_badges_show_the_repository_s_own_workflows() -> None:
    """GitHub resolves ../../ from the page of a file, so a fork's badge shows the fork's own state."""
    targets = re.findall(r"\]\((\.\.[^)]+)\)", README)
    named = {re.fullmatch(r"\.\./\.\./actions/workflows/([\w.]+)(?:/badge\.svg)?", target) for target in targets}
    assert None not in named, targets
    assert {match[1] for match in named if match} == {path.name for path in (ROOT / ".github/workflows").iterdir()}
