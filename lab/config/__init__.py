"""The configuration of a run: a strict frozen schema (lab/strict.py), read from YAML with dotted overrides."""
