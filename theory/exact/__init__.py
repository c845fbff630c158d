"""Expectations by enumeration: with a small vocabulary and short responses nothing needs to be estimated."""
