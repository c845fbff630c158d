"""Laws of the importers: a trace in any documented format comes back, and what a dump lacks is one clear line."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from firstorder.cli import main
from lab.doctor import importers
from lab.doctor.importers import load_trace
from lab.doctor.importers.reading import read_parquet
from lab.traces import Trace
from tests.lab.doctor.patients import draw_rows, with_experts
from theory.streams import stream

E, L, K = 8, 3, 2


def full_rows() -> list[dict[str, Any]]:
    """A few responses of unlike lengths, with observations, rewards and both sides' routes (of experts 0 to 7)."""
    generator, out = stream(0, "importers"), []
    for b, row in enumerate(draw_rows(num_prompts=3, num_responses=2)):
        T = len(row["logp_mu"])
        shape = (len(row["tokens"]) - 1, L, E)
        mu, old = (torch.rand(shape, generator=generator).topk(K).indices.sort(-1).values for _ in range(2))
        mu[0, :, -1], old[0, :, -1] = E - 1, E - 1  # the largest id is seen, so that all formats find 8 experts
        mu[0, :, 0], old[0, :, 0] = 0, 0
        row = with_experts(row, mu, old)
        logp_mu = [x - 0.25 for x in row["logp_mu"]]
        out.append(row | {"logp_mu": logp_mu, "is_response": [t != 1 or T == 1 for t in range(T)], "reward": b / 4})
    return out


ROWS = full_rows()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_verl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As verl's batch holds them: prompts padded on the left, responses on the right, log-probs 0 on padding."""
    P, T = max(row["num_prompt"] for row in rows) + 2, max(len(row["logp_mu"]) for row in rows) + 3
    lines = []
    for row in rows:
        p, t = row["num_prompt"], len(row["logp_mu"])
        left, right = P - p, T - t
        routes = [[[0] * K] * L] * left + row["experts_mu"] + [[[0] * K] * L] * (right + 1)
        lines.append(
            {"input": "2+3=", "output": "5", "gts": "5", "score": row["reward"], "step": 12}
            | {"prompts": [0] * left + row["tokens"][:p], "responses": row["tokens"][p:] + [0] * right}
            | {"attention_mask": [0] * left + [1] * (p + t) + [0] * right}
            | {"response_mask": [int(x) for x in row["is_response"]] + [0] * right}
            | {"rollout_log_probs": row["logp_mu"] + [0.0] * right, "old_log_probs": row["logp_old"] + [0.0] * right}
            | {"entropys": row["entropy_old"] + [0.0] * right, "routed_experts": routes}
        )
    return write_jsonl(path, lines)


