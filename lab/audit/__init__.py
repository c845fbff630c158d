"""The exact audit of objectives: bias, variance and direction of every gradient estimator, by enumeration.

`audit(config)` returns a pandas dataframe; `firstorder audit CONFIG` prints it and writes the records and the page.
"""

from lab.audit.config import AuditConfig, load_config
from lab.audit.run import audit
from lab.audit.table import COLUMNS, medians

__all__ = ["COLUMNS", "AuditConfig", "audit", "load_config", "medians"]
