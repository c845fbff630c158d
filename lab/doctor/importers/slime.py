"""slime's dumps, torch files: of rollouts (`--save-debug-rollout-data`), of training (`--save-debug-train-data`).

Rollouts: {"rollout_id", "samples": [{tokens, response_length, loss_mask, reward, rollout_log_probs,
rollout_routed_experts, ...}]}: mu, its tokens and its routes, and nothing of the trainer. Training, a file a rank:
{"rollout_id", "rank", "rollout_data": {tokens, response_lengths, loss_masks, rewards, rollout_log_probs, log_probs,
rollout_routed_experts, ...}}, lists over responses: `log_probs` is old, there if the old pass ran
(`--get-mismatch-metrics` makes it run), and whole without context parallelism.

Files are read without running code from them (`weights_only`), with NumPy arrays allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.doctor.importers import rows
from lab.files import disk_errors
from lab.traces import Trace

# What an unpickled array needs: it names these two functions and its type, and no other.
_SAFE = [np.ndarray, np.dtype, np.empty(0).__reduce__()[0], *{type(np.dtype(t)) for t in "bhilqBHILQfd"}]


def load(path: Path) -> Trace:
    """The trace of a training dump; ValueError naming what a dump lacks and which flag adds it."""
    try:
        with disk_errors(path, "read"), torch.serialization.safe_globals(_SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ImportError) as error:
        raise ValueError(f"expected a torch file, got {str(error).splitlines()[0]}") from error
    except Exception as error:  # torch raises pickle's own errors, of several kinds
        if type(error).__module__ not in ("_pickle", "pickle"):
            raise
        raise ValueError("expected tensors, arrays, numbers and text alone, got other objects: not loaded") from error
    if not isinstance(content, dict) or not {"samples", "rollout_data"} & set(content):
        got = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected slime's samples or rollout_data, got {got}")
    if "samples" in content:
        return _of_samples(content)
    return rows.trace(_of_training(content["rollout_data"], int(content.get("rollout_id", 0))))


def _of_samples(content: Mapping[str, Any]) -> Trace:
    """A rollout dump: only with log-probabilities of old added as `log_probs` to each sample is it a trace."""
    samples = content["samples"]
    if not samples:
        raise ValueError("samples: expected at least 1, got none")
    if samples[0].get("rollout_log_probs") is None:
        raise ValueError("samples: rollout_log_probs is missing (mu): the engine must be asked for log-probabilities")
    if samples[0].get("log_probs") is None:
        raise ValueError(
            "samples: log-probabilities of old are missing (slime's rollout dump never has them); dump with "
            "--save-debug-train-data and --get-mismatch-metrics instead"
        )
    names = {"response_lengths": "response_length", "loss_masks": "loss_mask", "rewards": "reward"}
    fields = {name for sample in samples for name in sample}
    columns = {name: [sample.get(names.get(name, name)) for sample in samples] for name in [*names, *sorted(fields)]}
    return rows.trace(_of_training(columns, int(content.get("rollout_id", 0))))


def _of_training(data: Mapping[str, Sequence[Any]], step: int) -> list[dict[str, Any]]:
    if data.get("rollout_log_probs") is None:
        raise ValueError("rollout_data: rollout_log_probs is missing (mu): the engine must return log-probabilities")
    if data.get("log_probs") is None:
        raise ValueError(
            "rollout_data: log_probs is missing (old): add --get-mismatch-metrics, so that the old pass runs"
        )
    out = []
    for b, tokens in enumerate(data["tokens"]):
        tokens, T = _list(tokens), int(data["response_lengths"][b])
        for name in ("rollout_log_probs", "log_probs"):
            if len(data[name][b]) < T - 1:
                raise ValueError(
                    f"{name}: expected {T} values in response {b}, got {len(data[name][b])}; under context parallelism "
                    "a rank has a part alone: dump with --context-parallel-size 1"
                )
        row = {"tokens": tokens, "num_prompt": len(tokens) - T, "step": step}
        row |= {"logp_mu": _list(data["rollout_log_probs"][b]), "logp_old": _list(data["log_probs"][b])}
        masks = data.get("loss_masks")
        if masks is not None and masks[b] is not None:
            row["is_response"] = [bool(value) for value in _list(masks[b])]
        reward = None if data.get("rewards") is None else data["rewards"][b]
        if isinstance(reward, (int, float)):
            row["reward"] = reward
        experts = data.get("rollout_routed_experts")
        if experts is not None and experts[b] is not None:
            row["experts_mu"] = experts[b]
        out.append(row)
    return out


def _list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, (torch.Tensor, np.ndarray)) else list(values)
