"""Laws of the importers: a trace in any documented format comes back, and what a dump lacks is one clear line."""

from __future__ import annotations

import gc
import json
import math
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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


def renamed(path: Path, module: str, other: str) -> None:
    """Writes the torch file again with another module's name in its pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {info: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in members.items():
            is_pickle = info.filename.endswith("data.pkl")
            name = f"c{other}\n".encode()
            archive.writestr(info.filename, data.replace(f"c{module}\n".encode(), name) if is_pickle else data)


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


@pytest.mark.parametrize("num_slots", [K, 1])
def test_rows_that_verl_did_not_record_are_unknown(num_slots: int, tmp_path: Path) -> None:
    """Its zeros from the last sampled token on are no expert 0; with one slot a row before that may well be."""
    cut = [row | {"experts_mu": [[ids[:num_slots] for ids in s] for s in row["experts_mu"]]} for row in ROWS]
    long = max(range(len(cut)), key=lambda b: len(cut[b]["logp_mu"]))
    T, routes = len(cut[long]["logp_mu"]), cut[long]["experts_mu"]
    cut[long] |= {"is_response": [t < T - 2 for t in range(T)], "reward": 0.0}  # it ends on a tool's two tokens
    nothing, unknown = ([[value] * num_slots] * L for value in (0, -1))
    # The last token is no input; those before it are the other one of the tool and the last sampled one.
    verl = [row | {"experts_mu": [*routes[:-2], nothing, nothing]} if b == long else row for b, row in enumerate(cut)]
    ours = [row | {"experts_mu": [*routes[:-2], unknown, unknown]} if b == long else row for b, row in enumerate(cut)]
    assert (nothing in routes) == (num_slots == 1)
    found = load_trace(write_verl(tmp_path / "12.jsonl", verl))
    both = [row | {"experts_old": row["experts_mu"]} for row in ours]
    wanted = load_trace(write_jsonl(tmp_path / "ours.jsonl", both))
    assert "experts_mu" not in differing(found, wanted) and found.record_mu is not None


NUMBERS = {
    "rewards": [kind(row["reward"]) for kind, row in zip((np.float64, np.float32, np.float16) * 2, ROWS, strict=True)],
    "response_lengths": [np.int64(len(row["logp_mu"])) for row in ROWS],
    "loss_masks": [np.array(row["is_response"]) for row in ROWS],
    "extra": [np.bool_(True)] * len(ROWS),
}
"""Values of NumPy, as a reward function may return them."""


@pytest.mark.parametrize("module", ["numpy._core", "numpy.core"])
def test_numbers_of_numpy_are_numbers(module: str, tmp_path: Path) -> None:
    """Scalars and arrays of bools, as NumPy 2 writes them and as NumPy 1 does, are read as Python's own."""
    path = write_slime(tmp_path / "train.pt", ROWS, **NUMBERS)
    renamed(path, "numpy._core.multiarray", f"{module}.multiarray")
    assert not differing(load_trace(path), load_trace(write_slime(tmp_path / "plain.pt", ROWS)))


def lacking(side: str, layers: list[int], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without one side's ids in these layers: 0, as in a buffer that was never filled."""
    kept = [[[[0] * K if n in layers else ids for n, ids in enumerate(s)] for s in row[side]] for row in rows]
    return [row | {side: routes} for row, routes in zip(rows, kept, strict=True)]


def test_sides_that_lack_unlike_layers_are_compared_by_number(tmp_path: Path) -> None:
    """mu without layer 2 and old without layer 0: layer 1 alone is compared; without a common layer it is one line."""
    same = [row | {"experts_old": row["experts_mu"]} for row in ROWS]
    trace = load_trace(write_jsonl(tmp_path / "t.jsonl", lacking("experts_old", [0], lacking("experts_mu", [2], same))))
    mu, old = trace.experts_mu, trace.experts_old
    assert mu is not None and old is not None and trace.layer_numbers == (1,) and torch.equal(mu, old)
    assert mu[:, 0].tolist() == [layers[1] for row in ROWS for layers in row["experts_mu"]]
    apart = write_jsonl(tmp_path / "t.jsonl", lacking("experts_old", [0, 1], lacking("experts_mu", [2], same)))
    with pytest.raises(
        ValueError, match=r"expected a layer that both have, got layers \(0, 1\) of mu and \(2,\) of old$"
    ):
        load_trace(apart)


def test_columns_of_all_layers_and_of_the_routed_ones_are_compared_in_their_order(tmp_path: Path) -> None:
    """mu's column has a dense layer in front, old's has not: all layers are compared, though numbered differently."""
    dense = [row | {"experts_mu": [[[0] * K, *layers] for layers in row["experts_mu"]]} for row in ROWS]
    found, plain = (load_trace(write_jsonl(tmp_path / "t.jsonl", rows)) for rows in (dense, ROWS))
    assert found.layer_numbers == (1, 2, 3) and differing(found, plain) == {"layer_numbers"}


def test_a_missing_value_is_nan_and_never_0(tmp_path: Path) -> None:
    """null in a row of log-probabilities is NaN in the trace."""
    hole = [ROWS[0] | {"logp_mu": [None, *ROWS[0]["logp_mu"][1:]]}, *ROWS[1:]]
    trace = load_trace(write_jsonl(tmp_path / "t.jsonl", hole))
    assert math.isnan(trace.logp_mu[0]) and int(trace.logp_mu.isnan().sum()) == 1


@pytest.mark.parametrize("name", ["reward", "step"])
def test_null_is_as_good_as_absent(name: str, tmp_path: Path) -> None:
    """An optional value that is null is the documented 0."""
    trace = load_trace(write_jsonl(tmp_path / "t.jsonl", [row | {name: None} for row in ROWS]))
    assert trace.step == 0 and (name == "step" or not trace.rewards.any())
