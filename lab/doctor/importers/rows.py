"""A trace as rows, one per response, in JSON Lines or Parquet: any system with both engines' values can write it.

| column       | a row holds                    | meaning                                                              |
|--------------|--------------------------------|----------------------------------------------------------------------|
| tokens       | S ints                         | prompt and response                                                  |
| num_prompt   | int                            | tokens of the prompt; T = S - num_prompt follow                      |
| logp_mu      | T floats                       | log-probability of each under mu, the distribution it was drawn from |
| logp_old     | T floats                       | the same under old                                                   |
| is_response  | T bools                        | optional: False where no model sampled the token; all True           |
| entropy_old  | T floats                       | optional: entropy of old's next-token distribution, nats             |
| logp_pi      | T floats                       | optional: the same as logp_old under pi                              |
| reward       | float                          | optional: 0                                                          |
| experts_mu   | S - 1 lists of L lists of K    | optional: experts of mu, a row per input token; -1 where unknown     |
| experts_old  | the same                       | optional: the choices of the trainer's live router logits            |
| engine       | int                            | optional: number of the engine, or of the rank, that it is from      |
| step         | int                            | optional, of the first row: 0                                        |
| temperature  | float                          | optional, of the first row: T at which tokens were drawn             |

Missing log-probabilities are null (NaN), never 0. Layers are numbered 0 to L - 1; a layer with expert 0 alone is dense
or was not captured, and is dropped on both sides. The number of experts is the largest id + 1.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from lab.doctor.importers.bad_rows import Bad, BadRowCollector, Read
from lab.doctor.importers.format import Format, Row
from lab.strict import describe
from lab.trace_values import impossible
from lab.traces import Trace
from theory.routing.packed_rows import offsets_of
from theory.routing.payloads import pack_record
from theory.routing.record import RoutingRecord

Model = TypeVar("Model", bound=pydantic.BaseModel)
Values = list[float | None]
MOST_EXPERTS = 2**15
"""Bound on expert ids: a record stores them in 16 bits, signed."""
FLOATS = ("logp_mu", "logp_old", "entropy_old", "logp_pi")
PACKED = ("tokens", "num_prompt", "is_response", "rewards", "engine", *FLOATS)
ROUTED = ("experts_mu", "experts_old")
OPTIONAL = ("entropy_old", "logp_pi", "engine", *ROUTED)


class ResponseRow(pydantic.BaseModel):
    """One row. Experts are checked later, as a tensor: they are many, and may already be an array."""

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
    engine: Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None = None
    step: Annotated[int, pydantic.Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def num_response(self) -> int:
        """T, the tokens after the prompt."""
        return len(self.tokens) - self.num_prompt

    def floats(self, name: str) -> Tensor:
        """A value for each of the T tokens; null is NaN."""
        # float32, torch's default for Python numbers, on both sides: the clue `exact_share` compares these bits.
        return torch.tensor([math.nan if value is None else value for value in getattr(self, name)])


class Columns:
    """The columns of a trace, collected row by row as tensors, so that a row's Python objects are freed early."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.values: dict[str, list[Tensor]] = {name: [] for name in (*PACKED, *ROUTED)}
        self.step = 0
        self.temperature: float | None = None

    def add(self, row: Row, place: str) -> None:
        """Adds a row; ValueError with its place, the field, and the expected and actual values."""
        response = _response(row, place)
        if not self.places:
            # The first row decides, as the table says.
            self.step, self.temperature = response.step or 0, response.temperature
        tensors = _tensors(response, place)
        for name in OPTIONAL if self.places else ():
            if (name in tensors) != bool(self.values[name]):
                # The row that lacks the column: this one, or else every earlier one.
                where = place if self.values[name] else self.places[0]
                raise ValueError(f"{where}: {name}: missing, though other responses have it")
        self.places.append(place)
        for name, tensor in tensors.items():
            self.values[name].append(tensor)

    def trace(self) -> Trace:
        """The trace of all rows."""
        S_B = [len(tokens) for tokens in self.values["tokens"]]
        mu, old = (record(self.values[name], self.places, S_B, name) for name in ROUTED)
        # Each column's largest id may be another, and two records are compared only at one number of experts.
        mu, old = _alike(mu, old)
        depths = {tensors[0].shape[1] for name in ROUTED if (tensors := self.values[name])}
        # Columns of two depths (of all layers, of those with experts) number their layers differently: those that are
        # left of each are in the same order.
        if len(depths) == 1:
            mu, old = _of_common_layers(mu, old)
        known = mu or old
        of = {name: torch.cat(tensors) for name, tensors in self.values.items() if tensors and name in PACKED}
        return Trace(
            step=self.step,
            tokens=of["tokens"],
            num_prompt=of["num_prompt"],
            is_response=of["is_response"],
            rewards=of["rewards"],
            logp_mu=of["logp_mu"],
            logp_old=of["logp_old"],
            logp_pi=of.get("logp_pi"),
            entropy_old=of.get("entropy_old"),
            engines=of.get("engine"),
            offsets=offsets_of(S_B),
            experts_mu=None if mu is None else mu.experts,
            experts_old=None if old is None else old.experts,
            layer_numbers=() if known is None else known.layer_numbers,
            num_experts=0 if known is None else known.num_experts,
            temperature=self.temperature,
        )


