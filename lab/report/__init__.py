"""The pages' one shell and look, and report.html: what one run did, or several side by side, on one page.

page.py is the shell of every page of the project, figures.py its curves; story.py, overview.py and sections.py are the
report's words, its large picture and the order of the rest; run_page.py writes it.
"""
