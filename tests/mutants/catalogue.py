"""All mutants by name, and the historic bugs that have no place here."""

from __future__ import annotations

from tests.mutants import catalogue_capture, catalogue_objectives
from tests.mutants.catalogue_corrections import CORRECTIONS
from tests.mutants.catalogue_estimators import ESTIMATORS
from tests.mutants.catalogue_exact import EXACT
from tests.mutants.catalogue_formats import BLOCK_FORMATS
from tests.mutants.catalogue_records import RECORDS
from tests.mutants.catalogue_replay import REPLAY
from tests.mutants.catalogue_shelf import SHELF
from tests.mutants.mutant import Absent, Mutant

_ALL = (
    *REPLAY, *RECORDS, *catalogue_capture.CAPTURE, *CORRECTIONS, *catalogue_objectives.OBJECTIVES, *SHELF, *ESTIMATORS,
    *BLOCK_FORMATS, *EXACT,
)  # fmt: skip
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in _ALL}
ABSENT: tuple[Absent, ...] = (*catalogue_capture.ABSENT, *catalogue_objectives.ABSENT)

assert len(MUTANTS) == len(_ALL), "two mutants have the same name"
