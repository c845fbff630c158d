"""The doctor: what a trace says is wrong with a pair of engines, with its evidence and its fix.

view.py reads a trace token by token, evidence.py and routes.py make numbers of it, causes.py weighs them, diagnosis.py
puts them into words, page.py into a page; importers/ opens what other systems dump. `diagnose` looks at a batch that is
in memory.
"""

from lab.doctor.batch import diagnose

__all__ = ["diagnose"]
