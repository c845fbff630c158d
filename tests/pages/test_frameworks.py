"""docs/how-to/remedies-by-framework.md has only options of other frameworks whose line of the source is kept."""

from __future__ import annotations

import re
import shlex

import pytest

from firstorder.train import split
from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.causes import CAUSES as OF_A_STEP
from lab.doctor.importers import FORMATS
from lab.doctor.standing import MEASURES
from lab.doctor.steps.causes import STEPS_CAUSES
from tests.pages.frameworks import CAUSES, PAGE, REMEDIES, SOURCES, Entry, entries, page

ENTRIES = entries()


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: f"{one.framework}, {one.of}, {one.name}")
def test_every_word_of_an_option_stands_in_the_kept_lines(one: Entry) -> None:
    """Each part of its name, its value, and the code in its note: a misspelt option has no line that names it."""
    assert one.words and one.words <= one.quoted
    assert one.framework in SOURCES and one.of in {*REMEDIES, *MEASURES}
    assert (one.framework, one.name) not in {
        (other.framework, other.name) for other in ENTRIES if other is not one and other.of == one.of
    }


@pytest.mark.parametrize(
    "name", ["algorithm.rollout_corection.rollout_is=token", "algorithm.rollout_correction.rollout_is=tokens"]
)
def test_a_misspelt_option_is_seen(name: str) -> None:
    """The law above is no formality: a letter less in a name, or more in a value, and a word has no line."""
    (kept,) = (one for one in ENTRIES if one.of == "tis" and one.name.endswith("rollout_is=token"))
    wrong = kept.model_copy(update={"name": name})
    assert len(wrong.words - wrong.quoted) == 1


def test_every_option_that_the_page_names_is_kept() -> None:
    """The page is made of the rows: an option that someone writes into it by hand fails here."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_advice_on_clipping_is_that_of_the_runs() -> None:
    """Never clipped, R3 alone collapses in most runs, with the weight in none and with a dual clip in few: the page has
    no numbers."""
    text = (PAGE.parents[1] / "border-tables.md").read_text(encoding="utf-8")
    counts = {
        name: tuple(map(int, re.findall(rf"^\| {name} \| [^|]+\|[^|]+\| (\d+) of (\d+) \|", text, re.MULTILINE)[0]))
        for name in ("R3", "TIS and R3", "R3 and dual clip")
    }
    assert counts["R3 and dual clip"][0] < counts["R3 and dual clip"][1] / 4
    assert counts["R3"][0] > counts["R3"][1] / 2 and counts["TIS and R3"][0] == 0 < counts["TIS and R3"][1]


def test_verl_alone_has_a_dual_clip_by_default() -> None:
    """As border.md and limits.md say; a framework without a row has none."""
    notes = {one.framework: one.note for one in reversed(ENTRIES) if one.of == "dual_clip"}
    assert {name for name, note in notes.items() if note.startswith("On by default")} == {"verl"}
    assert {name for name, note in notes.items() if note.startswith("Off by default")} == set(notes) - {"verl"}


def test_the_causes_are_the_doctors_and_the_sandbox_has_the_remedies() -> None:
    """Each cause is one that the doctor names, each remedy has a cause, and each option of ours is one of `train`."""
    known = {cause.name for cause in (*OF_A_STEP, *STEPS_CAUSES)}
    assert set(CAUSES) <= known and {name for names in CAUSES.values() for name in names} == set(REMEDIES)
    for _, ours in REMEDIES.values():
        if ours.startswith("`--"):
            words = shlex.split(ours.strip("`"))
            load(*split(["configs/demo/none.yaml", *words]), Schemas())


def test_the_sources_are_those_of_the_importers() -> None:
    """One framework, one commit: the formats of the dumps and the options are read in the same source."""
    told = " ".join(one.source for one in FORMATS)
    for repository, commit in SOURCES.values():
        assert re.search(rf"{repository} [^:]*?at {commit}\b", told), repository
