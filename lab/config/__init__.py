"""The configuration of a run: a strict frozen schema (lab/strict.py), read from YAML with dotted overrides.

run.py has the blocks that both worlds share, algorithm.py the recipe, whose fields derive.py takes from the dataclasses
of theory/; load.py reads files and overrides, and computes hashes.
"""
