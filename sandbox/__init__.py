"""The laptop world: a small MoE decoder with batch-invariant arithmetic, engines with named defects, and training.

Studies stand on it: the exact audit, the claims ledger and the border. A run is run.py, by the config of config.py.
docs/architecture.md names every folder.
"""
