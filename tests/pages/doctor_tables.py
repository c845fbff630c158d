"""The tables of docs/doctor.md: the named causes of each plant, and the counts of right ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lab.doctor.causes import CAUSES, UNKNOWN
from lab.doctor.diagnosis import Diagnosis
from lab.doctor.undecided import UNDECIDED
from lab.markdown import markdown_table
from tests.pages.doctor_plants import PLANTS


@dataclass(frozen=True)
class Found:
    """The doctor's word on one trace: names of causes, and the strength of the strongest."""

    planted: str
    named: str
    strongest: str
    candidates: tuple[str, ...]
    strength: float

    @classmethod
    def of(cls, planted: str, diagnosis: Diagnosis) -> Found:
        """The record of a diagnosis."""
        strongest, strength = next(iter(diagnosis.strengths.items()))
        others = tuple(cause.name for cause in diagnosis.candidates)
        return cls(planted, diagnosis.named[0].name, strongest.name, others, strength)


Findings = Mapping[str, Sequence[Found]]
"""The diagnoses of each plant, by its name."""


def every(found: Findings) -> list[Found]:
    """All findings, one after the other."""
    return [one for of in found.values() for one in of]


def decided(found: Iterable[Found]) -> list[Found]:
    """The findings that name one cause."""
    return [one for one in found if one.named != UNDECIDED.name]


def num_right(found: Iterable[Found]) -> int:
    """The number of times that the planted cause was named."""
    return sum(one.named == one.planted for one in found)


def section(title: str, found: Findings) -> str:
    """The counts and tables of one model."""
    whole = every(found)
    named, unsure = decided(whole), [one for one in whole if one.named == UNDECIDED.name]
    among = sum(one.planted in one.candidates for one in unsure)
    main = [one for name, of in found.items() if not PLANTS[name].is_format for one in of]
    formats = [one for name, of in found.items() if PLANTS[name].is_format for one in of]
    unknown = sum(one.named == UNKNOWN.name for one in whole)
    return (
        f"### {title}\n\n{num_right(named)} of {len(named)} named are right.\n\n*Undecided* are {len(unsure)} of "
        f"{len(whole)}, with the planted cause among the candidates in {among}. *Unknown* was named {unknown} times. "
        f"The strongest cause, decided or not, is right in {_strongest(main)}, and for the five plants of formats in "
        f"{_strongest(formats)}.\n\n{matrix(found)}\n{details(found)}"
    )


def counted(found: Sequence[Found]) -> str:
    """The counts of all models together, in a sentence."""
    named, right = decided(found), num_right(decided(found))
    return (
        f"On all models {right} of {len(named)} named are right ({100 * right / len(named):.0f}%); "
        f"{len(found) - len(named)} of {len(found)} are undecided "
        f"({100 * (len(found) - len(named)) / len(found):.0f}%).\n"
    )


def by_dump(found: Mapping[str, Sequence[Found]]) -> str:
    """The table of counts of all models together by kind of dump."""
    rows = []
    for kind, of in found.items():
        named, unsure = decided(of), [one for one in of if one.named == UNDECIDED.name]
        records = sum(one.planted == "route_record" != one.named for one in named)
        routers = [one for one in of if one.planted == "routing"]
        rows.append(
            (
                kind,
                f"{num_right(named)} of {len(named)}",
                f"{len(named) - num_right(named)} ({records})",
                f"{sum(one.planted in one.candidates for one in unsure)} of {len(unsure)}",
                f"{num_right(routers)} of {len(routers)}",
                f"{sum(one.named == 'routing' for one in of if one.planted != 'routing')}",
            )
        )
    titles = (
        "the dump has", "named rightly", "wrongly (routing records)", "undecided: the cause is a candidate",
        "router noise named", "*routing* named wrongly",
    )  # fmt: skip
    return markdown_table(titles, rows)


def _strongest(found: Sequence[Found]) -> str:
    """The count of findings whose strongest cause is the planted one, out of all."""
    return f"{sum(one.strongest == one.planted for one in found)} of {len(found)}"


def matrix(found: Findings) -> str:
    """The table of counts, planted causes by named ones."""
    planted: dict[str, Counter[str]] = {}
    for name, of in found.items():
        planted.setdefault(PLANTS[name].cause, Counter()).update(one.named for one in of)
    known = (*CAUSES, UNKNOWN, UNDECIDED)
    order = [cause.name for cause in known if any(counts[cause.name] for counts in planted.values())]
    heads = [f"{i + 1}" for i in range(len(order))]
    at = {name: i for i, name in enumerate(order)}
    rows = [
        (f"{at[cause] + 1 if cause in at else '–'} {cause}", *(counts[name] or "" for name in order))
        for cause, counts in sorted(planted.items(), key=lambda item: at.get(item[0], len(order)))
    ]
    rows += [(f"{at[name] + 1} {name}", *("" for _ in order)) for name in order if name not in planted]
    return markdown_table(("planted \\ named", *heads), rows)


def details(found: Findings) -> str:
    """The table of every plant with its named causes."""
    rows = [
        (name, PLANTS[name].cause, ", ".join(f"{cause} {n}" for cause, n in _counts(of))) for name, of in found.items()
    ]
    return markdown_table(("planted", "cause", "named"), rows)


def _counts(found: Sequence[Found]) -> list[tuple[str, int]]:
    return Counter(one.named for one in found).most_common()
