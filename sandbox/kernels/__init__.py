"""Batch-invariant arithmetic: a row's result has the same bits alone or in any batch, in prefill, decode and training.

Matrix libraries change the order of summation for one to three rows, for long inner axes and at the ragged end of an
elementwise pass. So a product here has at least MIN_ROWS rows, sums over keys run in blocks of KEY_BLOCK, and sums over
experts run in ascending expert order. Forward passes are invariant, gradients only deterministic. This was measured
with one thread (more threads may split rows); `probe` checks it on the machine at hand.

Letters beyond theory/contracts.py: N rows, O output width, M token-expert pairs, R pairs sorted by expert (padded), F
expert hidden width, H query heads, h key heads, P keys with padding, d head width.
"""

from __future__ import annotations

from sandbox.kernels.eager import EAGER
from sandbox.kernels.elementwise import rms_norm, rotate, rotation, rotation_tables, sigmoid, swiglu
from sandbox.kernels.experts import grouped_experts
from sandbox.kernels.interface import Kernels
from sandbox.kernels.probe import probe
from sandbox.kernels.products import MIN_KEYS, MIN_ROWS, attention, key_mask, linear, product, round_up

__all__ = [
    "EAGER", "Kernels", "MIN_KEYS", "MIN_ROWS", "attention", "choose", "grouped_experts", "key_mask", "linear", "probe",
    "product", "rms_norm", "rotate", "rotation", "rotation_tables", "round_up", "sigmoid", "swiglu",
]  # fmt: skip


def choose(compiled: bool) -> Kernels:
    """The kernels of a run: torch's operators, or C++ built at first use (ConfigError if the build fails)."""
    if not compiled:
        return EAGER
    from sandbox.kernels.compiled import compiled_kernels

    return compiled_kernels()
