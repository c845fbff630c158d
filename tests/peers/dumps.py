"""`python -m tests.peers.dumps CHECKOUTS`: dumps of six frameworks by the frameworks' own code, for the doctor's tests.

CHECKOUTS holds clones: prime-rl, slime, RL (NeMo), miles, open-instruct and SkyRL. Of each the functions that write the
dump are taken from their file as they stand and run on the rows of tests/lab/doctor/test_importers.py, without the
imports around them: none of it needs a GPU or an installation. Only what they write is stored, in
tests/lab/doctor/written/, and `test_written.py` reads it. miles's Parquet file needs polars.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import io
import json
import logging
import math
import os
import pickle
import shutil
import sys
import tempfile
import typing
from collections import UserDict, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from lab.doctor import dumps
from tests.lab.doctor.test_importers import ROWS, slime_data

TO = Path(__file__).parents[1] / "lab" / "doctor" / "written"
WHOLE = [row | {"is_response": [True] * len(row["logp_mu"])} for row in ROWS]
"""Rows without observations, for formats that cannot say what is one."""


def code(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """The names that a file has after these statements of it ran: functions, classes and assigned constants."""
    text = path.read_text(encoding="utf-8")
    kept = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt) and name_of(node) in names]
    found = {name_of(node) for node in kept}
    assert found == set(names), f"{path}: expected {sorted(set(names) - found)}"
    spaces: dict[str, Any] = {"torch": torch, "np": np, "json": json, "os": os, "Path": Path, "Any": Any, **given}
    spaces["logger"] = logging.getLogger(path.stem)
    module = ast.Module([ast.parse("from __future__ import annotations").body[0], *kept], [])
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), spaces)
    return spaces


def name_of(node: ast.AST) -> str | None:
    """The name that a statement defines or assigns."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign | ast.AnnAssign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return target.id if isinstance(target, ast.Name) else None
    return None


def right(values: list[list[Any]]) -> torch.Tensor:
    """Rows padded with 0 on the right, two places further than the longest."""
    width = max(map(len, values)) + 2
    return torch.tensor([row + [0] * (width - len(row)) for row in values])


def prime_rl(checkout: Path, to: Path) -> None:
    """prime-rl's TokenExporter on one packed micro-batch of all rows, padded at its end."""
    folder = checkout / "src/prime_rl/trainer/rl"
    ratio = "compute_importance_ratio_and_mismatch_kl"
    loss = {ratio: code(folder / "loss.py", ratio)[ratio]}
    config = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2)
    helpers = [node.name for node in ast.parse((folder / "token_export.py").read_text()).body
               if isinstance(node, ast.FunctionDef) and node.name != "setup_token_exporter"]  # fmt: skip
    found = code(
        folder / "token_export.py", "SCHEMA_VERSION", "TokenExporter", *helpers, DefaultLossConfig=SimpleNamespace,
        atexit=SimpleNamespace(register=lambda call: None), math=math, Mapping=Mapping, **loss,
    )  # fmt: skip
    sizes = [len(row["tokens"]) for row in ROWS]

    def packed(name: str, before: float, rest: float) -> torch.Tensor:
        flat = [x for row in ROWS for x in (row[name] if name == "tokens" else dumps.whole(row, name, before))]
        return torch.tensor([[*flat, rest, rest, rest]])

    batch = {
        "input_ids": packed("tokens", 0, 0), "loss_mask": packed("is_response", 0, 0).bool(),
        "position_ids": torch.tensor([[*[i for S in sizes for i in range(S)], 0, 1, 2]]),
        "inference_logprobs": packed("logp_mu", 0.0, 0.0), "env_names": ["sums"] * sum(sizes) + [""] * 3,
    }  # fmt: skip
    batch["advantages"] = batch["loss_mask"].float() / 2
    output = {"logprobs": packed("logp_old", -11.5, 0.0), "entropy": packed("entropy_old", 11.5, 0.0)}
    exporter = found["TokenExporter"](to, 0)
    exporter.export(12, 0, batch, output, [*sizes[:-1], sizes[-1] + 3], config)


