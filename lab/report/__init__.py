"""The shell and style of every page, and report.html: one run, or several side by side, on one page.

page.py is the shell of every page of the project, figures.py its curves; story.py, overview.py and sections.py have the
report's words, its large picture and the order of the rest; run_page.py writes it.
"""
