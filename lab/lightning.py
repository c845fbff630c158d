"""Lightning, imported without transformers: `from lab.lightning import L` takes two thirds of the time.

Lightning imports torchmetrics, which imports transformers where it is installed, for metrics of texts (BERTScore and
the like). No code here uses them. They are missing from torchmetrics in a process that imports this module first.
"""

from __future__ import annotations

from unittest.mock import patch

from lightning_utilities.core.imports import RequirementCache

_is_met = RequirementCache.__bool__
with patch.object(
    RequirementCache, "__bool__", lambda self: "transformers" not in (self.requirement or "") and _is_met(self)
):
    import lightning as L
    from lightning.pytorch.loggers import Logger

__all__ = ["L", "Logger"]
