"""The imports of every Megatron rank of the tests, for the server that `megatron_world.spawn` forks them from.

Importing Megatron takes longer than most ranks' work. Nothing is called here: shims are installed by each rank.
"""

from __future__ import annotations

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from scaled.megatron_engine.cpu_shims import MODULES

    for name in (*MODULES, "scaled.megatron_engine.rank", "tests.scaled.rank_world"):
        importlib.import_module(name)
