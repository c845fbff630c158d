"""report.html: what one run did, or several side by side, on one self-contained interactive page."""

from lab.report.page import render, write_report

__all__ = ["render", "write_report"]
