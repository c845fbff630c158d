"""The claims ledger: cells (runs), a queue of them, statistics, verdicts and the page.

The claims are in sandbox/claims/, one file each; docs/decisions/0007 explains how they are decided.
"""
