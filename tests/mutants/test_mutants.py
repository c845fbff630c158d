"""Every bug that the field has already had is found by a law of this suite, and by the one that should find it."""

from __future__ import annotations

import pytest

from tests.mutants.catalogue import ABSENT, MUTANTS
from tests.mutants.law import verdict
from tests.mutants.laws import LAWS
from tests.mutants.matrix import PAGE, documented, killers
from tests.mutants.mutant import Edit, Mutant, StaleMutantError, find
from tests.mutants.survivors import REASONS, change, reasons, statuses

EXPECTED = documented(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_every_law_holds_on_the_unchanged_code(law):
    """Only the mutant breaks its law: without one, each law holds."""
    assert verdict(law) is None


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_its_law_kills_the_mutant(mutant: Mutant):
    """The named laws do not hold on the mutant, as docs/mutants.md says, and afterwards our code is our own again."""
    before = [find(edit.target).__code__ for edit in mutant.edits]
    named = (mutant.killer, *mutant.also)
    assert killers(mutant, named) == named
    assert set(named) <= set(EXPECTED[mutant.name])
    assert [find(edit.target).__code__ for edit in mutant.edits] == before


def test_the_page_has_exactly_the_catalogue():
    """docs/mutants.md lists every mutant, no other, and every bug that cannot be built."""
    assert EXPECTED.keys() == MUTANTS.keys()
    text = PAGE.read_text(encoding="utf-8")
    for mutant in MUTANTS.values():
        assert mutant.bug in text
        assert mutant.reference in text
    for bug in ABSENT:
        assert bug.reason in text
    assert all(name in text for name in LAWS)


def test_every_row_of_the_catalogue_is_answered():
    """Each of the 26 replay bugs is a mutant or has a reason why it cannot be one."""
    answered = {mutant.row for mutant in MUTANTS.values()} | {bug.row for bug in ABSENT}
    assert {f"B5.{i}" for i in range(1, 27)} <= answered


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("theory.divergences:k1", "return logp_q", ""), "expected the text 'return logp_q' once, got it 0 times"),
        (Edit("theory.divergences:k1", "logp_p", "x"), "got it 2 times"),
        (Edit("theory.divergences:k1", "return logp_p - logp_q", "return (logp_p - logp_q)"), "change something"),
        (Edit("theory.divergences:k1", "-> Float", "-> Int"), "expected edits that change something in what runs"),
        (Edit("theory.advantages:group_norm", "eps: float = 1e-6", "eps: float = 1.0"), "cannot change the signature"),
        (Edit("theory.advantages:ADVANTAGES", "a", "b"), "expected a function"),
    ],
)  # fmt: skip
def test_a_mutant_that_no_longer_fits_is_an_error(edit: Edit, message: str):
    """An edit whose text is gone, ambiguous or without effect fails, so that no mutant becomes the original."""
    mutant = Mutant("stale", "C", "", "", (edit,), "")
    with pytest.raises(StaleMutantError, match=message), mutant.applied():
        pass


def test_whoever_imported_the_function_earlier_has_the_mutant():
    """The function keeps its identity: references in tables and other modules run the edited code, and only inside."""
    import torch

    from theory.divergences import ESTIMATORS, k1

    mutant = Mutant("k1", "C", "", "", (Edit("theory.divergences:k1", "logp_p - logp_q", "logp_q - logp_p"),), "")
    one, two = torch.ones(1), torch.zeros(1)
    with mutant.applied():
        assert k1(one, two).item() == ESTIMATORS["k1"](one, two).item() == 1
    assert k1(one, two).item() == -1


def test_survivors_are_named_by_what_changed():
    """mutmut's output is read into the lines that survivors.md holds, and every line there has a reason."""
    listing = "    theory.divergences.x_k3__mutmut_1: survived\n    theory.loop.xǁCollectedǁf__mutmut_12: not checked\n"
    assert statuses(listing) == {
        "theory.divergences.x_k3__mutmut_1": "survived", "theory.loop.xǁCollectedǁf__mutmut_12": "not checked",
    }  # fmt: skip
    diff = "# k3: survived\n--- a\n+++ b\n@@ -1,2 +1,2 @@\n def k3(q, p):\n-    return q - p\n+    return q + p\n"
    assert (
        change("theory.divergences.x_k3__mutmut_1", diff) == "theory.divergences.k3: `return q - p` -> `return q + p`"
    )
    assert change("theory.loop.xǁAǁf__mutmut_12", diff).startswith("theory.loop.A.f: ")
    listed = REASONS.read_text(encoding="utf-8")
    assert len(reasons(listed)) == listed.count("\n- ") > 0
