"""Lightning, imported without transformers, matplotlib and scipy: `from lab.lightning import L` takes half the time.

Lightning imports torchmetrics, which imports these where they are installed, for metrics of text and sound and for
plots. No code here uses them, but torchmetrics lacks them in any process that imports this module first.
"""

from __future__ import annotations

from unittest.mock import patch

from lightning_utilities.core import imports

UNUSED = ("transformers", "matplotlib", "scipy")

# torchmetrics asks both while it is imported; the patches end with the import.
_is_met = imports.RequirementCache.__bool__
_is_there = imports.package_available
with (
    patch.object(
        imports.RequirementCache,
        "__bool__",
        lambda self: not any(name in (self.requirement or "") for name in UNUSED) and _is_met(self),
    ),
    patch.object(imports, "package_available", lambda name: name not in UNUSED and _is_there(name)),
):
    import lightning as L
    from lightning.pytorch.loggers import Logger

__all__ = ["L", "Logger"]
