"""The hooks of docs/how-to/find-the-layer.md as the page prints them, run on a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.doctor.layers.states import States

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "find-the-layer.md"


def code(heading: str) -> str:
    """The first Python block below a heading."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text().split(f"# {heading}\n")[1], re.DOTALL)[0]


def watcher() -> dict[str, Any]:
    """The names that the hooks define: `watch` and `rows`."""
    names: dict[str, Any] = {}
    exec(code("From hidden states"), names)
    return names


def written(names: dict[str, Any], sequences: Sequence[Sequence[int]], folder: Path) -> States:
    """The file that the page's last lines write, read back."""
    own = code("The file").replace('"mu.states.safetensors"', repr(str(folder / "mu.states.safetensors")))
    exec(own, {**names, "sequences": sequences})
    return States.load(folder / "mu.states.safetensors")


def dumped(
    model: torch.nn.Module, run: Callable[[Sequence[int]], Any], sequences: Sequence[Sequence[int]], folder: Path
) -> States:
    """The dump of a model that `run` feeds a sequence at a time."""
    names = watcher()
    names["watch"](model)
    with torch.no_grad():
        for tokens in sequences:
            run(tokens)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return written(names, sequences, folder)
