"""The doctor: names the fault of a pair of engines from a trace, with the evidence and the fix.

view.py reads a trace token by token, evidence.py and routes.py turn it into clues, causes.py weighs the clues,
diagnosis.py puts the result into words and page.py onto a page; importers/ reads the dumps of other systems.
`diagnose` takes a batch in memory.
"""

from lab.doctor.batch import diagnose

__all__ = ["diagnose"]
