"""The border of stability: where training breaks, from the runs of claims 36 to 50 and their second trials.

`table` reads the ledger's rows, `fit` searches for one number on which the border depends, `pictures` and `curves`
draw, `page` and `tables_page` write. Nothing is run here; the design is docs/decisions/0008.
"""
