"""`objectives: all` of an audit: every preset, every correction, and some of them with score centering."""

from __future__ import annotations

from typing import Any

import torch

from lab.config.algorithm import ObjectiveBlock
from theory.objectives import CORRECTIONS, PRESETS, Objective


def every_objective() -> list[dict[str, Any]]:
    """The blocks of all presets, of `reinforce` under each correction (weights on pi/mu, the whole gap), and centred.

    Centred are `reinforce`, with each correction, `minirl_no_is` and `ppo`, where tokens are weighed one by one.
    Objectives that need more than log-probabilities and rewards cannot be enumerated and are left out.
    """
    presets = [{"preset": name} for name in PRESETS]
    weighed = [
        {"preset": "reinforce", "label": f"reinforce + {name}", "correction": _block(name)}
        for name in CORRECTIONS
        # Under its own correction it is the preset again.
        if name != PRESETS["reinforce"].correction.name
    ]
    plain = [block for block in (*presets, *weighed) if _is_enumerable(block)]
    centred = [
        block | {"label": f"{block.get('label', block['preset'])} + centred", "centering": "full"}
        for block in plain
        if block["preset"] in ("reinforce", "minirl_no_is", "ppo") and _built(block).is_tokenwise
    ]
    first = {"preset": "reinforce", "label": "reinforce + centred by 1", "centering": "top_k", "centering_k": 1}
    return [*plain, *centred, first]


def _block(name: str) -> dict[str, Any]:
    # A correction that does not reweigh refuses the numerator pi.
    return {"name": name, "numerator": "pi" if CORRECTIONS[name]().weighted else "old"}


def _built(block: dict[str, Any]) -> Objective:
    return ObjectiveBlock(**{k: v for k, v in block.items() if k != "label"}).build()


def _is_enumerable(block: dict[str, Any]) -> bool:
    """Whether the objective is a function of log-probabilities and advantages alone."""
    # A call on one token: objectives that need routers or a mini-batch raise.
    one = torch.zeros(1, 1, dtype=torch.float64)
    try:
        _built(block)(one, one, one, torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    except (TypeError, ValueError):
        return False
    return True
