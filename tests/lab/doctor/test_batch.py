"""Laws of `lab.doctor.diagnose`, and of the lines of the pages that call it in other frameworks' trainers."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.doctor import diagnose, dumps
from lab.doctor.diagnosis import diagnose as diagnose_trace
from lab.doctor.evidence import gather
from lab.doctor.importers import load_dump, rows
from lab.doctor.importers.folders import step_files
from tests.lab.doctor.test_importers import ROWS

DOCS = Path(__file__).parents[3] / "docs"
TRACE = rows.trace([{name: row[name] for name in ROWS[0] if name != "reward"} for row in ROWS])
SEEN = diagnose_trace(TRACE).seen
PROMPTS = [row["tokens"][: row["num_prompt"]] for row in ROWS]
RESPONSES = [row["tokens"][row["num_prompt"] :] for row in ROWS]
MASKS = [[int(x) for x in row["is_response"]] for row in ROWS]


def column(name: str) -> list[Any]:
    return [row[name] for row in ROWS]


def padded(values: list[list[Any]], fill: float, to_the_left: bool = False) -> Tensor:
    """The rows as one tensor."""
    W = max(map(len, values)) + 2
    return torch.tensor([[fill] * (W - len(v)) + v if to_the_left else v + [fill] * (W - len(v)) for v in values])


def whole(name: str) -> list[list[Any]]:
    """The column with a value for every token, 0 on prompts."""
    return [dumps.whole(row, name, 0) for row in ROWS]


def test_a_batch_is_the_trace_of_its_rows() -> None:
    """Lists, padded tensors and rows with their prompts give the clues of the trace with the same values."""
    routes = {"experts_mu": column("experts_mu"), "experts_old": column("experts_old")}
    mu, old, entropy = column("logp_mu"), column("logp_old"), column("entropy_old")
    apart = diagnose(RESPONSES, mu, old, MASKS, prompts=PROMPTS, entropy_old=entropy, **routes)
    sides = (padded(values, math.nan) for values in (mu, old))
    tensors = diagnose(
        padded(RESPONSES, 0), *sides, padded(MASKS, 0), prompts=torch.tensor(PROMPTS),
        entropy_old=padded(entropy, math.nan),
    )  # fmt: skip
    joined = diagnose(
        column("tokens"), whole("logp_mu"), whole("logp_old"), whole("is_response"), entropy_old=whole("entropy_old"),
        **routes,
    )  # fmt: skip
    assert dict(joined.seen) == pytest.approx(dict(apart.seen))
    for name in ("k3_kl", "rho_mean", "size", "surprise_gap", "correlation", "num_tokens"):
        assert apart.seen[name] == pytest.approx(SEEN[name]) == pytest.approx(tensors.seen[name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logp_mu": [[-1.0]]}, "logp_mu: expected 6 rows as in tokens, got 1"),
        ({"is_sampled": [[2] * len(mask) for mask in MASKS]}, "row 0: is_sampled.0: expected 0 or 1, got 2"),
        ({"logp_old": [[-1.0]] * 6}, "row 0: logp_old: expected 10 values, one per token, got 1"),
        ({"is_sampled": [[0] * len(mask) for mask in MASKS]}, "expected at least 1 row"),
        ({"experts_mu": [[[[0, 1]], [[0]]]] * 6}, "row 0: experts_mu: expected ints, rows x layers x slots, got "),
    ],
)
def test_a_batch_that_does_not_fit_is_one_line(changes: dict[str, Any], words: str) -> None:
    """Other numbers of rows or values, masks of other numbers and uneven routes are named."""
    given = {"tokens": RESPONSES, "logp_mu": column("logp_mu"), "logp_old": column("logp_old"), "is_sampled": MASKS}
    with pytest.raises(ValueError, match=re.escape(words)):
        diagnose(**(given | changes), prompts=PROMPTS)


# ---- the pages' lines ------------------------------------------------------------------------------------------------


def code(page: str, heading: str, number: int = 0) -> str:
    """The first Python block below a heading of a page, or a later one."""
    text = (DOCS / page).read_text().split(f"# {heading}\n")[1]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]


FIELDS = {
    "prompts": PROMPTS, "responses": RESPONSES, "response_mask": MASKS, "rollout_log_probs": column("logp_mu"),
    "old_log_probs": column("logp_old"),
}  # fmt: skip


class Queue:
    """verl's transfer queue: fields of a batch as nested tensors, those alone that are asked for."""

    @staticmethod
    def kv_batch_get(*, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Tensor]:
        assert keys == ["a"] and partition_id == "train"
        values = {name: [torch.tensor(row) for row in FIELDS[name]] for name in select_fields}
        return {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in values.items()}


