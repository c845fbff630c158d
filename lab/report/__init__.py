"""The pages' one shell and look, and report.html: what one run did, or several side by side, on one page."""

from lab.report.run_page import render, write_report

__all__ = ["render", "write_report"]