def nemo_rl(checkout: Path, to: Path) -> None:
    """The statements of grpo.py that fill `train_data_step{N}.jsonl`, and the logger's method that writes it."""
    folder = checkout / "nemo_rl"
    methods = ("make_microbatch_iterator", "size", "slice")
    batch = code(folder / "distributed/batched_data_dict.py", *methods, SlicedDataDict=dict, PackedTensor=Unseen)
    batched = type("BatchedDataDict", (UserDict,), {name: batch[name] for name in methods})
    logged = code(folder / "utils/logger.py", "log_batched_dict_as_jsonl", BatchedDataDict=batched)
    logger = SimpleNamespace(base_log_dir=str(to))
    logger.log_batched_dict_as_jsonl = lambda *given: logged["log_batched_dict_as_jsonl"](logger, *given)
    mask = right([[int(x) for x in dumps.whole(row, "is_response", 0)] for row in ROWS])
    B, W = mask.shape
    data = {
        "input_ids": right([row["tokens"] for row in ROWS]), "token_mask": mask, "sample_mask": torch.ones(B),
        "prev_logprobs": right([dumps.whole(row, "logp_old", -1.25) for row in ROWS]),
        "advantages": torch.full((B, W), 0.5),
        "generation_logprobs": right([dumps.whole(row, "logp_mu", 0.0) for row in ROWS]) * mask,
    }  # fmt: skip
    data["prev_logprobs"][:, 0] = 0
    names = {
        "master_config": SimpleNamespace(grpo=SimpleNamespace(use_dynamic_sampling=False)), "repeated_batch": {},
        "flat_messages": {"content": ["2+3=5"] * B}, "rewards": torch.tensor([row["reward"] for row in ROWS]),
        "input_lengths": torch.tensor([len(row["tokens"]) for row in ROWS]), "train_data": data, "total_steps": 11,
        "logger": logger, "_should_log_nemo_gym_responses": lambda config: False,
    }  # fmt: skip
    exec(logging_statement(folder / "algorithms/grpo.py"), names)


def logging_statement(path: Path) -> Any:
    """The one `if` of grpo.py that fills and writes the log of a synchronous step, compiled."""
    found = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and "total_steps" in (text := ast.unparse(node)) and "train_data_step" in text
        and text.startswith("if not _should_log_nemo_gym_responses")
    ]  # fmt: skip
    assert len(found) == 1, f"{path}: expected one statement that logs a step, got {len(found)}"
    return compile(ast.Module([found[0]], []), str(path), "exec")


class Unseen:
    """A type that no value here has."""


def nemo_rl_r3(checkout: Path, to: Path) -> None:
    """The events of NeMo-RL's R3 trace: payloads at the rollout and in the trainer, and one verified layer."""
    module = ModuleType("r3_trace")
    exec(compile((checkout / "nemo_rl/utils/r3_trace.py").read_text(), "r3_trace.py", "exec"), module.__dict__)
    module.__dict__["socket"] = SimpleNamespace(gethostname=lambda: "host")
    module.__dict__["os"] = SimpleNamespace(getenv=os.getenv, getpid=lambda: 1)
    module.__dict__["time"] = SimpleNamespace(time=lambda: 0.0)
    os.environ |= {"NRL_R3_TRACE": "1", "NRL_R3_TRACE_DIR": str(to), "NRL_R3_TRACE_VERIFY_FORWARD": "0"}
    routes = [row["experts_mu"] + row["experts_mu"][-1:] for row in ROWS]
    W = max(map(len, routes))
    padded = torch.tensor([rows + rows[-1:] * (W - len(rows)) for rows in routes])
    data = {
        "routed_experts": padded, "input_ids": right([row["tokens"] for row in ROWS])[:, :W],
        "input_lengths": torch.tensor([len(row["tokens"]) for row in ROWS]),
    }  # fmt: skip
    keys = [f"s{b}" for b in range(len(ROWS))]
    module.trace_rollout_payload(keys=keys, data=data)
    module.trace_tq_fetch_payload(stage="prev_lp", keys=keys, data=data)
    module._context.set({"active": True, "stage": "train", "trace_step": 1, "microbatch_counts": defaultdict(int)})
    ran = padded[:, :, 0].flatten(0, 1)
    module._trace_router_replay_topk_use(
        replay_instance=SimpleNamespace(_nrl_layer_number=1), action="replay_forward", scores=torch.zeros(len(ran), 8),
        topk=2, expected=ran, actual=ran, backward_list_len_before=None, backward_list_len_after=None,
    )  # fmt: skip


def miles(checkout: Path, to: Path) -> None:
    """miles's policy loss, its training data of a rank, and its dashboard's columns."""
    folder = checkout / "miles"
    found = code(
        folder / "backends/training_utils/debug_dump.py", "maybe_dump_policy_loss_debug", "_POLICY_LOSS_DUMP_COUNTER",
        dist=torch.distributed, Namespace=SimpleNamespace, RolloutBatch=dict,
    )  # fmt: skip
    mu, old = ([torch.tensor(row[name]) for row in ROWS] for name in ("logp_mu", "logp_old"))
    sizes = {"total_lengths": [len(r["tokens"]) for r in ROWS], "response_lengths": [len(x) for x in mu]}
    found["maybe_dump_policy_loss_debug"](
        args=SimpleNamespace(dump_details=str(to)), batch=sizes, train_log_probs=old, old_log_probs=old,
        rollout_log_probs=mu, advantages=[torch.ones(len(x)) for x in mu],
        local_loss_masks=[torch.tensor(row["is_response"]).float() for row in ROWS], ppo_kl=torch.zeros(3),
        pg_loss=torch.zeros(3),
    )  # fmt: skip
    found = code(folder / "utils/train_dump_utils.py", "save_debug_train_data_for_rank")
    args = SimpleNamespace(save_debug_train_data=str(to / "train_{rollout_id}_{rank}.pt"), qkv_format="thd")
    found["save_debug_train_data_for_rank"](args, rollout_id=12, rollout_data=slime_data(ROWS), rank=0)
    found = code(folder / "ray/rollout/debug_data.py", "_warned_no_polars", "save_dashboard_columns")
    samples = [
        SimpleNamespace(index=b, response_length=len(row["logp_mu"]), tokens=row["tokens"],
                        loss_mask=[1] * len(row["logp_mu"]), rollout_log_probs=row["logp_mu"])
        for b, row in enumerate(WHOLE)
    ]  # fmt: skip
    found["save_dashboard_columns"](samples, path := to / "dashboard_columns" / "rollout_12.parquet")
    assert path.is_file(), "expected polars, without which miles writes no columns: pip install polars"


