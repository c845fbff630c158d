"""Refusals of the importers: each lack and each wrong value is a line with the file, the row and the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstorder.cli import main
from lab.doctor import dumps
from lab.doctor.diagnosis import diagnose
from lab.doctor.importers import load_dump, load_trace
from tests.lab.doctor.patients import draw_rows
from tests.lab.doctor.test_importers import ROWS, write_jsonl, write_parquet, write_slime


def without(*names: str) -> list[dict[str, Any]]:
    """The rows without these fields."""
    return [{name: value for name, value in row.items() if name not in names} for row in ROWS]


class Elsewhere:
    """A class that a file must not be able to call."""


class Bare:
    """A dtype of objects, written without the state in which its class would be looked up."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.dtype, ("O",)


class Made:
    """A NumPy scalar of that dtype, as only a forged file has it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return np.float64(0).__reduce__()[0], (Bare(), b"12345678")


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
        lambda d: write_slime(d / "t.pt", ROWS, log_probs=None), "log_probs is missing",
        "--get-mismatch-metrics, so that the old pass runs, or this rank is not on the last pipeline stage",
    ),
    "NeMo-RL without an old pass": (
        lambda d: dumps.nemo_rl(d, [row | {"logp_old": [0.0] * len(row["logp_old"])} for row in ROWS]),
        "prev_logprobs: all 0", "force_on_policy_ratio=false",
    ),
    "TRL's texts": (
        lambda d: write_parquet(
            d / "t.parquet", [{"step": 1, "prompt": "2+3=", "completion": "5", "correct": 1.0}]
        ),
        "no tokens and no log-probabilities", "watch-the-mismatch.md",
    ),
    "a part of the context": (
        lambda d: write_slime(d / "t.pt", ROWS, log_probs=[torch.zeros(1) for _ in ROWS]),
        "log_probs: expected .* got 1", "--context-parallel-size 1",
    ),
    "a length without end": (
        lambda d: torch.save({"samples": [{"total_length": 10**12, "train_log_probs": torch.zeros(1)}]}, d / "r.pt")
        or d / "r.pt",
        "response 0: total_length: expected 0 to 16777216 tokens, got 1000000000000", "",
    ),
    "an end token too few": (
        lambda d: write_jsonl(d / "t.jsonl", [row | {"logp_mu": row["logp_mu"][:-1]} for row in ROWS]),
        "logp_mu: expected 10 values.*got 9", "the end token's",
    ),
    "an object": (
        lambda d: torch.save({"samples": [Elsewhere()]}, d / "r.pt") or d / "r.pt", "not loaded", "tensors, arrays",
    ),
    "an array of objects": (
        lambda d: torch.save({"samples": [np.array([1], dtype=object)]}, d / "r.pt") or d / "r.pt",
        "not loaded", "tensors, arrays",
    ),
    "a scalar that is an object": (
        lambda d: torch.save({"samples": [Made()]}, d / "r.pt") or d / "r.pt", "not loaded", "tensors, arrays",
    ),
    "another dictionary": (
        lambda d: torch.save({"model": 1}, d / "r.pt") or d / "r.pt",
        "expected slime's samples or rollout_data", "model",
    ),
    "no torch file": (lambda d: (d / "r.pt").write_bytes(b"x") and d / "r.pt", "r.pt: expected", ""),
    "no JSON": (
        lambda d: (d / "t.jsonl").write_text(json.dumps(ROWS[0]) + "\n{oops") and d / "t.jsonl",
        r"line 2: expected a JSON object, got invalid JSON \(", "",
    ),
    "the prompt's values, too": (
        lambda d: write_jsonl(
            d / "t.jsonl", [row | {"logp_mu": [-1.0] * row["num_prompt"] + row["logp_mu"]} for row in ROWS]
        ),
        "logp_mu: expected [0-9]+ values, one per response token, got [0-9]+", "; the prompt's tokens are in it",
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


@pytest.mark.parametrize("names", [(), ("prompts", "responses", "response_mask", "old_log_probs")])
def test_what_all_rows_of_verls_dump_lack_is_one_line_that_a_terminal_shows_whole(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of twenty rows one line, with the section of docs/doctor.md and the option, and nothing cut off its end."""
    texts = {"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}
    path = write_jsonl(tmp_path / "1.jsonl", [texts | {name: [1] for name in names}] * 20)
    assert main(["doctor", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "(What to add to verl)" in error
    assert error.endswith("actor_rollout_ref.rollout.calculate_log_probs=True\n")
    assert "### What to add to verl" in (Path(__file__).parents[3] / "docs/doctor.md").read_text()


def test_verl_without_an_old_pass_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under bypass_mode old is mu's copy to the bit, and says nothing, entropies or none; where the trainer scored a
    tool's tokens, which mu has not, or in our own format, equal bits are an exact engine."""
    copied = [
        row
        | {"logp_old": row["logp_mu"], "experts_old": row["experts_mu"], "is_response": [True] * len(row["logp_mu"])}
        for row in ROWS
    ]
    with_entropies = dumps.verl_v1(tmp_path, copied)
    lines = [json.loads(line) for line in with_entropies.read_text().splitlines()]
    without = [{name: value for name, value in line.items() if name != "entropy"} for line in lines]
    for path in (with_entropies, write_jsonl(tmp_path / "bypass.jsonl", without)):
        assert main(["doctor", str(path)]) == 2
        out, error = capsys.readouterr()
        wanted = "no old pass ran: set algorithm.rollout_correction.bypass_mode=False for this step"
        assert out == "" and error.count("\n") == 1 and wanted in error
        assert ("if it is, both engines agree to the bit" in error) == (path is with_entropies)
    of_tool = copied[0] | {"logp_mu": [0.0, *copied[0]["logp_mu"][1:]], "logp_old": copied[0]["logp_mu"]}
    of_tool |= {"is_response": [False] + [True] * (len(of_tool["logp_mu"]) - 1)}
    (tmp_path / "tool").mkdir()
    for exact in (
        dumps.verl_v1(tmp_path / "tool", [of_tool, *copied[1:]]), write_jsonl(tmp_path / "ours.jsonl", copied),
    ):  # fmt: skip
        assert main(["doctor", str(exact)]) == 0
        assert "nothing wrong" in capsys.readouterr().out


def test_verls_entropies_show_a_sampler_that_nobody_scores_without_an_old_pass(tmp_path: Path) -> None:
    """Equal bits with entropies that the tokens do not fit: the fault of the tokens is named, with a caveat."""
    drawn = draw_rows(num_prompts=20, drawn=lambda z: torch.where(z >= z.topk(2).values[-1], z, -torch.inf))
    sharp = [
        row
        | {"is_response": [True] * len(row["logp_mu"]), "reward": 0.0}
        | {"experts_mu": [[[0, 1]]] * (len(row["tokens"]) - 1)}
        for row in drawn
    ]
    dump = load_dump(dumps.verl_v1(tmp_path, sharp))
    assert diagnose(dump.trace).named[0].name.startswith("sampler_") and "bypass mode" in dump.caveat


WRONG = [
    ("tokens", "abc", 'tokens: expected a valid list, got "abc"'),
    ("tokens", [3, "3"], 'tokens.1: expected a valid integer, got "3"'),
    ("tokens", [-1], "tokens.0: expected a value greater than or equal to 0, got -1"),
    ("tokens", None, "tokens: missing; the row has "),
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


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("t.pt", {"old": Path("nosuch.jsonl")}, "^cannot read nosuch.jsonl: No such file"),
        ("t.pt", {"columns": {"tokens": "ids"}}, r"/t\.pt: --columns: expected .jsonl, .parquet or .safetensors, got"),
        ("t.safetensors", {"old": Path("no.jsonl")}, r"--old: expected none with a trace of ours, .*, got no\.jsonl$"),
    ],
)
def test_an_option_that_does_not_fit_the_file_is_one_line(
    name: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """--columns of a torch file, --old of a trace, which has both sides, and --old of a file that is not there."""
    path = write_slime(tmp_path / "t.pt", ROWS)
    load_trace(path).save(tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=words) as caught:
        load_dump(tmp_path / name, **options)
    assert "\n" not in str(caught.value)


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


IMPOSSIBLE = [
    ("logp_mu", 0.5, "logp_mu: expected log-probabilities (at most 0), got 0.5 at token 1 of the response"),
    ("logp_old", math.inf, "logp_old: expected log-probabilities (at most 0), got inf at token 1 of the response"),
    ("entropy_old", -0.5, "entropy_old: expected finite entropies (at least 0), got -0.5 at token 1 of the response"),
    (
        "entropy_old",
        math.inf,
        "entropy_old: expected finite entropies (at least 0), got inf at token 1 of the response",
    ),
    ("reward", math.inf, "reward: expected a finite number of 32 bits, got inf"),
    ("reward", math.nan, "reward: expected a finite number of 32 bits, got nan"),
    ("reward", -1e300, "reward: expected a finite number of 32 bits, got -1e+300"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), IMPOSSIBLE)
def test_a_value_that_no_engine_can_have_is_named_with_its_row(
    name: str, value: float, wanted: str, tmp_path: Path
) -> None:
    """In lines and in tables. A masked token's entropy is not looked at, and a rounding error is none."""
    rows = [row | {"is_response": [True] * len(row["logp_mu"])} for row in ROWS]
    good = rows[1]
    spoilt = good | {name: value if name == "reward" else [good[name][0], value, *good[name][2:]]}
    path = write_jsonl(tmp_path / "t.jsonl", [rows[0], spoilt, *rows[2:]])
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 2: {wanted}")):
        load_trace(path)
    path = write_parquet(tmp_path / "t.parquet", [rows[0], spoilt, *rows[2:]])
    with pytest.raises(ValueError, match=re.escape(f"{path}: response 1: {wanted}")):
        load_trace(path)
    rest = [True, False, *good["is_response"][2:]]
    fine = spoilt | {"is_response": rest} if name == "entropy_old" else good | {name: _rounded(good[name])}
    load_trace(write_jsonl(tmp_path / "t.jsonl", [rows[0], fine, *rows[2:]]))


def _rounded(value: Any) -> Any:
    return [1e-3, *value[1:]] if isinstance(value, list) else value


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


@pytest.mark.parametrize(
    ("changed", "words"),
    [(math.exp, "; these may be probabilities"), (lambda logp: 3 - logp, "; these may have the other sign")],
)
def test_probabilities_and_a_wrong_sign_are_guessed(
    changed: Callable[[float], float], words: str, tmp_path: Path
) -> None:
    """Only where no value of the row is below 0: one such value is a fault of its own."""
    for spare, end in ((0, words), (1, "")):
        spoilt = ROWS[1] | {"logp_mu": [x if i < spare else changed(x) for i, x in enumerate(ROWS[1]["logp_mu"])]}
        path = write_jsonl(tmp_path / "t.jsonl", [ROWS[0], spoilt])
        with pytest.raises(ValueError, match=re.escape(f"logp_mu: expected log-probabilities (at most 0{end}), got")):
            load_trace(path)


def test_a_column_beside_a_whole_mask_has_its_length(tmp_path: Path) -> None:
    """Without num_prompt a mask of every token asks for columns of every token, and says how many came."""
    row = {
        "ids": [1, 2, 3, 4],
        "mask": [False, True, True, True],
        "mu": [-1.0, -1.0, -1.0],
        "old": [0.0, -1.0, -1.0, -1.0],
    }
    path = write_jsonl(tmp_path / "t.jsonl", [row])
    names = {"tokens": "ids", "is_response": "mask", "logp_mu": "mu", "logp_old": "old"}
    with pytest.raises(ValueError, match="logp_mu: expected 4 values, one per token as in is_response, got 3"):
        load_dump(path, columns=names)
