"""The decoder as an exact problem: its policy on a tree of responses, with bias and variance computed without sampling.

`audit` builds and measures problems; `cases` has those of `firstorder audit`.
"""
