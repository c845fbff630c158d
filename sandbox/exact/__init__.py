"""The decoder as an exact problem: its policy on a tree of responses, its bias and variance without sampling.

`audit` builds and measures the problems, `cases` are those of `firstorder audit`.
"""
