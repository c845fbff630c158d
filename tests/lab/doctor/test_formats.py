"""Laws of the importers of other frameworks: each dump comes back as our trace, and what does not fit is named."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lab.doctor import dumps
from lab.doctor.importers import FORMATS, columns, load_dump, load_trace, rows
from tests.lab.doctor.test_importers import ROWS, differing, write_jsonl, write_parquet, write_slime, write_verl

NO_ROUTES = {"experts_mu", "experts_old", "layer_numbers", "num_experts"}
WHOLE = [row | {"is_response": [True] * len(row["logp_mu"])} for row in ROWS]
"""Rows without observations, for formats that cannot say what is one."""
EVERY: dict[str, tuple[Callable[..., Path], set[str], str, set[str]]] = {
    "NeMo-RL": (
        dumps.nemo_rl, {"entropy_old", *NO_ROUTES}, "", {"content", "sample_loss_mask", "advantages", "idx"},
    ),
    "prime-rl": (dumps.prime_rl, {"rewards", "step", *NO_ROUTES}, "exports pi", {"advantages", "mismatch_kl", "rank"}),
    "verl": (dumps.verl_v1, {"experts_old", "step"}, "", set()),
    "TRL": (dumps.trl, {"entropy_old", "rewards", *NO_ROUTES}, "", set()),
    "miles, policy loss": (
        dumps.miles, {"tokens", "logp_pi", "entropy_old", "rewards", *NO_ROUTES}, "no tokens", {"index", "advantages"},
    ),
    "SkyRL": (dumps.skyrl, {"experts_old", "entropy_old", "rewards"}, "", {"advantages"}),
    "slime, miles": (
        lambda folder, given: write_slime(folder / "7_0.pt", given),
        {"experts_old", "step", "entropy_old", "layer_numbers"}, "", set(),
    ),
    "verl, padded": (lambda folder, given: write_verl(folder / "12.jsonl", given), {"experts_old", "step"}, "", set()),
    "rows as Parquet": (lambda folder, given: write_parquet(folder / "t.parquet", given), set(), "", set()),
}  # fmt: skip
"""Formats with both sides: writer, what differs from our trace, words of the caveat, some columns that are not used."""


@pytest.mark.parametrize("name", EVERY)
def test_a_frameworks_dump_is_our_trace(name: str, tmp_path: Path) -> None:
    """Tokens, both sides, masks and routes come back as they were but for what the format lacks, and that is said."""
    write, lacks, caveat, unused = EVERY[name]
    ours = load_trace(write_jsonl(tmp_path / "ours.jsonl", ROWS))
    dump = load_dump(write(tmp_path, ROWS))
    sampled = ours.is_response
    assert (
        name.startswith(dump.format)
        and len(dump.trace) == len(ROWS)
        and caveat in dump.caveat
        and bool(caveat) == bool(dump.caveat)
    )
    assert unused <= set(dump.unused) and dump.is_pi == (name == "prime-rl" or name.startswith("miles"))
    assert torch.equal(dump.trace.logp_mu[sampled], ours.logp_mu[sampled])
    assert differing(dump.trace, ours) - {"logp_mu"} == lacks


@pytest.mark.parametrize(
    ("write", "lacks"),
    [(dumps.open_instruct, {"experts_mu"}), (dumps.vllm, {"rewards"}), (dumps.dashboard, {"rewards", "experts_mu"})],
)
def test_what_an_engine_wrote_is_whole_with_the_trainers_side(
    write: Callable[..., Path], lacks: set[str], tmp_path: Path
) -> None:
    """mu alone is refused with the way out; with `--old` the trace is ours; a file of fewer rows or none is named."""
    path, old = write(tmp_path, WHOLE), dumps.old_side(tmp_path, WHOLE)
    with pytest.raises(ValueError, match=r"no log-probabilities of old. Pass them with --old FILE"):
        load_trace(path)
    ours = load_trace(write_jsonl(tmp_path / "ours.jsonl", WHOLE))
    assert differing(load_dump(path, old=old).trace, ours) == lacks
    short = dumps.lines(tmp_path / "short.jsonl", [json.loads(line) for line in old.read_text().splitlines()[:-1]])
    with pytest.raises(
        ValueError, match=r"--old .*short.jsonl: expected as many rows as responses; the file ends first"
    ):
        load_dump(path, old=short)
    with pytest.raises(ValueError, match=r"/none\.jsonl: expected at least 1 row"):
        load_dump(path, old=dumps.lines(tmp_path / "none.jsonl", []))


@pytest.mark.parametrize("name", EVERY)
def test_the_trainers_side_of_another_file_is_taken_instead(name: str, tmp_path: Path) -> None:
    """A dump of both sides with `--old` has the values of that file; with one that is missing it is refused."""
    other = [row | {"logp_old": [x - 0.5 for x in row["logp_old"]]} for row in ROWS]
    path = EVERY[name][0](tmp_path, ROWS)
    trace = load_dump(path, old=dumps.old_side(tmp_path, other)).trace
    assert torch.equal(trace.logp_old, rows.trace(other).logp_old) and trace.entropy_old is not None
    with pytest.raises(ValueError, match=r"^cannot read .*none\.jsonl: No such file"):
        load_dump(path, old=tmp_path / "none.jsonl")


def test_miles_takes_pi_where_old_is_mus_own(tmp_path: Path) -> None:
    """Under --use-rollout-logprobs the trainer's side is pi, and the caveat says that it stands for old."""
    dump = load_dump(dumps.miles(tmp_path, ROWS, is_copied=True))
    assert dump.trace.logp_pi is not None and torch.equal(dump.trace.logp_old, dump.trace.logp_pi)
    assert "pi stands for old" in dump.caveat and not torch.equal(dump.trace.logp_mu, dump.trace.logp_old)


