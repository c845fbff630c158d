"""A dump of hidden states: the inputs and outputs of one engine's modules over whole sequences.

One safetensors file per side. Letters beyond theory/contracts.py: N all tokens of the B sequences, one after the other.

| tensor           | shape    | meaning                                                                             |
|------------------|----------|-------------------------------------------------------------------------------------|
| tokens           | (N,)     | the input tokens                                                                    |
| lengths          | (B,)     | the tokens of each sequence; their sum is N                                         |
| {module}.in      | (N, D)   | its input, one row per token; of attention and MLP before or after the layer's norm |
| {module}.out     | (N, ...) | its output; for a router E logits, probabilities, or weights (0 where not chosen)   |

Modules under Hugging Face's names or Megatron's: `model.layers.3.self_attn` or `decoder.layers.3.self_attention`,
`.mlp`, `.mlp.gate` or `.mlp.router`, `model.norm` or `decoder.final_layernorm`, `model.embed_tokens` or
`embedding.word_embeddings`. Missing tensors are not checked; values that are not finite are refused.
docs/how-to/find-the-layer.md has hooks that write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.files import disk_errors
from lab.tensor_files import write_tensors

PRECISIONS: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NAMES = (
    (r"^(?:module\.|language_model\.)+", ""),
    (r"^decoder\.(?=layers\.|final_layernorm)", "model."),
    (r"^embedding(?:\.word_embeddings)?(?=\.out|\.in)", "model.embed_tokens"),
    (r"\.final_layernorm(?=\.)", ".norm"),
    (r"\.self_attention(?=\.)", ".self_attn"),
    (r"\.block_sparse_moe(?=\.)", ".mlp"),
    (r"\.mlp\.router(?=\.)", ".mlp.gate"),
)
"""Patterns in engines' module names and their Hugging Face replacements, applied in this order."""
KNOWN = re.compile(
    r"model\.(?:(?:embed_tokens|norm|layers\.\d+\.mlp\.gate)\.out|layers\.\d+\.(?:self_attn|mlp)\.(?:in|out))"
)


@dataclass(frozen=True, eq=False)
class States:
    """Hidden states of one engine; ValueError if rows and tokens do not fit, or for values that are not finite."""

    # The underscores keep the shape checks of the tests from refusing a misfit before our own message does.
    tokens: Int[Tensor, " _N"]
    lengths: Int[Tensor, " _B"]
    values: Mapping[str, Float[Tensor, "_N _"]]

    def __post_init__(self) -> None:
        N = len(self.tokens)
        if N == 0 or bool((self.lengths < 1).any()) or int(self.lengths.sum()) != N:
            got = self.lengths.tolist()[:8]
            raise ValueError(f"lengths: expected counts above 0 that sum up to {N} tokens, got {got}")
        for name, value in self.values.items():
            if value.dim() != 2 or len(value) != N or not value.dtype.is_floating_point:
                expected, got = f"floats of {N} rows, one per token", f"{value.dtype} {tuple(value.shape)}"
                raise ValueError(f"{name}: expected {expected}, got {got}")
        if not self.values:
            raise ValueError("expected inputs and outputs of modules (model.layers.0.mlp.out ...), got none")
        self._require_finite()

    def _require_finite(self) -> None:
        """ValueError that names the first tensor of the forward pass with NaN or infinite values."""
        # Refused, as they spread: the reference's outputs on such inputs are no better, and nothing would be out.
        found = [name for name in sorted(self.values, key=_place) if not bool(self.values[name].isfinite().all())]
        if found:
            value = self.values[found[0]]
            count = int((~value.isfinite()).sum())
            more = f"; it is the first in the forward pass of {len(found)} such tensors" if len(found) > 1 else ""
            raise ValueError(
                f"{found[0]}: expected finite values, got {count:,} of {value.numel():,} that are NaN or infinite{more}"
            )

    @property
    def precision(self) -> str:
        """The dtype that the engine's modules pass on: bf16, fp16 or fp32."""
        # Routers often compute in float32 whatever the engine's dtype.
        kinds = {value.dtype for name, value in self.values.items() if not name.endswith(".gate.out")}
        # The first match is the coarsest: some modules may pass on float32 in a dump that is bf16 otherwise.
        return next((word for kind, word in PRECISIONS.items() if kind in kinds), "fp32")

    def get(self, module: str, end: str) -> Float[Tensor, "N _"] | None:
        """A module's input (`in`) or output (`out`) in float32; None where it was not dumped."""
        value = self.values.get(f"{module}.{end}")
        return None if value is None else value.float()

    def save(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        write_tensors(path, {"tokens": self.tokens, "lengths": self.lengths, **self.values})

    @staticmethod
    def load(path: Path) -> States:
        """The states in a file; ValueError with its name for any other file."""
        try:
            with disk_errors(path, "read"), safetensors.safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            for name in ("tokens", "lengths"):
                if name not in tensors:
                    raise ValueError(f"{name}: missing; the file has {', '.join(list(tensors)[:6])}")
                if tensors[name].dim() != 1:
                    raise ValueError(f"{name}: expected one dimension, got shape {tuple(tensors[name].shape)}")
            named = {theirs(name): value for name, value in tensors.items()}
            values = {name: value for name, value in named.items() if KNOWN.fullmatch(name)}
            return States(tensors["tokens"].long(), tensors["lengths"].long(), values)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, got {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _place(name: str) -> tuple[int, int]:
    """The place of a tensor in the forward pass: its layer, -1 for the embedding, and its order there."""
    if ".layers." not in name:
        return (-1, 0) if name == "model.embed_tokens.out" else (2**31, 0)
    layer, end = name.removeprefix("model.layers.").split(".", 1)
    return int(layer), ("self_attn.in", "self_attn.out", "mlp.in", "mlp.gate.out", "mlp.out").index(end)


def theirs(name: str) -> str:
    """The Hugging Face name for an engine's module name."""
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    return name


def is_states(path: Path) -> bool:
    """Whether a file is a dump of hidden states, by its tensors' names."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return "lengths" in file.keys()  # noqa: SIM118 (no mapping)
    except (safetensors.SafetensorError, OSError):
        return False
