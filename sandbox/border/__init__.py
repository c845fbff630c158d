"""The border of stability: where training breaks, from the runs of claims 36 to 49.

`table` reads the ledger's rows, `fit` searches for one number on which the border depends, `pictures` draws. Nothing is
run here; the design is docs/decisions/0008.
"""
