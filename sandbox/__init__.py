"""The laptop world: a small MoE decoder with batch-invariant arithmetic, engines with named defects, and training.

The exact audit, the claims ledger and the border study build on it. run.py executes a run from the config in config.py.
docs/architecture.md describes every folder.
"""
