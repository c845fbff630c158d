"""Folders of transformers' own that several files of tests open."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from theory.streams import stream


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One folder a shape, written by transformers, with weights large enough for every part to matter."""
    from tests.sandbox.model.hf_shapes import SHAPES  # transformers takes seconds, and most files here need none of it

    root = tmp_path_factory.mktemp("hf")
    for number, make in enumerate(SHAPES.values()):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = make().float().eval()
        generator = stream(number, "hf")
        for key, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    # Router rows near 1 keep the top-k clear of ties.
                    std = 1.0 if "embed" in key else parameter.shape[-1] ** -0.5
                    parameter.normal_(0, std, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3, generator=generator)
        model.save_pretrained(root / str(number))
    return {name: root / str(number) for number, name in enumerate(SHAPES)}