@pytest.mark.parametrize("data", [b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00\x02\x00{("])
def test_routes_that_are_no_array_are_one_line(data: bytes, tmp_path: Path) -> None:
    """NumPy fails on torn archives and headers in many ways; all are a line with the row and the field."""
    path = dumps.vllm(tmp_path, WHOLE)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["outputs"][0]["routed_experts"] = base64.b64encode(data).decode()
    dumps.lines(path, rows)
    with pytest.raises(ValueError, match=r"line 2: outputs\.0\.routed_experts: expected a base64-encoded \.npy array"):
        load_dump(path, old=dumps.old_side(tmp_path, WHOLE))


@pytest.mark.parametrize("name", ["step12", "step12.jsonl", "step12.parquet", "step12.pt"])
def test_a_file_that_is_missing_is_said_to_be(name: str, tmp_path: Path) -> None:
    """Whatever its name ends in, or does not: a misspelt folder is no trace of an unknown format."""
    with pytest.raises(ValueError, match=f"^cannot read {re.escape(str(tmp_path / name))}: No such file"):
        load_dump(tmp_path / name)


BROKEN: dict[str, tuple[Callable[..., Path], str, Any, str]] = {
    "a null list": (dumps.nemo_rl, "generation_logprobs", None, "line 2: generation_logprobs: missing; the row has"),
    "a short list": (dumps.nemo_rl, "prev_logprobs", [-1.0], "line 2: prev_logprobs: expected 14 values, one per t"),
    "a mask of 2": (dumps.nemo_rl, "token_loss_mask", [2] * 14, "line 2: token_loss_mask.0: expected 0 or 1, got 2"),
    "a length too long": (dumps.nemo_rl, "input_lengths", 15, "line 2: input_lengths: expected an int from 1 to 14"),
    "no list": (dumps.prime_rl, "entropy", 3.0, "line 2: entropy: expected a list, got float"),
    "a text": (dumps.prime_rl, "trainer_logprobs", ["x"] * 12, "line 2: logp_old.0: expected a valid number, got"),
    "a null field": (dumps.verl_v1, "old_log_probs", None, "line 2: old_log_probs: expected a valid list, got null"),
    "a short field": (dumps.verl_v1, "rollout_log_probs", [-1.0], "line 2: rollout_log_probs: expected 10 values"),
    "a short mask": (dumps.trl, "completion_mask", [1], "line 2: completion_mask: expected 11 values, one per token"),
    "no logprobs": (dumps.open_instruct, "logprobs", None, "line 2: logprobs: missing; the row has step, "),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_row_that_does_not_fit_is_one_line(case: str, tmp_path: Path) -> None:
    """Nulls, short lists and other kinds: file, row and field, what was expected and what came."""
    write, name, value, words = BROKEN[case]
    path = write(tmp_path, ROWS)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1][name] = [value] if write is dumps.nemo_rl else value
    dumps.lines(path, rows)
    with pytest.raises(ValueError) as caught:
        load_dump(path, old=dumps.old_side(tmp_path, ROWS) if write is dumps.open_instruct else None)
    assert str(caught.value).startswith(f"{path}: {words}") and "\n" not in str(caught.value)


def test_columns_of_any_name_are_read(tmp_path: Path) -> None:
    """Renamed columns, prompts apart, masks over all tokens or padding: with the map it is our trace."""
    ours = load_trace(write_jsonl(tmp_path / "ours.jsonl", ROWS))
    apart = [
        {
            "p": r["tokens"][: r["num_prompt"]],
            "r": r["tokens"][r["num_prompt"] :],
            "a": r["logp_mu"],
            "b": r["logp_old"],
        }
        | {"m": r["is_response"], "extra": 1}
        for r in ROWS
    ]
    names = columns.parse("prompt_tokens=p, response_tokens=r,logp_mu=a,logp_old=b,is_response=m")
    dump = load_dump(write_jsonl(tmp_path / "apart.jsonl", apart), names)
    lacks = {"entropy_old", "rewards", *NO_ROUTES}
    assert differing(dump.trace, ours) == lacks and dump.unused == ("extra",)
    W = max(len(row["tokens"]) for row in ROWS) + 1
    padded = {
        "ids": torch.tensor([row["tokens"] + [0] * (W - len(row["tokens"])) for row in ROWS]),
        "size": torch.tensor([len(row["tokens"]) for row in ROWS]),
        "mask": torch.tensor([dumps.whole(row, "is_response", 0, W) for row in ROWS]),
        "a": torch.tensor([dumps.whole(row, "logp_mu", 0.0, W) for row in ROWS]),
        "b": torch.tensor([dumps.whole(row, "logp_old", 0.0, W) for row in ROWS]),
    }
    safetensors.torch.save_file(padded, path := tmp_path / "batch.safetensors")
    names = columns.parse("tokens=ids,length=size,is_response=mask,logp_mu=a,logp_old=b")
    assert differing(load_dump(path, names).trace, ours) == lacks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens", "--columns: expected ours=theirs, with a comma between pairs, got 'tokens'"),
        ("logp_nu=x", "--columns: logp_nu: unknown name; did you mean 'logp_mu'?"),
        ("tokens=a,tokens=b", "--columns: tokens: named twice"),
    ],
)
def test_a_map_that_is_none_is_one_line(text: str, words: str) -> None:
    """A pair without =, a name that is none of ours, a name twice."""
    with pytest.raises(ValueError) as caught:
        columns.parse(text)
    assert str(caught.value).startswith(words)


def test_a_column_that_is_not_there_is_named_as_the_file_names_it(tmp_path: Path) -> None:
    """The file's own name stands before ours, with what the row has."""
    path = write_jsonl(tmp_path / "t.jsonl", [{"ids": [1, 2]}])
    with pytest.raises(ValueError, match=r"line 1: gen \(logp_mu\): missing; the row has ids"):
        load_dump(path, columns.parse("tokens=ids,logp_mu=gen,logp_old=b,num_prompt=n"))


def test_every_format_says_what_it_lacks_and_where_that_stands() -> None:
    """Every format has its own name, a sentence on what it lacks, and a source with a path."""
    assert len({about.name for about in FORMATS}) == len(FORMATS)
    for about in FORMATS:
        assert about.lacks.endswith(".") and "/" in about.source and about.has and about.files


def test_the_rows_of_a_trace_are_the_trace() -> None:
    """rows_of undoes what rows become, with or without routes, entropies, pi, engines and a temperature."""
    whole = [
        row | {"logp_pi": row["logp_mu"], "engine": b % 2, "step": 7, "temperature": 0.7} for b, row in enumerate(ROWS)
    ]
    bare = [{name: row[name] for name in ("tokens", "num_prompt", "logp_mu", "logp_old")} for row in ROWS]
    for given in (whole, bare):
        ours = rows.trace(given)
        assert not differing(rows.trace(dumps.rows_of(ours)), ours)
    assert set(dumps.rows_of(rows.trace(bare))[0]) == {*bare[0], "step", "reward", "is_response"}


@pytest.mark.parametrize("experts", ["x", True, [[1]], torch.zeros(3)])
def test_skyrls_experts_of_another_kind_are_refused(experts: Any, tmp_path: Path) -> None:
    """Routes that are no tensor, or one of another shape, are an error that names the field, not a trace without."""
    path = dumps.skyrl(tmp_path, WHOLE)
    torch.save(torch.load(path) | {"rollout_expert_indices": experts}, path)
    with pytest.raises(ValueError, match=r"rollout_expert_indices: expected \(B, S, layers, slots\), .* got "):
        load_trace(path)


def test_skyrls_fillers_are_no_routes(tmp_path: Path) -> None:
    """Rows that no engine recorded hold experts 0 to K - 1 in SkyRL's batch, and its mask says so: -1 in ours."""
    path = dumps.skyrl(tmp_path, WHOLE)
    whole = load_dump(path).trace
    content = torch.load(path)
    experts, mask = content["rollout_expert_indices"], content["router_padding_mask"]
    # The third token from the end of every row, which is left-padded.
    experts[:, -3] = torch.arange(experts.shape[-1])
    mask[:, -3] = True
    torch.save(content, path)
    dump = load_dump(path)
    assert whole.experts_mu is not None and dump.trace.experts_mu is not None
    is_filler = (dump.trace.experts_mu == -1).all(-1).all(-1)
    assert int(is_filler.sum()) == len(WHOLE) and "router_padding_mask" not in dump.unused
    assert torch.equal(dump.trace.experts_mu[~is_filler], whole.experts_mu[~is_filler])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_zeros_without_skyrls_mask_are_no_routes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Release 0.3.0 has no mask, and zeros on observations: -1 in ours, every other row as it was."""
    whole = load_dump(path := dumps.skyrl(tmp_path, WHOLE)).trace
    content = torch.load(path)
    del content["router_padding_mask"]
    experts = content["rollout_expert_indices"].to(dtype)
    experts[:, -3] = 0
    torch.save(content | {"rollout_expert_indices": experts}, path)
    trace = load_dump(path).trace
    assert whole.experts_mu is not None and trace.experts_mu is not None
    is_filler = (trace.experts_mu == -1).all(-1).all(-1)
    assert int(is_filler.sum()) == len(WHOLE)
    assert torch.equal(trace.experts_mu[~is_filler], whole.experts_mu[~is_filler])


def test_one_slot_of_expert_0_is_skyrls_own_choice(tmp_path: Path) -> None:
    """With one expert per token zeros may be routes, so nothing is taken out."""
    content = torch.load(path := dumps.skyrl(tmp_path, WHOLE))
    del content["router_padding_mask"]
    experts = content["rollout_expert_indices"][..., -1:].clone()
    experts[:, -3] = 0
    torch.save(content | {"rollout_expert_indices": experts}, path)
    trace = load_dump(path).trace
    assert trace.experts_mu is not None and int((trace.experts_mu == 0).sum()) >= len(WHOLE)
    assert not (trace.experts_mu == -1).any()


def test_old_goes_with_rows(tmp_path: Path) -> None:
    """A rollout dump of slime lacks old, and no `--old` brings it: the line says so."""
    samples = [{"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-1.0, -1.0]}]
    torch.save({"samples": samples, "rollout_id": 0}, path := tmp_path / "rollout_0.pt")
    with pytest.raises(ValueError, match=r"of old are missing .* \(--old goes with .jsonl and .parquet alone\)"):
        load_dump(path, old=dumps.old_side(tmp_path, ROWS))
