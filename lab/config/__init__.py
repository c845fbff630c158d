"""The configuration of a run: a strict frozen schema, read from YAML with dotted overrides.

Only the base classes are re-exported here: `lab.tasks` builds on them, and `lab.config.run` builds on `lab.tasks`.
"""

from lab.config.strict import ConfigError, Strict, validate

__all__ = ["ConfigError", "Strict", "validate"]
