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

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from torch import Tensor

from lab.files import disk_errors
from lab.strict import describe
from lab.traces import Trace
from theory.routing.record import RoutingRecord

Row = Mapping[str, Any]
Values = list[float | None]
MOST_EXPERTS = 2**15
"""Experts that a record's 16 bits can tell apart."""


class Response(pydantic.BaseModel):
    """One row. Experts are checked as the tensor that they become: they are many, and may be an array already."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    tokens: list[Annotated[int, pydantic.Field(ge=0, lt=2**31)]]
    num_prompt: Annotated[int, pydantic.Field(ge=1)]
    logp_mu: Values
    logp_old: Values
    is_response: list[bool] | None = None
    entropy_old: Values | None = None
    logp_pi: Values | None = None
    reward: float | None = None
    experts_mu: Any = None
    experts_old: Any = None
    step: Annotated[int, pydantic.Field(ge=0, lt=2**63)] | None = None

    @property
    def num_response(self) -> int:
        """T, the tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    def floats(self, name: str) -> Tensor:
        """A value for each of the T tokens; null is NaN."""
        return torch.tensor([math.nan if value is None else value for value in getattr(self, name)])


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a file, one a line, and where each stands; ValueError naming the line that is none."""
    out, places = [], []
    with disk_errors(path, "read"):
        text = path.read_bytes()
    for i, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {i}: expected a JSON object, got {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {i}: expected a JSON object, got {type(row).__name__}")
        out.append(row)
        places.append(f"line {i}")
    if not out:
        raise ValueError("expected at least 1 row, got an empty file")
    return out, places


def load_parquet(path: Path) -> Trace:
    """The trace in a Parquet file of this schema; ValueError where pyarrow is missing or the file does not fit."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("Parquet needs pyarrow: pip install 'firstorder[data]'") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"expected a Parquet file, got {' '.join(str(error).split())}") from error
    if not rows:
        raise ValueError("expected at least 1 row, got none")
    return trace([{name: value for name, value in row.items() if value is not None} for row in rows])


def trace(rows: Sequence[Row], places: Sequence[str] | None = None) -> Trace:
    """The trace of these rows; ValueError naming the row's place, the field, what was expected and what came."""
    places = [f"response {b}" for b in range(len(rows))] if places is None else places
    responses = [_response(row, place) for row, place in zip(rows, places, strict=True)]
    for name in ("entropy_old", "logp_pi", "experts_mu", "experts_old"):
        _check_everywhere(responses, places, name)
    S_B = [len(response.tokens) for response in responses]
    mu, old = (record(responses, places, S_B, name) for name in ("experts_mu", "experts_old"))
    mu, old = _alike(mu, old)
    known, first = mu or old, responses[0]

    def packed(name: str) -> Tensor:
        return torch.cat([response.floats(name) for response in responses])

    return Trace(
        step=first.step or 0,
        tokens=torch.cat([torch.tensor(response.tokens, dtype=torch.int32) for response in responses]),
        offsets=torch.tensor([0, *S_B]).cumsum(0),
        num_prompt=torch.tensor([response.num_prompt for response in responses]),
        is_response=torch.cat([_responded(response) for response in responses]),
        logp_mu=packed("logp_mu"),
        logp_old=packed("logp_old"),
        rewards=torch.tensor([response.reward or 0.0 for response in responses]),
        experts_mu=None if mu is None else mu.experts,
        experts_old=None if old is None else old.experts,
        layer_numbers=() if known is None else known.layer_numbers,
        num_experts=0 if known is None else known.num_experts,
        logp_pi=None if first.logp_pi is None else packed("logp_pi"),
        entropy_old=None if first.entropy_old is None else packed("entropy_old"),
    )


def refuse_misspelt(row: Row, optional: Iterable[str], place: str) -> None:
    """ValueError for a column that is none, but spelt like an optional one that is not there."""
    absent = [name for name in optional if name not in row]
    for name in row:
        close = difflib.get_close_matches(str(name), absent, n=1, cutoff=0.8)
        if close and name not in optional:
            raise ValueError(f"{place}: {name}: unknown column; did you mean '{close[0]}'? Rename or remove it")


def record(responses: Sequence[Response], places: Sequence[str], S_B: Sequence[int], name: str) -> RoutingRecord | None:
    """The routing record of a column, without layers whose every id is 0; None where there is no such column."""
    if getattr(responses[0], name) is None:
        return None
    payloads = [_experts(getattr(r, name), f"{place}: {name}") for r, place in zip(responses, places, strict=True)]
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


def _response(row: Row, place: str) -> Response:
    """The row, once it fits; ValueError with its place and field."""
    for name, field in Response.model_fields.items():
        if field.is_required() and row.get(name) is None:
            raise ValueError(f"{place}: {name}: missing; the row has {', '.join(map(str, row))}; see docs/doctor.md")
    refuse_misspelt(row, Response.model_fields, place)
    try:
        response = Response.model_validate(dict(row))
    except pydantic.ValidationError as error:
        raise ValueError(f"{place}: {describe(Response, error.errors(include_url=False)[0])}") from error
    S, P, T = len(response.tokens), response.num_prompt, response.num_response
    if S < P:
        raise ValueError(f"{place}: num_prompt: expected at most the {S} tokens, got {P}")
    for name in ("logp_mu", "logp_old", "is_response", "entropy_old", "logp_pi"):
        got = T if getattr(response, name) is None else len(getattr(response, name))
        if got != T:
            short = "; one is missing: the end token's?" if got == T - 1 else ""
            raise ValueError(f"{place}: {name}: expected {T} values, one a response token, got {got}{short}")
    return response


def _check_everywhere(responses: Sequence[Response], places: Sequence[str], name: str) -> None:
    """ValueError where some responses have the column and some have not."""
    lacking = [place for r, place in zip(responses, places, strict=True) if getattr(r, name) is None]
    if lacking and len(lacking) < len(responses):
        raise ValueError(f"{lacking[0]}: {name}: missing, though other responses have it")


def _responded(response: Response) -> Tensor:
    if response.is_response is None:
        return torch.ones(response.num_response, dtype=torch.bool)
    return torch.tensor(response.is_response, dtype=torch.bool)


def _experts(value: Any, where: str) -> Tensor:
    """Expert ids as (rows, layers, slots), -1 where unknown; ValueError for anything else."""
    try:
        ids = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{where}: expected ints, rows x layers x slots, got {str(error).splitlines()[0]}") from error
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"{where}: expected ints, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.dim() != 3:
        raise ValueError(f"{where}: expected (rows, layers, slots), got shape {tuple(ids.shape)}")
    ids = ids.long()
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < MOST_EXPERTS:
        raise ValueError(f"{where}: expected ids in [-1, {MOST_EXPERTS}), got {int(ids.min())} to {int(ids.max())}")
    return ids


def _alike(mu: RoutingRecord | None, old: RoutingRecord | None) -> tuple[RoutingRecord | None, RoutingRecord | None]:
    """Both records with the number of experts of the one that has seen more of them."""
    if mu is None or old is None or mu.num_experts == old.num_experts:
        return mu, old
    num = max(mu.num_experts, old.num_experts)
    dtype = (mu if mu.num_experts == num else old).experts.dtype
    first, second = (RoutingRecord(r.experts.to(dtype), r.offsets, r.layer_numbers, num) for r in (mu, old))
    return first, second
