"""Any dump of rows, once its columns are named: `--columns tokens=input_ids,logp_mu=gen_logprobs,logp_old=...`.

Besides the columns of rows.py, names are `prompt_tokens` and `response_tokens` (instead of tokens and num_prompt) and
`length` (the number of real tokens in a row; the rest is padding). Columns have a value for each of the T response
tokens, or for all S tokens, prompt included: then `is_response` or `num_prompt` says where the response begins.

A safetensors file has one tensor of B rows per column: (B, S) or (B, T), and (B,) for `num_prompt`, `length`, `reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors

from lab.doctor.importers import rows
from lab.doctor.importers.aligned import listed, mask_of, unprompted
from lab.doctor.importers.format import Placed, Row
from lab.files import disk_errors
from lab.strict import did_you_mean

OURS = (*rows.ResponseRow.model_fields, "prompt_tokens", "response_tokens", "length")
BESIDE = ("is_response", *rows.FLOATS)
"""Columns with a value per token."""


def parse(text: str) -> dict[str, str]:
    """Our column names to theirs; ValueError naming a part that is no `ours=theirs`."""
    out: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not equals or not theirs:
            raise ValueError(f"--columns: expected ours=theirs, with a comma between pairs, got {part!r}")
        if ours not in OURS:
            raise ValueError(f"--columns: {ours}: unknown name{did_you_mean(ours, OURS)}")
        if ours in out:
            raise ValueError(f"--columns: {ours}: named twice")
        out[ours] = theirs
    return out


def read(raw: Row, place: str, names: Mapping[str, str]) -> Row:
    """The row of rows.py; ValueError with the place and the file's own column name for a column that does not fit."""
    row: dict[str, Any] = {}
    for ours, theirs in names.items():
        if raw.get(theirs) is None:
            raise ValueError(f"{place}: {theirs} ({ours}): missing; the row has {', '.join(map(str, raw))}")
        row[ours] = raw[theirs]
    if "response_tokens" in row:
        prompt, response = (listed(row, name, place) for name in ("prompt_tokens", "response_tokens"))
        row |= {"tokens": [*prompt, *response], "num_prompt": len(prompt)}
    return _cut(row, place)


def _cut(row: dict[str, Any], place: str) -> Row:
    """The row without padding, with values for response tokens only."""
    tokens = listed(row, "tokens", place)
    # From left to right: `in` must look before `pop` removes the name.
    has_length, W, S = "length" in row, len(tokens), row.pop("length", len(tokens))
    if type(S) is not int or not 1 <= S <= W:  # isinstance would accept True
        raise ValueError(f"{place}: length: expected an int from 1 to {W} tokens, got {S!r}")
    # A column as long as the tokens covers the prompt too; a shorter one has the response alone.
    whole = [name for name in BESIDE if isinstance(row.get(name), list) and len(row[name]) == W]
    row |= {name: row[name][:S] for name in ("tokens", *whole)}
    tokens, P = row["tokens"], row.get("num_prompt")
    if "is_response" in row:
        row["is_response"] = mask_of(row, "is_response", place)
    if P is None and "is_response" not in whole:
        raise ValueError(f"{place}: num_prompt: missing, and is_response has no value for each of the {W} tokens")
    if P is None:
        if not has_length:  # after the last sampled token there is only padding, or an unanswered observation
            stop = max((at + 1 for at, is_one in enumerate(row["is_response"]) if is_one), default=W)
            row |= {name: row[name][:stop] for name in ("tokens", *whole)}
            tokens = row["tokens"]
        columns = {name: row[name] for name in whole if name != "is_response"}
        short = [name for name in BESIDE if name in row and name not in whole]
        if short:
            own = row[short[0]]
            got = len(own) if isinstance(own, list) else repr(own)
            raise ValueError(f"{place}: {short[0]}: expected {W} values, one per token as in is_response, got {got}")
        return row | unprompted(tokens, row["is_response"], columns)
    # Any other P is left to rows.py, which refuses it by name.
    if type(P) is int and P > 0:
        row |= {name: row[name][P:] for name in whole}
    return row


def read_safetensors(path: Path) -> Iterator[Placed]:
    """The rows of a file with one tensor per column; ValueError where it is no such file."""
    try:
        with disk_errors(path, "read"), safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except safetensors.SafetensorError as error:
        raise ValueError(f"expected a safetensors file, got {error}") from error
    if {"offsets", "num_prompt"} <= set(tensors):
        raise ValueError("--columns: expected none with a trace of ours, whose columns have our names")
    sizes = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    B = max(sizes.values(), default=0)
    odd = [name for name, size in sizes.items() if size != B]
    if odd or not B:
        raise ValueError(
            f"{odd[0] if odd else 'tensors'}: expected {B or 'some'} rows, got {sizes.get(odd[0]) if odd else 0}"
        )
    for b in range(B):
        values = {name: tensor[b] for name, tensor in tensors.items()}
        # Routes stay a tensor: as lists they would be most of the row.
        yield {name: v if v.dim() > 1 else v.tolist() for name, v in values.items()}, f"response {b}"
