"""The parts of a decoder: embeddings, layers, last norm, head, and the rotations of every position.

Letters beyond theory/contracts.py: P positions, padded; d head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sandbox.kernels import rotation_tables, round_up
from sandbox.model.config import ModelConfig
from sandbox.model.layers import ExpertMLP, Layer, matrix


class DecoderWeights(nn.Module):
    """A decoder's parameters, drawn from a generator; without one, matrices are zero and must be loaded.

    Matrices ~ N(0, init_std^2 / fan-in), norms 1; embeddings ~ N(0, init_std^2), or N(0, init_std^2 / D) if the head
    is tied to them, so that logits start with unit variance. At the customary 0.02 the experts of a small model hardly
    matter: a wrong route would not change its policy.
    """

    cos_Pd: Tensor
    sin_Pd: Tensor

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None):
        super().__init__()
        self.config = config
        self.embedding = matrix(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = None if config.tied_head else matrix(config.vocab_size, config.hidden_size)
        # Padded to whole SIMD widths: the last lanes of a cosine would depend on the length of the table.
        position_P = torch.arange(round_up(config.max_positions, 64), dtype=torch.float32)
        even_d = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        angle_Pd = position_P[:, None] * (1.0 / config.rope_theta ** (even_d / config.head_dim))
        cos_Pd, sin_Pd = rotation_tables(angle_Pd)
        # Not in the state dict: the config determines them.
        self.register_buffer("cos_Pd", cos_Pd, persistent=False)
        self.register_buffer("sin_Pd", sin_Pd, persistent=False)
        if generator is not None:
            self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        # In the order of declaration: in another order the same seed gives other weights.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # a norm
            # Stacked experts are (E, in, out), all other matrices (out, in): axis 1 is the fan-in of both.
            fan_in = parameter.shape[1]
            if name == "embedding" and self.head is not None:
                fan_in = 1  # a look-up, not a sum
            parameter.normal_(0.0, self.config.init_std / fan_in**0.5, generator=generator)

    def router_parameters(self) -> Iterator[nn.Parameter]:
        """The router matrix of each MoE layer, in layer order."""
        return (layer.mlp.router for layer in self.layers if isinstance(layer.mlp, ExpertMLP))  # type: ignore[misc]