def packed(placed: Iterable[Read]) -> Trace:
    """The trace of rows with their places; BadRows, a line each, if some do not fit."""
    columns, found = Columns(), BadRowCollector()
    for row, place in placed:
        if isinstance(row, Bad):
            found.add(row.reason)
            continue
        try:
            columns.add(row, place)
        except ValueError as error:
            found.add(str(error))
    found.refuse()
    if not columns.places:
        raise ValueError("expected at least 1 row, got none")
    return columns.trace()


def trace(rows: Iterable[Row]) -> Trace:
    """The trace of these rows; ValueError with response, field, and the expected and actual values."""
    return packed((row, f"response {b}") for b, row in enumerate(rows))


def refuse_misspelt(row: Row, optional: Iterable[str], place: str) -> None:
    """ValueError for an unknown column spelt like an optional one that is absent."""
    absent = [name for name in optional if name not in row]
    for name in row:
        close = difflib.get_close_matches(str(name), absent, n=1, cutoff=0.8)
        if close and name not in optional:
            raise ValueError(f"{place}: {name}: unknown column; did you mean '{close[0]}'? Rename or remove it")


def validated(model: type[Model], row: Row, place: str) -> Model:
    """The row as the model; ValueError with its place and the first field that is misspelt or does not fit."""
    refuse_misspelt(row, model.model_fields, place)
    try:
        return model.model_validate(dict(row))
    except pydantic.ValidationError as error:
        raise ValueError(f"{place}: {describe(model, error.errors(include_url=False)[0])}") from error


def record(payloads: list[Tensor], places: Sequence[str], S_B: Sequence[int], name: str) -> RoutingRecord | None:
    """The routing record of a column, without layers whose every id is 0; None if the column is absent."""
    if not payloads:
        return None
    for payload, place in zip(payloads, places, strict=True):
        # Rows differ in length, but all have the same layers and slots.
        if payload.shape[1:] != payloads[0].shape[1:]:
            here, first = tuple(payload.shape[1:]), tuple(payloads[0].shape[1:])
            raise ValueError(f"{place}: {name}: expected (layers, slots) {first} as in {places[0]}, got {here}")
    # Above 0, as a layer that was not captured holds 0 or -1 alone.
    seen = torch.stack([(payload > 0).any(0).any(-1) for payload in payloads]).any(0)
    kept = seen.nonzero()[:, 0].tolist()
    if not kept:
        raise ValueError(f"{name}: expected expert ids, got none above 0: the routes were not captured")
    most = max(int(payload.max()) for payload in payloads if payload.numel())
    try:
        cut = payloads if len(kept) == len(seen) else [payload[:, kept] for payload in payloads]
        return pack_record(cut, S_B, kept, most + 1)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _response(row: Row, place: str) -> ResponseRow:
    """The row, validated; ValueError with its place and field."""
    # Before pydantic, whose message for a missing field does not list the row's own columns.
    for name, field in ResponseRow.model_fields.items():
        if field.is_required() and row.get(name) is None:
            raise ValueError(f"{place}: {name}: missing; the row has {', '.join(map(str, row))}; see docs/doctor.md")
    response = validated(ResponseRow, row, place)
    S, P, T = len(response.tokens), response.num_prompt, response.num_response
    if S < P:
        raise ValueError(f"{place}: num_prompt: expected at most the {S} tokens, got {P}")
    for name in ("logp_mu", "logp_old", "is_response", "entropy_old", "logp_pi"):
        got = T if getattr(response, name) is None else len(getattr(response, name))
        if got != T:
            hint = {T - 1: "; one is missing: the end token's?", S: "; the prompt's tokens are in it"}.get(got, "")
            raise ValueError(f"{place}: {name}: expected {T} values, one per response token, got {got}{hint}")
    return response