BATCH = SimpleNamespace(keys=["a"], partition_id="train")


class PPOTrainer:
    """The two methods of verl's PPOTrainer that the pages' lines stand on, with their signatures."""

    global_steps = 12

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _log_rollout_data(self, batch: Any, timing_raw: dict[str, float], rollout_data_dir: str) -> None:
        self.calls.append(f"dump {rollout_data_dir}")

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, float]) -> Any:
        metrics["actor/entropy"] = 0.5
        return batch


def test_verls_hook_writes_what_the_doctor_reads(tmp_path: Path) -> None:
    """The page's lines on the transfer queue's nested tensors: the file is the trace, and verl's dump still runs."""
    names = {"PPOTrainer": type("Trainer", (PPOTrainer,), {}), "tq": Queue, "os": os, "json": json}
    exec(code("doctor.md", "What to add to verl"), names)
    trainer, folder = names["PPOTrainer"](), str(tmp_path / "dump")
    trainer._log_rollout_data(BATCH, {}, folder)
    dump = load_dump(tmp_path / "dump" / "12.engines.jsonl")
    assert trainer.calls == [f"dump {folder}"] and dump.format == "verl" and dump.trace.step == 12
    for name in ("tokens", "num_prompt", "is_response", "logp_mu", "logp_old"):
        assert torch.equal(getattr(dump.trace, name), getattr(TRACE, name)), name


def test_verls_callback_logs_the_clues(capsys: pytest.CaptureFixture[str]) -> None:
    """verl's metrics get every clue beside its own, and a fault is printed with its step."""
    names = {"PPOTrainer": type("Trainer", (PPOTrainer,), {}), "tq": Queue}
    exec(code("how-to/watch-the-mismatch.md", "verl"), names)
    metrics: dict[str, float] = {}
    assert names["PPOTrainer"]()._compute_old_log_prob(BATCH, metrics=metrics) is BATCH
    assert metrics["actor/entropy"] == 0.5 and metrics["doctor/k3_kl"] == pytest.approx(SEEN["k3_kl"])
    assert capsys.readouterr().out.startswith("doctor, step 12: it looks like ")


def trl(monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    """A module `trl`, whose trainer with these members returns the batch without the fields that it is given."""
    batch = {
        "prompt_ids": padded(PROMPTS, 0, to_the_left=True),
        "prompt_mask": padded([[1] * len(p) for p in PROMPTS], 0, to_the_left=True),
        "completion_ids": padded(RESPONSES, 0), "completion_mask": padded([[1] * len(mask) for mask in MASKS], 0),
        "sampling_per_token_logps": padded(column("logp_mu"), 0.0),
        "old_per_token_logps": padded(column("logp_old"), 0.0), "tool_mask": padded(MASKS, 1),
    }  # fmt: skip

    def generate(self: Any, inputs: list[Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in inputs}

    module = ModuleType("trl")
    trainer = type("GRPOTrainer", (), {"_generate_and_score_completions": generate, **members})
    module.GRPOTrainer = trainer  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "trl", module)


def test_trls_callback_logs_the_clues(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's metrics of the mode get every clue of what the method returns, tools masked; without both sides none."""
    trl(monkeypatch, model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list), "eval": {}})
    names: dict[str, Any] = {}
    exec(code("how-to/watch-the-mismatch.md", "TRL"), names)
    trainer = names["Watched"]()
    assert "old_per_token_logps" not in trainer._generate_and_score_completions(["old_per_token_logps"])
    assert not trainer._metrics["train"]
    trainer._generate_and_score_completions([])
    assert trainer._metrics["train"]["doctor/k3_kl"] == [pytest.approx(SEEN["k3_kl"])]
    assert trainer._metrics["train"]["doctor/num_tokens"] == [SEEN["num_tokens"]]


