"""The responses in progress between two global steps, as tensors of a checkpoint, so that a resumed run continues them.

`rollout_tensors` and `rollouts_of` work for any rollouts; checkpoints of batches sampled ahead use them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from theory.contracts import Prompt, Response, Rollouts, Task
from theory.oversampling import Backlog, StartedGroup
from theory.rollouts import Finish
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord, narrowed
from theory.top_tokens import TopTokens

PREFIX = "backlog."
FINISHES: tuple[Finish, ...] = ("stop", "length", "abort", "turns")
"""Checkpoints store indices into this tuple: append new values."""


def to_tensors(backlog: Backlog | None) -> dict[str, Tensor]:
    """The backlog's tensors by name, empty for None. Prompts are left out: a group's number names its prompt."""
    if backlog is None:
        return {}
    found = {"next_number": torch.tensor([backlog.next_number])}
    # A group waits only after a call of the engine, so each has its G responses; `from_tensors` relies on this.
    rollouts = [group.rollouts for group in backlog.groups if group.rollouts is not None]
    if rollouts:
        whole = Rollouts.concat(rollouts)
        found["numbers"] = torch.tensor([group.number for group in backlog.groups])
        found |= rollout_tensors(whole)
    return {PREFIX + name: tensor for name, tensor in found.items()}


def rollout_tensors(rollouts: Rollouts) -> dict[str, Tensor]:
    """The rollouts by name, without their prompts."""
    found = _response_tensors(rollouts)
    if (record := rollouts.experts) is not None:
        found |= {"experts": record.experts, "num_experts": torch.tensor([record.num_experts])}
        found["layer_numbers"] = torch.tensor(record.layer_numbers)
    if (top := rollouts.top) is not None:
        found |= {"top_ids": top.ids, "top_logp": top.logp, "vocab_size": torch.tensor([top.vocab_size])}
    if (features := rollouts.features) is not None:
        found |= {"feature_rows": features.rows, "feature_offsets": features.offsets, "logits": features.logits}
        found["feature_layers"] = torch.tensor(features.layer_numbers)
        found |= {} if features.hidden is None else {"hidden": features.hidden}
    return found


def _response_tensors(rollouts: Rollouts) -> dict[str, Tensor]:
    each = rollouts.responses
    is_response = torch.cat([r.is_response for r in each])
    # Only responses of several turns have observations.
    observed = {} if bool(is_response.all()) else {"is_response": is_response}
    return observed | {
        "num_tokens": torch.tensor([len(r.tokens) for r in each]),
        "finishes": torch.tensor([FINISHES.index(r.finish) for r in each]),
        "tokens": torch.cat([r.tokens for r in each]),
        "logp_mu": torch.cat([r.logp_mu for r in each]),
        "versions": torch.cat([r.version_T for r in each]),
        # Python's floats are float64: a narrower type would round it.
        "temperature": torch.tensor([rollouts.temperature], dtype=torch.float64),
    }


def from_tensors(tensors: Mapping[str, Tensor], task: Task) -> Backlog | None:
    """The inverse of `to_tensors`; None where a checkpoint has no backlog. Other tensors are ignored."""
    found = {name.removeprefix(PREFIX): t for name, t in tensors.items() if name.startswith(PREFIX)}
    if not found:
        return None
    next_number = int(found["next_number"])
    if "numbers" not in found:
        return Backlog(next_number)
    numbers = found["numbers"].tolist()
    # As theory/oversampling.py draws them: the same number gives the same prompt.
    prompts = [task.prompts(number, 1)[0] for number in numbers]
    G = len(found["num_tokens"]) // len(numbers)
    whole = rollouts_of(found, [prompt for prompt in prompts for _ in range(G)])
    groups = [
        StartedGroup(number, prompt, whole.select(range(i * G, (i + 1) * G)))
        for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
    ]
    return Backlog(next_number, tuple(groups))


def rollouts_of(found: Mapping[str, Tensor], prompts: Sequence[Prompt]) -> Rollouts:
    """The inverse of `rollout_tensors`; `prompts` has one prompt per response."""
    lengths = found["num_tokens"].tolist()
    tokens, logp_mu, versions = (found[name].split(lengths) for name in ("tokens", "logp_mu", "versions"))
    is_response = found.get("is_response", torch.ones(sum(lengths), dtype=torch.bool)).split(lengths)
    each = zip(prompts, tokens, logp_mu, versions, found["finishes"].tolist(), is_response, strict=True)
    responses = [_response(*one) for one in each]
    # The routing rows' offsets: a sequence of S tokens has S - 1 rows.
    offsets = offsets_of([r.num_tokens - 1 for r in responses])
    record, features, top = None, None, None
    if "experts" in found:
        layers = tuple(found["layer_numbers"].tolist())
        num_experts = int(found["num_experts"])
        record = RoutingRecord(narrowed(found["experts"], num_experts), offsets, layers, num_experts)
    if "top_ids" in found:
        top = TopTokens.packed(found["top_ids"], found["top_logp"], offsets_of(lengths), int(found["vocab_size"]))
    if "feature_rows" in found:
        rows, feature_offsets, layers = (found[f"feature_{name}"] for name in ("rows", "offsets", "layers"))
        layer_numbers = tuple(layers.tolist())
        features = RouterFeatures(rows, feature_offsets, found.get("hidden"), found["logits"], layer_numbers)
    return Rollouts(tuple(responses), record, features, float(found["temperature"]), top)


def _response(
    prompt: Prompt, tokens: Tensor, logp_mu: Tensor, version_T: Tensor, finish: int, is_response: Tensor
) -> Response:
    versions = version_T.tolist()
    starts = [t for t, version in enumerate(versions) if t == 0 or version != versions[t - 1]]
    # By convention `Response.versions` is empty if one version sampled all.
    stretches = tuple((t, versions[t]) for t in starts) if len(starts) > 1 else ()
    # A response without tokens has no version: 0 stands in for it, and nothing reads it.
    oldest = min(versions, default=0)
    return Response(prompt, tokens, logp_mu, is_response, FINISHES[finish], oldest, stretches)
