"""Laws of reading NeMo-RL's R3 trace: whole replay is said to be whole, and each way to break it is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firstorder.cli import main
from lab.doctor.replay_log import read

Events = list[dict[str, Any]]


def digest(text: str) -> dict[str, Any]:
    """A tensor as NeMo-RL's trace describes it."""
    return {"full_shape": [2, 8], "valid_shape": [6], "dtype": "torch.int64", "valid_sha256": text, "valid_preview": []}


def sample(event: str, key: str, routes: str, tokens: str = "t", **rest: Any) -> dict[str, Any]:
    """An event of one sample's payload."""
    common = {"event": event, "time": 1.0, "host": "a", "pid": 1, "trace_step": 1, "sample_idx": 0, "key": key}
    return common | {"valid_length": 6, "routed_experts": digest(routes), "input_ids": digest(tokens)} | rest


def forward(layer: int, matches: bool = True, fallback: int = 0) -> dict[str, Any]:
    """An event of one replayed layer."""
    actual = {"shape": [100, 2], "dtype": "torch.int64", "sha256": "x", "preview": [0]}
    common = {"event": "router_replay_forward_verify", "stage": "train", "trace_step": 1, "action": "replay_forward"}
    return common | {
        "layer_number": layer, "topk": 2, "scores_shape": [100, 8], "actual": actual, "matches_expected": matches,
        "fallback_rows": fallback,
    }  # fmt: skip


WHOLE: Events = [
    sample("rollout_payload_sample", "s0", "r0"), sample("rollout_payload_sample", "s1", "r1"),
    sample("tq_fetch_sample", "s0", "r0", stage="prev_lp"), sample("tq_fetch_sample", "s1", "r1", stage="train"),
    forward(1), forward(2), {"event": "cp_routed_experts", "stage": "train"},
]  # fmt: skip
BROKEN: dict[str, tuple[Events, str]] = {
    "other routes": (
        [sample("tq_fetch_sample", "s1", "r0", stage="train")],
        "1 fetched samples have other routes than the rollout wrote, first s1 for train",
    ),
    "other tokens": (
        [sample("tq_fetch_sample", "s0", "r0", "u", stage="train")], "1 fetched samples have other tokens",
    ),
    "a layer that ran others": ([forward(5, False), forward(3, False)], "layer 3 ran other experts than were"),
    "rows without routes": ([forward(2, fallback=7)], "7 of 300 rows had no route"),
    "a sample of no rollout": ([sample("tq_fetch_sample", "s9", "r", stage="train")], "1 fetched samples belong to no"),
}  # fmt: skip


def written(path: Path, events: Events) -> Path:
    """The file, a line an event."""
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_whole_replay_is_said_to_be_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the files of several processes, by their names or their folder; exit code 0."""
    first = written(tmp_path / "r3_trace_a_pid1.jsonl", WHOLE[:2])
    second = written(tmp_path / "r3_trace_b_pid2.jsonl", WHOLE[2:])
    for arguments in ([str(first), str(second)], [str(tmp_path)]):
        assert main(["doctor", *arguments]) == 0
        told = capsys.readouterr().out
        assert told.startswith("R3 trace: replay is complete.") and "2 fetched samples compared with 2" in told
        assert "2 replayed layer passes over 2 layers" in told


@pytest.mark.parametrize(("kept", "lacks"), [(WHOLE[:2], "fetch by a trainer"), (WHOLE[2:4], "payload of a rollout")])
def test_a_log_of_one_side_alone_does_not_show_that_replay_is_complete(
    kept: Events, lacks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of the rollout alone, or of the trainer alone, are compared with nothing, and that is said; exit 3."""
    path = written(tmp_path / "r3_trace_a_pid1.jsonl", kept)
    assert main(["doctor", str(path)]) == 3
    told = capsys.readouterr().out
    assert told.startswith(f"R3 trace: nothing was compared, as no {lacks} is in these files.")
    assert "0 fetched samples compared" in told and not read([path]).as_object()["is_whole"]


@pytest.mark.parametrize("case", BROKEN)
def test_each_break_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other routes or tokens than the rollout's, a layer that ran others, rows and samples without routes; exit 3."""
    events, words = BROKEN[case]
    path = written(tmp_path / "r3_trace_a_pid1.jsonl", WHOLE + events)
    assert main(["doctor", str(path), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["replay"]
    assert found["verdict"].startswith(words) and not found["is_whole"]
    assert main(["doctor", str(path), "--fail-on", "none"]) == 0


def test_events_that_do_not_fit_are_a_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or empty field, infinite rows, no object, a file without a known event, a trace among the files."""
    spoilt = {name: value for name, value in WHOLE[0].items() if name != "key"}
    empty, endless = forward(1) | {"actual": {"shape": []}}, forward(1) | {"fallback_rows": float("inf")}
    path = written(tmp_path / "r3_trace_a_pid1.jsonl", [WHOLE[1], spoilt, empty, endless])
    path.write_text(path.read_text() + "{\n")
    assert main(["doctor", str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"error: {path}: line 2: key: missing, in an event 'rollout_payload_sample'"
    assert all(line.endswith("in an event 'router_replay_forward_verify'") for line in told[1:3])
    assert told[3].startswith(f"error: {path}: line 5: expected a JSON object") and len(told) == 4
    with pytest.raises(ValueError, match="expected events of NeMo-RL's R3 trace, got none"):
        read([written(tmp_path / "r3_trace_c_pid1.jsonl", [{"event": "other"}])])
    with pytest.raises(ValueError, match=r"r3_trace_d_pid1\.jsonl: expected at least 1 row"):
        read([written(tmp_path / "r3_trace_d_pid1.jsonl", [])])
    written(tmp_path / "t.jsonl", [{"tokens": [1]}])
    assert main(["doctor", str(path), str(tmp_path / "t.jsonl")]) == 2
    assert "expected NeMo-RL's r3_trace files alone" in capsys.readouterr().err