def test_nemo_rls_callback_logs_the_clues(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger still writes the file, and logs the clues of a step's training data, not of other files."""
    logged: list[Any] = []

    class Logger:
        def log_batched_dict_as_jsonl(self, to_log: dict[str, Any], filename: str) -> None:
            logged.append(filename)

        def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str | None = "") -> None:
            logged.append((prefix, step, metrics["k3_kl"]))

    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.logger"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["nemo_rl.utils.logger"].Logger = Logger  # pyright: ignore[reportAttributeAccessIssue]
    exec(code("how-to/watch-the-mismatch.md", "NeMo-RL"), {})
    fields = {"token_loss_mask": "is_response", "generation_logprobs": "logp_mu", "prev_logprobs": "logp_old"}
    batch = {theirs: padded(whole(ours), 0).tolist() for theirs, ours in fields.items()}
    batch["token_ids"] = padded(column("tokens"), 0).tolist()
    Logger().log_batched_dict_as_jsonl(batch, "train_data_step7.jsonl")
    Logger().log_batched_dict_as_jsonl({}, "val_data_step7.jsonl")
    assert logged == ["train_data_step7.jsonl", ("doctor", 7, pytest.approx(SEEN["k3_kl"])), "val_data_step7.jsonl"]


def test_openrlhfs_callback_logs_the_clues() -> None:
    """Each micro-batch's own log gets every clue of all responses, on each of its samples; without mu none.

    As in OpenRLHF, sequences are padded on the right, and masks and log-probabilities begin with the second token.
    """

    class RemoteExperienceMaker:
        def make_experience(self, samples_list: list[Any]) -> list[Any]:
            return samples_list

    def samples(rows: slice, **changes: Any) -> SimpleNamespace:
        fields = {"action_mask": "is_response", "rollout_log_probs": "logp_mu", "action_log_probs": "logp_old"}
        parts = {theirs: padded([row[1:] for row in whole(ours)[rows]], 0) for theirs, ours in fields.items()}
        tokens = padded(column("tokens")[rows], 9)
        return SimpleNamespace(sequences=tokens, info={"kl": torch.zeros(len(tokens))}, **(parts | changes))

    names = {"RemoteExperienceMaker": RemoteExperienceMaker, "torch": torch}
    exec(code("how-to/watch-the-mismatch.md", "OpenRLHF"), names)
    made = RemoteExperienceMaker().make_experience([samples(slice(0, 2)), samples(slice(2, None))])
    for batch in made:
        assert batch.info["kl"].shape == batch.info["doctor/k3_kl"].shape == batch.sequences.shape[:1]
        assert batch.info["doctor/k3_kl"].tolist() == pytest.approx([SEEN["k3_kl"]] * len(batch.sequences))
        assert batch.info["doctor/num_tokens"][0] == SEEN["num_tokens"]
    (silent,) = RemoteExperienceMaker().make_experience([samples(slice(0, 2), rollout_log_probs=None)])
    assert set(silent.info) == {"kl"}


def test_trls_hook_writes_a_dump_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of docs/doctor.md write a step's batch, and the doctor reads the same tokens and log-probabilities."""
    given = {"args": SimpleNamespace(output_dir=str(tmp_path)), "state": SimpleNamespace(global_step=7)}
    mode = SimpleNamespace(training=True)
    trl(monkeypatch, model=mode, **given)
    names: dict[str, Any] = {}
    exec(code("doctor.md", "What to add to TRL"), names)
    names["Dumped"]()._generate_and_score_completions(["old_per_token_logps"])
    mode.training = False  # in evaluation
    names["Dumped"]()._generate_and_score_completions([])
    assert not list(tmp_path.iterdir())
    mode.training = True
    names["Dumped"]()._generate_and_score_completions([])
    dump = load_dump(tmp_path / "trl_engines_7.jsonl")
    assert dump.format == "TRL"
    assert gather(dump.trace)["k3_kl"] == pytest.approx(SEEN["k3_kl"])


