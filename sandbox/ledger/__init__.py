"""The machine of the claims ledger: cells (runs), a queue of them, statistics, verdicts and the page.

What is claimed stands in sandbox/claims/, a file per claim. The way from one to the other is docs/decisions/0007.
"""
