"""A trace as rows, one a response, in JSON Lines or Parquet: what any system can write that has both engines' values.

| column       | a row holds                    | meaning                                                              |
|--------------|--------------------------------|----------------------------------------------------------------------|
| tokens       | S ints                         | prompt and response                                                  |
| num_prompt   | int                            | tokens of the prompt; T = S - num_prompt follow                      |
| logp_mu      | T floats                       | log-probability of each under mu, temperature 1, untruncated         |
| logp_old     | T floats                       | the same under old                                                   |
| is_response  | T bools                        | optional: False where no model sampled the token; all True           |
| entropy_old  | T floats                       | optional: entropy of old's next-token distribution, nats             |
| logp_pi      | T floats                       | optional: the same as logp_old under pi                              |
| reward       | float                          | optional: 0                                                          |
| experts_mu   | S - 1 lists of L lists of K    | optional: experts of mu, a row an input token; -1 where unknown      |
| experts_old  | the same                       | optional: what the trainer's live router logits choose               |
| step         | int                            | optional, of the first row: 0                                        |

Missing log-probabilities are null (NaN), never 0. Layers are numbered 0 to L - 1; a layer of nothing but expert 0 is
a dense one, or was not captured, and is left out. The number of experts is the largest id + 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.files import disk_errors
from lab.traces import Trace
from theory.routing.record import RoutingRecord

Row = Mapping[str, Any]
NEEDED = ("tokens", "num_prompt", "logp_mu", "logp_old")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line; ValueError naming the line that is none."""
    out = []
    with disk_errors(path, "read"):
        text = path.read_text(encoding="utf-8")
    for i, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {i}: expected a JSON object, got {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {i}: expected a JSON object, got {type(row).__name__}")
        out.append(row)
    if not out:
        raise ValueError("expected at least 1 row, got an empty file")
    return out


def load_parquet(path: Path) -> Trace:
    """The trace in a Parquet file of this schema; ValueError where pyarrow is missing or the file does not fit."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install 'firstorder[data]'") from error
    try:
        with disk_errors(path, "read"):
            table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"expected a Parquet file, got {error}") from error
    if table.num_rows == 0:
        raise ValueError("expected at least 1 row, got none")
    return trace([{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()])


def trace(rows: Sequence[Row]) -> Trace:
    """The trace of these rows; ValueError naming response, field, what was expected and what came."""
    missing = [name for name in NEEDED if name not in rows[0]]
    if missing:
        known = ", ".join(rows[0])
        raise ValueError(f"{', '.join(missing)}: missing in response 0, which has {known}; see docs/doctor.md")
    S_B = [_num_tokens(row, b) for b, row in enumerate(rows)]
    P_B = [_num_prompt(row, b, S) for b, (row, S) in enumerate(zip(rows, S_B, strict=True))]
    T_B = [S - P for S, P in zip(S_B, P_B, strict=True)]
    entropy_old, logp_pi = (floats(rows, T_B, name) if name in rows[0] else None for name in ("entropy_old", "logp_pi"))
    mu, old = (record(rows, S_B, name) for name in ("experts_mu", "experts_old"))
    mu, old = _alike(mu, old)
    known = mu or old
    responded = [row.get("is_response", [True] * T) for row, T in zip(rows, T_B, strict=True)]
    return Trace(
        step=int(rows[0].get("step", 0)),
        tokens=torch.cat([torch.tensor(row["tokens"], dtype=torch.int32) for row in rows]),
        offsets=torch.tensor([0, *S_B]).cumsum(0),
        num_prompt=torch.tensor(P_B),
        is_response=torch.cat([torch.tensor(part, dtype=torch.bool) for part in responded]),
        logp_mu=floats(rows, T_B, "logp_mu"),
        logp_old=floats(rows, T_B, "logp_old"),
        rewards=torch.tensor([float(row.get("reward", 0.0)) for row in rows]),
        experts_mu=None if mu is None else mu.experts,
        experts_old=None if old is None else old.experts,
        layer_numbers=() if known is None else known.layer_numbers,
        num_experts=0 if known is None else known.num_experts,
        logp_pi=logp_pi,
        entropy_old=entropy_old,
    )


def floats(rows: Sequence[Row], T_B: Sequence[int], name: str) -> Tensor:
    """The column's values, packed; null is NaN. ValueError where a response has not one value a token."""
    parts = []
    for b, (row, T) in enumerate(zip(rows, T_B, strict=True)):
        values = _field(row, b, name)
        if len(values) != T:
            short = "; one is missing: the end token's?" if len(values) == T - 1 else ""
            raise ValueError(
                f"{name}: expected {T} values, one a response token, in response {b}, got {len(values)}{short}"
            )
        parts.append(torch.tensor([math.nan if value is None else float(value) for value in values]))
    return torch.cat(parts)


def record(rows: Sequence[Row], S_B: Sequence[int], name: str) -> RoutingRecord | None:
    """The routing record of a column, without layers whose every id is 0; None where the first row has it not."""
    if rows[0].get(name) is None:
        return None
    payloads = [torch.as_tensor(_field(row, b, name)).long() for b, row in enumerate(rows)]
    for b, payload in enumerate(payloads):
        if payload.dim() != 3:
            raise ValueError(
                f"{name}: expected (rows, layers, slots) in response {b}, got shape {tuple(payload.shape)}"
            )
    if len({payload.shape[1:] for payload in payloads}) > 1:
        raise ValueError(f"{name}: expected the same layers and slots in all responses, got several")
    every = torch.cat(payloads)
    kept = [layer for layer in range(every.shape[1]) if bool((every[:, layer] > 0).any())]
    if not kept:
        raise ValueError(f"{name}: expected expert ids, got none above 0: the routes were not captured")
    try:
        cut = [payload[:, kept] for payload in payloads]
        return RoutingRecord.pack(cut, S_B, kept, int(every.max()) + 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _alike(mu: RoutingRecord | None, old: RoutingRecord | None) -> tuple[RoutingRecord | None, RoutingRecord | None]:
    """Both records with the number of experts of the one that has seen more of them."""
    if mu is None or old is None or mu.num_experts == old.num_experts:
        return mu, old
    num = max(mu.num_experts, old.num_experts)
    dtype = (mu if mu.num_experts == num else old).experts.dtype
    first, second = (RoutingRecord(r.experts.to(dtype), r.offsets, r.layer_numbers, num) for r in (mu, old))
    return first, second


def _num_tokens(row: Row, b: int) -> int:
    """S of a response; ValueError where its tokens are no list of ints."""
    tokens = _field(row, b, "tokens")
    if not isinstance(tokens, list):
        raise ValueError(f"tokens: expected a list of ints in response {b}, got {type(tokens).__name__}")
    for place, token in enumerate(tokens):
        if type(token) is not int:  # a bool is an int to isinstance
            raise ValueError(f"tokens: expected a list of ints in response {b}, got {token!r:.40} at {place}")
    return len(tokens)


def _num_prompt(row: Row, b: int, S: int) -> int:
    """P of a response; ValueError where it is no int in [0, S]."""
    P = _field(row, b, "num_prompt")
    if type(P) is not int or not 0 <= P <= S:
        raise ValueError(f"num_prompt: expected an int in [0, {S}] (tokens) in response {b}, got {P!r:.40}")
    return P


def _field(row: Row, b: int, name: str) -> Any:
    if row.get(name) is None:
        raise ValueError(f"{name}: missing in response {b}")
    return row[name]
