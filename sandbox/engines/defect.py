"""The interface of an engine defect: one departure of an inference engine from the training engine's maths.

A defect may change the weights at hand-over, override hooks of `Numerics` in a forward pass, and change the logits that
tokens are drawn from or scored with. It declares which links of the chain it breaks (docs/engine-defects.md), and
tests/sandbox/engines/test_defect_chain.py checks that, bit by bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lab.overflow import Fp16Overflow, Overflow
from lab.report.style import number
from lab.strict import Strict
from sandbox.kernels.numerics import EXACT, Numerics
from theory.contracts import NamedTensors

Link = Literal["batch", "prefill", "trainer", "sampler"]
"""The chain of equalities that the exact engine keeps:
batch: a response has the same bits alone and in any batch.
prefill: a decoded token has the log-probability and routes that a prefill of the whole sequence gives it.
trainer: both equal those of the training engine's pass at its own weights.
sampler: tokens are drawn from the distribution whose log-probabilities are reported."""

LINKS: tuple[Link, ...] = get_args(Link)


class Defect(Strict, ABC):
    """Base of all defects; each subclass has a literal `kind`, its dial, and overrides the hooks that it needs."""

    place: ClassVar[float] = math.inf
    """The kind's position in the schema and in tables; kinds without one come last, by name."""

    at_most_one: ClassVar[bool] = False
    """Whether an engine may have this kind only once: it has one sampler and one history of weights."""

    @classmethod
    @abstractmethod
    def rungs(cls) -> Mapping[str, Defect]:
        """The settings that `firstorder defects` measures, by name in its table."""

    @property
    def words(self) -> str:
        """The defect's name in reports: its kind and setting, as in `router noise 0.5`."""
        return f"{vars(self)['kind'].replace('_', ' ')} {self.setting}".strip()

    @property
    def setting(self) -> str:
        """The active dials in words; by default the value of every field."""
        return " ".join(dial(value) for name, value in vars(self).items() if name != "kind")

    @property
    @abstractmethod
    def breaks(self) -> frozenset[Link]:
        """The links that break at this setting; none at a neutral setting."""

    def weights(self, names: Sequence[str], stacked: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The weights as this engine stores them: n of equal shape, with Hugging Face names, each changed by itself."""
        return stacked

    def numerics(self, generator: torch.Generator) -> Numerics:
        """The hooks of this defect for one generate call, whose random draws come from `generator`."""
        return EXACT

    def drawn(self, logits_AV: Float[Tensor, "A V"]) -> Float[Tensor, "A V"]:
        """The logits that tokens are drawn from, given those at the requested temperature."""
        return logits_AV

    def scored(
        self, tempered_AV: Float[Tensor, "A V"], raw_AV: Float[Tensor, "A V"], temperature: float
    ) -> Float[Tensor, "A V"]:
        """The logits whose log-softmax is reported, given those at the requested temperature and the model's own."""
        return tempered_AV


def dial(value: object) -> str:
    """A dial's value in words; a float has three digits."""
    return number(value) if isinstance(value, float) else str(value)


FORMATS = {"bf16": "BF16", "fp16": "FP16", "fp8_e4m3": "FP8", "int8": "INT8", "int4": "INT4"}
"""The names of number formats in reports."""


def rounding_words(defect: Any, part: str) -> str:
    """The words of a defect that rounds this part: its format, and its scale if the format has one."""
    words = f"{FORMATS[defect.format]} {part}"
    if defect.format in ("bf16", "fp16"):
        return words
    if defect.scale == "unit":
        return f"{words} without a scale"
    block = f" of {defect.block_size}" if defect.scale == "block" else ""
    return f"{words}, scaled per {defect.scale}{block}"


def kept_weights(defects: Sequence[Defect], named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    """The weights as an engine with these defects stores them; the defects apply in order.

    All weights of one shape go through the defects as one stack: a hundred experts have only two shapes. Raises
    Fp16Overflow, with all weights that overflow, after those that do not.
    """
    changing = [defect for defect in defects if type(defect).weights is not Defect.weights]
    if not changing:
        yield from named_tensors
        return
    # All weights are read before the first is given back: a shape may recur in the last layer.
    groups: dict[tuple[torch.Size, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named_tensors:
        # By dtype too: a stack would widen the narrower ones.
        groups[tensor.shape, tensor.dtype].append((name, tensor))
    overflowing: dict[str, Overflow] = {}
    for group in groups.values():
        names = [name for name, _ in group]
        stacked = torch.stack([tensor for _, tensor in group])
        try:
            for defect in changing:
                stacked = defect.weights(names, stacked)
        except Fp16Overflow as error:
            overflowing |= error.weights
            continue
        yield from zip(names, stacked.unbind(), strict=True)
    if overflowing:
        raise Fp16Overflow.of(overflowing)


BREAKS_NONE: frozenset[Link] = frozenset()
BREAKS_TRAINER: frozenset[Link] = frozenset({"trainer"})
BREAKS_ALL_NUMERICS: frozenset[Link] = frozenset({"batch", "prefill", "trainer"})