def slime_data(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The batch of a rank of slime; routes as an array over all layers, of which the first is dense."""
    dense = [np.array([[[0] * K, *layers] for layers in row["experts_mu"]], dtype=np.int32) for row in rows]
    return {
        "tokens": [torch.tensor(row["tokens"]) for row in rows],
        "response_lengths": [len(row["logp_mu"]) for row in rows],
        "loss_masks": [torch.tensor(row["is_response"]).int() for row in rows],
        "rewards": [row["reward"] for row in rows],
        "rollout_log_probs": [torch.tensor(row["logp_mu"]) for row in rows],
        "log_probs": [torch.tensor(row["logp_old"]) for row in rows],
        "rollout_routed_experts": dense,
    }


def write_slime(path: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    data = slime_data(rows) | changes
    kept = {name: value for name, value in data.items() if value is not None}
    torch.save({"rollout_id": 12, "rank": 0, "rollout_data": kept}, path)
    return path


def differing(a: Trace, b: Trace) -> set[str]:
    """The fields in which two traces differ."""
    pairs = {f.name: (getattr(a, f.name), getattr(b, f.name)) for f in fields(Trace)}
    return {n for n, (x, y) in pairs.items() if not _same(x, y)}


def _same(x: Any, y: Any) -> bool:
    return (
        torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else x is y or (type(x) is type(y) and x == y)
    )


WRITERS: dict[str, tuple[Callable[..., Path], set[str]]] = {
    "t.jsonl": (write_jsonl, set()),
    "t.parquet": (write_parquet, set()),
    "12.jsonl": (write_verl, {"experts_old", "step"}),
    "train.pt": (write_slime, {"experts_old", "step", "entropy_old", "layer_numbers"}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_trace(name: str, tmp_path: Path) -> None:
    """A trace as rows, as verl's batch or as slime's training dump comes back as it is, but for what these lack."""
    ours = load_trace(write_jsonl(tmp_path / "ours.jsonl", ROWS))
    ours.save(tmp_path / "ours.safetensors")
    assert not differing(load_trace(tmp_path / "ours.safetensors"), ours)
    write, lacks = WRITERS[name]
    theirs = load_trace(write(tmp_path / name, ROWS))
    assert differing(theirs, ours) == lacks
    assert theirs.num_experts == E and len(theirs) == len(ROWS)


def test_routes_in_parquet_are_arrays_or_what_is_wrong_with_them(tmp_path: Path) -> None:
    """Even routes of ints come as arrays; with a null, an uneven row or no row the words are those of JSON Lines."""
    write_parquet(tmp_path / "even.parquet", ROWS)
    (first, _), *_ = read_parquet(tmp_path / "even.parquet")
    assert isinstance(first["experts_mu"], np.ndarray) and first["experts_mu"].tolist() == ROWS[0]["experts_mu"]
    good = ROWS[1]["experts_mu"]
    for spoilt in (
        [[[None] * K] * L, *good[1:]],
        [good[0][:-1], *good[1:]],
        [[good[0][0][:-1], *good[0][1:]], *good[1:]],
    ):
        rows, told = [ROWS[0], ROWS[1] | {"experts_mu": spoilt}, *ROWS[2:]], []
        for write, name in ((write_parquet, "t.parquet"), (write_jsonl, "t.jsonl")):
            with pytest.raises(ValueError) as caught:
                load_trace(write(tmp_path / name, rows))
            told.append(str(caught.value).split("experts_mu: ")[1])
        assert told[0] == told[1]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_off_while_reading_and_as_it_was_after(
    is_enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file is refused."""
    was_enabled, real, seen = gc.isenabled(), importers.read_jsonl, []

    def watched(path: Path) -> Any:
        seen.append(gc.isenabled())
        return real(path)

    monkeypatch.setattr(importers, "read_jsonl", watched)
    try:
        (gc.enable if is_enabled else gc.disable)()
        load_trace(write_jsonl(tmp_path / "t.jsonl", ROWS))
        with pytest.raises(ValueError):
            load_trace(write_jsonl(tmp_path / "none.jsonl", []))
        assert gc.isenabled() == is_enabled and seen == [False, False]
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_dense_layers_are_left_out_by_number(tmp_path: Path) -> None:
    """A layer of nothing but expert 0 is no MoE layer; those that are left keep their own numbers."""
    assert load_trace(write_slime(tmp_path / "train.pt", ROWS)).layer_numbers == (1, 2, 3)


def test_a_missing_value_is_nan_and_never_0(tmp_path: Path) -> None:
    """null in a row of log-probabilities is NaN in the trace."""
    hole = [ROWS[0] | {"logp_mu": [None, *ROWS[0]["logp_mu"][1:]]}, *ROWS[1:]]
    trace = load_trace(write_jsonl(tmp_path / "t.jsonl", hole))
    assert math.isnan(trace.logp_mu[0]) and int(trace.logp_mu.isnan().sum()) == 1


def without(*names: str) -> list[dict[str, Any]]:
    """The rows without these fields."""
    return [{name: value for name, value in row.items() if name not in names} for row in ROWS]


class Elsewhere:
    """A class that a file must not be able to call."""


def samples(**changes: Any) -> dict[str, Any]:
    rows = [
        {"tokens": r["tokens"], "response_length": len(r["logp_mu"]), "rollout_log_probs": r["logp_mu"]} for r in ROWS
    ]
    return {"rollout_id": 3, "samples": [row | changes for row in rows]}


LACKING: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "no old": (lambda d: write_jsonl(d / "t.jsonl", without("logp_old")), "line 1: logp_old: missing", "tokens"),
    "verl as it is": (
        lambda d: write_jsonl(d / "1.jsonl", [{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}]),
        "verl's dump lacks prompts, responses, .*old_log_probs", "calculate_log_probs=True",
    ),
    "slime's rollouts": (
        lambda d: torch.save(samples(), d / "r.pt") or d / "r.pt",
        "log-probabilities of old are missing", "--save-debug-train-data",
    ),
    "slime without mu": (
        lambda d: torch.save(samples(rollout_log_probs=None), d / "r.pt") or d / "r.pt",
        "rollout_log_probs is missing", "mu",
    ),
    "slime without an old pass": (
        lambda d: write_slime(d / "t.pt", ROWS, log_probs=None), "log_probs is missing", "--get-mismatch-metrics",
    ),
    "a part of the context": (
        lambda d: write_slime(d / "t.pt", ROWS, log_probs=[torch.zeros(1) for _ in ROWS]),
        "log_probs: expected .* got 1", "--context-parallel-size 1",
    ),
    "an end token too few": (
        lambda d: write_jsonl(d / "t.jsonl", [row | {"logp_mu": row["logp_mu"][:-1]} for row in ROWS]),
        "logp_mu: expected 10 values.*got 9", "the end token's",
    ),
    "an object": (
        lambda d: torch.save({"samples": [Elsewhere()]}, d / "r.pt") or d / "r.pt", "not loaded", "tensors, arrays",
    ),
    "another dictionary": (
        lambda d: torch.save({"model": 1}, d / "r.pt") or d / "r.pt",
        "expected slime's samples or rollout_data", "model",
    ),
    "no torch file": (lambda d: (d / "r.pt").write_bytes(b"x") and d / "r.pt", "r.pt: expected", ""),
    "no JSON": (
        lambda d: (d / "t.jsonl").write_text(json.dumps(ROWS[0]) + "\n{oops") and d / "t.jsonl",
        "line 2: expected a JSON object", "",
    ),
    "nothing in it": (lambda d: (d / "t.jsonl").write_text("\n") and d / "t.jsonl", "at least 1 row", ""),
    "another kind": (
        lambda d: (d / "t.csv").write_text("a,b") and d / "t.csv",
        r"expected a trace as .safetensors, .jsonl, .parquet or .pt, got .csv", "",
    ),
    "routes all 0": (
        lambda d: write_jsonl(
            d / "t.jsonl", [row | {"experts_mu": (0 * torch.tensor(row["experts_mu"])).tolist()} for row in ROWS]
        ),
        "experts_mu: expected expert ids, got none above 0", "not captured",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_a_dump_lacks_is_one_line_that_says_how_to_add_it(case: str, tmp_path: Path) -> None:
    """Each lack is a ValueError of a line per row, with the file, the field, and what puts it there."""
    write, message, how = LACKING[case]
    with pytest.raises(ValueError, match=message) as caught:
        load_trace(write(tmp_path))
    lines = str(caught.value).splitlines()
    assert lines and all(how in line and str(tmp_path) in line for line in lines)


WRONG = [
    ("tokens", "abc", 'tokens: expected a valid list, got "abc"'),
    ("tokens", 7, "tokens: expected a valid list, got 7"),
    ("tokens", [3, 1.5], "tokens.1: expected a valid integer, got 1.5"),
    ("tokens", ["3"], 'tokens.0: expected a valid integer, got "3"'),
    ("tokens", [-1], "tokens.0: expected a value greater than or equal to 0, got -1"),
    ("tokens", None, "tokens: missing; the row has "),
    ("num_prompt", "two", 'num_prompt: expected a valid integer, got "two"'),
    ("num_prompt", 1.5, "num_prompt: expected a valid integer, got 1.5"),
    ("num_prompt", True, "num_prompt: expected a valid integer, got true"),
    ("num_prompt", -1, "num_prompt: expected a value greater than or equal to 1, got -1"),
    ("num_prompt", 10_000, "num_prompt: expected at most the {S} tokens, got 10000"),
    ("logp_old", 0.5, "logp_old: expected a valid list, got 0.5"),
    ("logp_old", [0.5], "logp_old: expected {T} values, one per response token, got 1"),
    ("reward", "high", 'reward: expected a valid number, got "high"'),
    ("step", "x", 'step: expected a valid integer, got "x"'),
    ("is_response", [None], "is_response.0: expected a valid boolean, got null"),
    ("experts_mu", [[[None]]], "experts_mu: expected ints, rows x layers x slots, got "),
    ("experts_mu", [[[1.5]]], "experts_mu: expected ints, got float32"),
    ("experts_mu", [[1]], "experts_mu: expected (rows, layers, slots), got shape (1, 1)"),
    ("experts_mu", [[[10**6]]], "experts_mu: expected ids in [-1, 32768), got 1000000 to 1000000"),
    ("experts_old", None, "experts_old: missing, though other responses have it"),
    ("rewards", 1.0, "rewards: unknown column; did you mean 'reward'? Rename or remove it"),
    ("experts_mus", [], "experts_mus: unknown column; did you mean 'experts_mu'? Rename or remove it"),
]


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_type_is_named(name: str, value: Any, words: str, tmp_path: Path) -> None:
    """Values of another kind, length or range and misspelt columns: file, line, field, what was expected, what came."""
    misspelt = name.rstrip("s") if name not in ROWS[1] else None
    row = {key: given for key, given in ROWS[1].items() if key != misspelt} | {name: value}
    path = write_jsonl(tmp_path / "t.jsonl", [ROWS[0], row, *ROWS[2:]])
    with pytest.raises(ValueError) as caught:
        load_trace(path)
    S, T = len(ROWS[1]["tokens"]), len(ROWS[1]["logp_mu"])
    wanted = words if name.startswith("experts") else words.format(S=S, T=T)
    assert str(caught.value).startswith(f"{path}: line 2: {wanted}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["reward", "step"])
def test_null_is_as_good_as_absent(name: str, tmp_path: Path) -> None:
    """An optional value that is null is the documented 0."""
    trace = load_trace(write_jsonl(tmp_path / "t.jsonl", [row | {name: None} for row in ROWS]))
    assert trace.step == 0 and (name == "step" or not trace.rewards.any())


def test_unsigned_counts_are_refused(tmp_path: Path) -> None:
    """torch cannot compute with uint64: such a tensor in a trace file is named, with its type."""
    path = tmp_path / "t.safetensors"
    load_trace(write_jsonl(tmp_path / "t.jsonl", ROWS)).save(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["num_prompt"]["dtype"] = "U64"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ValueError, match=rf"^{path}: num_prompt: expected a type of signed int, got torch.uint64$"):
        load_trace(path)


def test_every_row_that_does_not_fit_is_a_line_with_file_row_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is wrong with a row, the rows after it are looked at too; of more than ten the number is said."""
    good = ROWS[0]
    spoilt = [
        good | {"logp_old": good["logp_old"][:-1]}, good, {"tokens": [1, 2]}, good | {"num_prompt": "3"},
        good | {"logp_mu": None}, {name: value for name, value in good.items() if name != "entropy_old"},
    ]  # fmt: skip
    path = write_jsonl(tmp_path / "bad.jsonl", [good, *spoilt])
    path.write_text(path.read_text() + "{broken\n[1]\n")
    assert main(["doctor", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    places = [
        (2, "logp_old"), (4, "num_prompt"), (5, "num_prompt"), (6, "logp_mu"), (7, "entropy_old"), (8, ""), (9, ""),
    ]  # fmt: skip
    assert len(told) == len(places)
    for line, (number, field) in zip(told, places, strict=True):
        assert line.startswith(f"error: {path}: line {number}: {field}"), line
    many = write_jsonl(tmp_path / "many.jsonl", [good, *[good | {"logp_old": [0.5]}] * 30])
    assert main(["doctor", str(many)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 11 and told[-1] == "error: and 20 more rows that do not fit" and "line 11: logp_old" in told[9]
