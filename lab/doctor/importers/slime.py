"""slime's and miles's dumps of rollouts (`--save-debug-rollout-data`) and of training (`--save-debug-train-data`).

Three layouts, all with `rollout_id`:

- Rollouts: "samples", a dictionary per response: tokens, response_length, loss_mask, reward, rollout_log_probs,
  rollout_routed_experts: mu's side, without the trainer's.
- Training, slime (format_version 2, one file): "samples" with tokens, response_lengths, loss_masks, rewards,
  rollout_log_probs, log_probs, and "dp_shards" with the order of micro-batches.
- Training, miles and older versions of slime, a file per rank: "rollout_data" with the same names, lists over
  responses, complete without context parallelism.

Dumps of training have no experts: with `--use-rollout-routing-replay` the trainer deletes rollout_routed_experts from
the batch once the routers have them, before the file is written. A dump that has some is read with them.

`log_probs` is old. miles writes it if the old pass ran, on the ranks of the last pipeline stage; all ranks write a
file, and those of a tensor-parallel group the same rows. The pass runs unless `--skip-actor-forward-only` or
`--use-rollout-logprobs` is set; with the latter alone, `--get-mismatch-metrics` makes it run. If no old pass ran, slime
takes it from the training pass: old with one update per rollout, pi with `--use-rollout-logprobs` and several.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lab.doctor.importers import rows
from lab.doctor.importers.format import Format, NoOldError, Row


def _is_mine(content: Mapping[str, Any]) -> bool:
    return bool({"samples", "rollout_data"} & set(content))


def _columns(content: Row) -> Iterable[str]:
    samples, data = content.get("samples"), content.get("rollout_data")
    return (samples[0] if isinstance(samples, list) and samples else data) or ()


def _read(content: Row, place: str) -> Iterator[Row]:
    """The rows of a dump; ValueError with a missing field and the flag that adds it."""
    if "samples" in content:
        return _of_samples(content)
    data = content["rollout_data"]
    if not isinstance(data, dict):
        raise ValueError(f"rollout_data: expected a dictionary, got {type(data).__name__}")
    return _of_training(data, content.get("rollout_id"))


def _of_samples(content: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a dump of samples; a dump of rollouts needs `log_probs` (old) added to each sample."""
    samples = content["samples"]
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        raise ValueError("samples: expected a list of dictionaries, got something else")
    if not samples:
        raise ValueError("samples: expected at least 1, got none")
    if samples[0].get("rollout_log_probs") is None:
        raise ValueError("samples: rollout_log_probs is missing (mu): ask the engine for log-probabilities")
    if samples[0].get("log_probs") is None:
        raise ValueError(
            "samples: log-probabilities of old are missing (the rollout dump never has them); dump with "
            "--save-debug-train-data instead (--old goes with .jsonl and .parquet alone)"
        )
    # Of the two dumps with samples only that of training has dp_shards; its names are the plural ones already.
    names = {} if "dp_shards" in content else OF_ROLLOUT
    fields = {str(name) for sample in samples for name in sample}
    columns = {name: [sample.get(names.get(name, name)) for sample in samples] for name in [*names, *sorted(fields)]}
    return _of_training(columns, content.get("rollout_id"))


NEEDED = ("tokens", "response_lengths", "rollout_log_probs", "log_probs")
OPTIONAL = ("loss_masks", "rewards", "rollout_routed_experts")
OF_ROLLOUT = {"response_lengths": "response_length", "loss_masks": "loss_mask", "rewards": "reward"}
"""Names that differ in a dump of rollouts."""


def _of_training(data: Mapping[str, Any], step: Any) -> Iterator[Row]:
    """The rows of a rank's data; rows.py checks their values."""
    if data.get("rollout_log_probs") is None:
        raise ValueError("rollout_data: rollout_log_probs is missing (mu): ask the engine for log-probabilities")
    if data.get("log_probs") is None:
        raise NoOldError(
            "rollout_data: log_probs is missing (old): leave out --skip-actor-forward-only and --use-rollout-logprobs, "
            "or keep the latter with --custom-tis-function-path and --get-mismatch-metrics, so that the old pass runs, "
            "or this rank is not on the last pipeline stage"
        )
    rows.refuse_misspelt(data, (*NEEDED, *OPTIONAL), "rollout_data")
    names = [*NEEDED, *(name for name in OPTIONAL if data.get(name) is not None)]
    columns = {name: _column(data, name) for name in names}
    B = len(columns["tokens"])
    for name, values in columns.items():
        if len(values) != B or B == 0:
            raise ValueError(f"rollout_data: {name}: expected a value for each of the {B} responses, got {len(values)}")
    for b in range(B):
        given = {name: values[b] for name, values in columns.items() if values[b] is not None}
        tokens, T = given.get("tokens"), given.get("response_lengths")
        if not isinstance(tokens, list) or type(T) is not int:
            raise ValueError(f"response {b}: expected a list of tokens and an int response_length, got other types")
        for name in ("rollout_log_probs", "log_probs"):
            # One value short is the end token's, which rows.py reports.
            if isinstance(given.get(name), list) and len(given[name]) < T - 1:
                raise ValueError(
                    f"response {b}: {name}: expected {T} values, got {len(given[name])}; under context parallelism "
                    "a rank has only a part: dump with --context-parallel-size 1"
                )
        row = {"tokens": tokens, "num_prompt": len(tokens) - T, "step": step}
        row |= {"logp_mu": given.get("rollout_log_probs"), "logp_old": given.get("log_probs")}
        if isinstance(masks := given.get("loss_masks"), list):
            row["is_response"] = [bool(value) for value in masks]
        if isinstance(reward := given.get("rewards"), (int, float)):
            row["reward"] = reward
        row["experts_mu"] = given.get("rollout_routed_experts")
        yield row


def _column(data: Mapping[str, Any], name: str) -> list[Any]:
    """The values of a column, one per response, with tensors as lists (except experts, which are many)."""
    values = data.get(name)
    if isinstance(values, (torch.Tensor, np.ndarray)) and values.ndim:
        values = list(values) if name == "rollout_routed_experts" else values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"rollout_data: {name}: expected a list over responses, got {type(values).__name__}")
    if name == "rollout_routed_experts":
        return list(values)
    # A reward stands here as its function returned it, which may be a scalar of NumPy.
    return [value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value for value in values]


FORMAT = Format(
    # First the folder of `--dump-details` that has both sides: the other one's files have the same names.
    steps=tuple(f"{folder}{name}" for folder in ("train_data/", r"([^/]*\D)?")
                for name in (r"(?P<step>\d+)_(?P<part>\d+)\.pt", r"(?P<step>\d+)\.pt")),
    name="slime, miles",
    files=".pt of --save-debug-train-data, for miles a file per rank (--save-debug-rollout-data has mu alone)",
    has="tokens, mu, rewards, old (for miles if the old pass ran, as it does by default)",
    lacks="Experts of both, entropies.",
    source="THUDM/slime slime/observability/train_data_utils.py at 624b824, radixark/miles "
    "miles/utils/train_dump_utils.py at 31f1ca9",
    uses=(*NEEDED, *OPTIONAL, "response_length", "loss_mask", "reward"),
    is_mine=_is_mine, read=_read, columns=_columns,
)  # fmt: skip