def test_skyrls_lines_write_a_dump_that_is_read(tmp_path: Path) -> None:
    """The lines of docs/doctor.md save a batch's tensors beside the pickle, and the doctor reads the same batch."""
    batch = torch.load(dumps.skyrl(tmp_path, ROWS), weights_only=True)
    batch |= {"metadata": SimpleNamespace()}  # which torch.load would not open as weights alone
    names = {"torch": torch, "data": batch, "data_save_dir": tmp_path, "file_name": "global_step_7_training_input"}
    exec(code("doctor.md", "What to add to SkyRL"), names)
    dump = load_dump(tmp_path / "global_step_7_training_input.pt")
    assert dump.format == "SkyRL"
    assert gather(dump.trace)["k3_kl"] == pytest.approx(SEEN["k3_kl"])


def test_slimes_hook_logs_the_clues_of_the_ranks_that_have_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor-parallel rank of the last stage logs, the same names everywhere; without an old pass none does."""
    logged: list[Any] = []
    mpu = SimpleNamespace(get_tensor_model_parallel_rank=lambda: rank)
    metrics = {"gather_log_data": lambda name, args, step, log: logged.append((name, step, log))}
    for name, members in {"megatron.core": {"mpu": mpu}, "slime.observability.train_metric_utils": metrics}.items():
        (module := ModuleType(name)).__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("megatron", "slime", "slime.observability"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    names: dict[str, Any] = {}
    exec(code("how-to/watch-the-mismatch.md", "slime"), names)
    rollout = {"tokens": column("tokens"), "loss_masks": MASKS, "rollout_log_probs": column("logp_mu")}
    data: dict[str, Any] = {name: [torch.tensor(row) for row in rows] for name, rows in rollout.items()}
    data["response_lengths"] = [len(row) for row in RESPONSES]
    both = data | {"log_probs": [torch.tensor(row) for row in column("logp_old")]}
    for rank, batch in ((0, data), (1, both), (0, both)):  # noqa: B007
        names["watched"](SimpleNamespace(), 7, batch)
    ((prefix, step, log),) = logged
    assert (prefix, step) == ("doctor", 7) and log["k3_kl"] == pytest.approx(SEEN["k3_kl"])
    assert set(log) <= set(SEEN) and not any(map(math.isnan, log.values()))
    # A rank whose values are not finite has no such clue; slime's mean over ranks needs the same names on all.
    both["log_probs"] = [torch.full_like(row, -math.inf) for row in both["log_probs"]]
    names["watched"](SimpleNamespace(), 8, both)
    assert logged[1][2].keys() == log.keys() and all(map(math.isnan, logged[1][2].values()))


def test_slimes_folder_is_the_one_that_the_page_names(tmp_path: Path) -> None:
    """`--dump-details DIR` writes two folders; of DIR, as the section has it, the one that has both sides is read."""
    section = (DOCS / "doctor.md").read_text().split("# What to add to slime\n")[1].partition("\n#")[0]
    assert "firstorder doctor DIR" in section
    for folder in ("train_data", "rollout_data"):
        assert f"DIR/{folder}/{{rollout_id}}.pt" in section
        (tmp_path / folder).mkdir()
    shutil.copy(Path(__file__).parent / "written/slime/12.pt", tmp_path / "train_data")
    torch.save({"rollout_id": 12, "samples": []}, tmp_path / "rollout_data/12.pt")
    (step,) = step_files(tmp_path)
    assert step.number == 12 and step.paths[0].parent.name == "train_data"
