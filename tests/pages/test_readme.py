"""The README is short, and its findings are those of the pages that it links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ROOT = Path(__file__).parents[2]
FINDINGS = re.findall(
    r"^- .*?(?=^- |^<|^\n)", re.split(r"^## ", README, flags=re.MULTILINE)[2], re.MULTILINE | re.DOTALL
)


def test_it_is_short() -> None:
    """At most 900 words, code and the generated lines included: a stranger reads it in five minutes.

    A table's rules are no words.
    """
    assert len([word for word in README.split() if word.strip("|-")]) <= 900


def test_there_are_findings() -> None:
    """Five at least, each with a link; otherwise the next test would look at nothing."""
    assert len(FINDINGS) >= 5 and all("](docs/" in finding for finding in FINDINGS[:5])


@pytest.mark.parametrize("finding", FINDINGS[:5], ids=lambda text: re.findall(r"\*\*(.*?)\*\*", text)[0])
def test_a_findings_numbers_stand_in_the_pages_that_it_links(finding: str) -> None:
    """Each measured number of a finding is, verbatim, in one of its pages; a page that changes fails this test."""
    linked = re.findall(r"\]\((docs/[^)]+)\)", finding)
    # "5 of 48" may stand at the end of a line and the beginning of the next.
    pages = " ".join(word for path in linked for word in (ROOT / path).read_text(encoding="utf-8").split())
    numbers = re.findall(r"\d+ of \d+|\d+%|\d\.\d+(?:e-\d+)?", finding)
    assert numbers and [number for number in numbers if number not in pages] == []


def test_the_league_has_as_many_objectives_as_said() -> None:
    (count,) = re.findall(r"\[league table\]\(docs/league\.md\) of (\d+) objectives", README)
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
