"""Expectations by enumeration: with a small vocabulary and short responses nothing needs to be estimated.

Trees and forests of all responses, policies on them, the true gradient, bias and variance of every objective, and runs
whose every update is an expectation.
"""
