"""Laws of the ledger's column `exact`: a claim is told what its questions answered, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.claims import CLAIMS
from sandbox.ledger import exact, page
from sandbox.ledger.exact import Answer, Link

OF = {
    name: Answer(f"{name}.", "0.1 [0, 0.2]", verdict, problems)
    for name, verdict, problems in (("x", "holds", 100), ("y", "fails", 60), ("z", "open", 7))
}
X, Y, Z = (Link(name, "It bears.") for name in "xyz")
NOT_X, NOT_Y = (Link(name, "It bears.", is_opposite=True) for name in "xy")


@pytest.mark.parametrize(
    ("links", "text"),
    [
        ((), ""),
        ((X,), "for (100)"),
        ((NOT_X,), "against (100)"),
        ((Y,), "against (60)"),
        ((X, NOT_Y), "for (60)"),
        ((X, Z), "open (7)"),
        ((Z, Y, X), "against (7)"),
        ((X, Link("absent", "It bears.")), ""),
    ],
)
def test_the_column_is_what_the_questions_say_together(links: tuple[Link, ...], text: str) -> None:
    """For where all say so, against where one does, open in between, and nothing where an answer is not kept."""
    assert exact.cell(links, OF) == text


def test_every_link_is_to_a_kept_answer_and_says_why() -> None:
    """Each question that a claim names has its answer, and its lines show the claim's words in the ledger's page."""
    of = exact.answers()
    linked = [claim for claim in CLAIMS if claim.exact]
    assert {1, 3, 29, 32, 33, 38, 39, 46} <= {claim.number for claim in linked} and len(linked) < len(CLAIMS)
    for claim in linked:
        assert {link.question for link in claim.exact} <= set(of) and all(link.why for link in claim.exact)
        assert page.exact_text(claim).startswith(("for (", "against (", "open ("))
        told = exact.lines(claim.exact, of)
        assert [line.split(", ")[1] for line in told] == [link.question for link in claim.exact]
        assert all(of[link.question].found in line for link, line in zip(claim.exact, told, strict=True))
    assert {page.exact_text(claim) for claim in CLAIMS if not claim.exact} == {"–"}


def test_without_kept_answers_nothing_is_said(tmp_path: Path) -> None:
    """An installation without the studies' rows has an empty column."""
    none = exact.answers(tmp_path / "verdicts.csv")
    assert none == {} and exact.cell((X,), none) == "" and exact.lines((X,), none) == []