def _tensors(response: ResponseRow, place: str) -> dict[str, Tensor]:
    """The row as tensors, by the names of a trace; absent columns stay absent."""
    T = response.num_response
    sampled = [True] * T if response.is_response is None else response.is_response
    out = {
        "tokens": torch.tensor(response.tokens, dtype=torch.int32),
        "num_prompt": torch.tensor([response.num_prompt]),
        "is_response": torch.tensor(sampled, dtype=torch.bool),
        "rewards": torch.tensor([response.reward or 0.0]),
    }
    out |= {name: response.floats(name) for name in FLOATS if getattr(response, name) is not None}
    for name in FLOATS:
        # Here, as a trace would name the response alone.
        if name in out and (found := impossible(name, out[name], out["is_response"])):
            raise ValueError(f"{place}: {found[1]} at token {found[0]} of the response")
    if not math.isfinite(out["rewards"].item()):
        raise ValueError(f"{place}: reward: expected a finite number of 32 bits, got {response.reward}")
    if response.engine is not None:
        out["engine"] = torch.tensor([response.engine])
    routes = {name: getattr(response, name) for name in ROUTED}
    return out | {name: _experts(value, f"{place}: {name}") for name, value in routes.items() if value is not None}


def _experts(value: Any, where: str) -> Tensor:
    """Expert ids as (rows, layers, slots), -1 where unknown; ValueError for anything else."""
    try:
        ids = torch.as_tensor(_as_array(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{where}: expected ints, rows x layers x slots, got {str(error).splitlines()[0]}") from error
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"{where}: expected ints, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.dim() != 3:
        raise ValueError(f"{where}: expected (rows, layers, slots), got shape {tuple(ids.shape)}")
    if ids.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has no comparisons for them
        ids = ids.long()
    if ids.numel() and not -1 <= int(ids.min()) <= int(ids.max()) < MOST_EXPERTS:
        raise ValueError(f"{where}: expected ids in [-1, {MOST_EXPERTS}), got {int(ids.min())} to {int(ids.max())}")
    return ids.to(torch.int16)


def _as_array(value: Any) -> Any:
    """Nested lists of ints as an array, which NumPy builds three times as fast as torch; anything else unchanged."""
    if not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged: torch has the better error message
        return value
    return array if array.dtype.kind == "i" else value


def _alike(mu: RoutingRecord | None, old: RoutingRecord | None) -> tuple[RoutingRecord | None, RoutingRecord | None]:
    """Both records with the larger of their numbers of experts, and its dtype."""
    if mu is None or old is None or mu.num_experts == old.num_experts:
        return mu, old
    num = max(mu.num_experts, old.num_experts)
    dtype = (mu if mu.num_experts == num else old).experts.dtype
    first, second = (RoutingRecord(r.experts.to(dtype), r.offsets, r.layer_numbers, num) for r in (mu, old))
    return first, second


def _of_common_layers(
    mu: RoutingRecord | None, old: RoutingRecord | None
) -> tuple[RoutingRecord | None, RoutingRecord | None]:
    """Both records over the layers that both have, by their numbers; ValueError without any."""
    if mu is None or old is None or mu.layer_numbers == old.layer_numbers:
        return mu, old
    common = tuple(sorted(set(mu.layer_numbers) & set(old.layer_numbers)))
    if not common:
        got = f"{mu.layer_numbers} of mu and {old.layer_numbers} of old"
        raise ValueError(f"experts_mu, experts_old: expected a layer that both have, got layers {got}")
    first, second = (
        RoutingRecord(r.experts[:, [r.layer_numbers.index(n) for n in common]], r.offsets, common, r.num_experts)
        for r in (mu, old)
    )
    return first, second


FORMAT = Format(
    steps=(r"step[-_]?(?P<step>\d+)\.(jsonl|parquet)",),
    name="rows", files="any .jsonl or .parquet with these columns",
    has="tokens, mu, old; entropies, pi, rewards and experts of both where their columns are present",
    lacks="Nothing, if all columns are present.", source="lab/doctor/importers/rows.py",
    uses=tuple(ResponseRow.model_fields), is_mine=lambda first: True, read=lambda raw, place: [raw],
)  # fmt: skip
