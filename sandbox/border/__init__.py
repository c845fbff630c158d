"""The border of stability: what the runs of claims 36 to 42 say of where training breaks.

`table` reads the ledger's rows, `fit` looks for the one number on which the border depends, `pictures` draws. No run is
made here; the design is docs/decisions/0008.
"""