def slime(checkout: Path, to: Path) -> None:
    """slime's training data: the payload of two data-parallel shards, as its writer saves it."""
    path = checkout / "slime/observability/train_data_utils.py"
    names = ("_LAYOUT_FIELDS", "_WHOLE_BATCH_FIELDS", "_is_per_sample", "_build_dump_payload")
    found = code(path, *names)
    half, shards = len(ROWS) // 2, []
    for rank, place in enumerate((range(1, len(ROWS), 2), range(0, len(ROWS), 2))):
        data: dict[str, Any] = slime_data([ROWS[b] for b in place])
        data |= {"total_lengths": [len(ROWS[b]["tokens"]) for b in place], "partition": list(place)}
        data["rollout_routed_experts"] = [torch.from_numpy(x) for x in data["rollout_routed_experts"]]
        data |= {"raw_reward": [row["reward"] for row in ROWS], "num_microbatches": [half]}
        shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
    torch.save(found["_build_dump_payload"](shards, rollout_id=12, writer_rank=0), to / "12.pt")


def open_instruct(checkout: Path, to: Path) -> None:
    """open-instruct's shard of rollouts."""
    found = code(
        checkout / "open_instruct/rl_utils.py", "RolloutRecord", "_get_request_info_for_sample", "_save_rollouts",
        dataclass=dataclasses.dataclass, asdict=dataclasses.asdict,
    )  # fmt: skip
    B, prompts = len(ROWS), [row["num_prompt"] for row in ROWS]
    batch = SimpleNamespace(
        queries=[row["tokens"][:P] for row, P in zip(ROWS, prompts, strict=True)], datasets=["gsm8k"] * B,
        scores=[row["reward"] for row in ROWS], ground_truths=[[1]] * B,
    )  # fmt: skip
    result = SimpleNamespace(
        responses=[row["tokens"][P:] for row, P in zip(ROWS, prompts, strict=True)], finish_reasons=["stop"] * B,
        logprobs=[row["logp_mu"] for row in ROWS], request_info=None,
    )  # fmt: skip
    found["_save_rollouts"](str(to), "grpo", 12, batch, result, np.full(B, 0.5), 2, 0)


def skyrl(checkout: Path, to: Path) -> None:
    """SkyRL's pickle by `dump_data`, and the tensors of the same batch by the lines of docs/doctor.md."""
    skyrl = checkout / "skyrl"
    names = ("_serialize_tensor", "TensorList", "_rebuild_tensor_batch", "TensorBatch", "TrainingInputBatch")
    generic = {name: getattr(typing, name) for name in ("Dict", "Generic", "List", "Optional", "TypeVar", "TypedDict")}
    module = ModuleType("skyrl_batch")
    sys.modules["skyrl_batch"] = module
    found = code(
        skyrl / "backends/skyrl_train/training_batch.py", *names, copy=copy, io=io,
        pickle=pickle, DictType=typing.TypeVar("DictType"), TrainingInput=dict, __name__="skyrl_batch",
        **generic,
    )  # fmt: skip
    module.__dict__.update(found)
    with tempfile.TemporaryDirectory() as folder:
        batch = found["TrainingInputBatch"](torch.load(dumps.skyrl(Path(folder), ROWS), weights_only=True))
    trainer = code(skyrl / "train/trainer.py", "dump_data")
    self = SimpleNamespace(cfg=SimpleNamespace(trainer=SimpleNamespace(export_path=str(to))))
    trainer["dump_data"](self, batch, "global_step_12_training_input")
    torch.save({name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}, to / "batch.pt")


WRITERS = {
    "prime-rl": prime_rl, "RL": nemo_rl, "RL-r3": nemo_rl_r3, "miles": miles, "slime": slime,
    "open-instruct": open_instruct, "SkyRL": skyrl,
}  # fmt: skip


def main(checkouts: Path) -> None:
    """Writes the dumps of all frameworks, each in its folder."""
    for name, write in WRITERS.items():
        shutil.rmtree(to := TO / name.lower(), ignore_errors=True)  # some writers append
        to.mkdir(parents=True)
        with contextlib.redirect_stdout(io.StringIO()):
            write(checkouts / name.removesuffix("-r3"), to)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
