"""Dumps in other frameworks' formats, written from our rows: a writer per format, and the rows of a trace.

A planted fault can then be viewed in any format (notebooks/09_the_doctor.ipynb), and every importer is tested on its
writer's files. Each writer follows the framework's own code, which its importer's docstring names: padding, place and
type of every field, and the fields that the importer ignores. It returns the path that it wrote in `folder`.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.traces import Trace

Rows = list[dict[str, Any]]


def rows_of(trace: Trace) -> Rows:
    """The trace as rows of importers/rows.py, one per response; absent columns stay absent.

    Layer numbers are lost: rows count layers from 0.
    """
    names = ("is_response", "logp_mu", "logp_old", "logp_pi", "entropy_old", "experts_mu", "experts_old")
    columns = {name: values for name in names if (values := getattr(trace, name)) is not None}
    out: Rows = []
    num_values = num_routes = 0
    for b, (start, stop) in enumerate(itertools.pairwise(trace.offsets.tolist())):
        S, P = stop - start, int(trace.num_prompt[b])
        # S - P values per response, one per token after the prompt; S - 1 routes, as the last token is never an input.
        row = {"step": trace.step, "tokens": trace.tokens[start:stop].tolist(), "num_prompt": P}
        row["reward"] = trace.rewards[b].item()
        if trace.engines is not None:
            row["engine"] = int(trace.engines[b])
        if trace.temperature is not None:
            row["temperature"] = trace.temperature
        for name, values in columns.items():
            first, count = (num_routes, S - 1) if name.startswith("experts") else (num_values, S - P)
            row[name] = values[first : first + count].tolist()
        out.append(row)
        num_values, num_routes = num_values + S - P, num_routes + S - 1
    return out


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes the file, one JSON object per line; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole(row: dict[str, Any], name: str, before: int | float, width: int | None = None) -> list[Any]:
    """A value for every token: `before` on the prompt, and on padding up to `width`."""
    values = [before] * row["num_prompt"] + list(row[name])
    return values + [before] * ((width or len(values)) - len(values))


def nemo_rl(folder: Path, rows: Rows) -> Path:
    """`train_data_step3.jsonl`: right-padded; mu is 0 where no token was sampled, old has a value from place 1 on."""
    # Wider than the longest row: every row has padding, which its importer must cut.
    W, out = max(len(row["tokens"]) for row in rows) + 2, []
    for idx, row in enumerate(rows):
        S, mask = len(row["tokens"]), whole(row, "is_response", 0, W)
        mu = [x if is_one else 0.0 for x, is_one in zip(whole(row, "logp_mu", 0.0, W), mask, strict=True)]
        old = [0.0, *[-1.25] * (row["num_prompt"] - 1), *row["logp_old"], *[0.0] * (W - S)]
        out.append(
            {
                "content": "2+3=5",
                "rewards": row["reward"],
                "input_lengths": S,
                "token_ids": row["tokens"] + [0] * (W - S),
            }
            | {"token_loss_mask": [int(x) for x in mask], "sample_loss_mask": 1.0, "advantages": [0.5] * W}
            | {"generation_logprobs": mu, "prev_logprobs": old, "idx": idx}
        )
    # NeMo-RL logs micro-batches of one: each value but `idx` is in a list.
    batched = [{name: value if name == "idx" else [value] for name, value in row.items()} for row in out]
    return lines(folder / "train_data_step3.jsonl", batched)


def prime_rl(folder: Path, rows: Rows) -> Path:
    """`token_exports/step_12/rank_0.jsonl`, schema_version 1: no padding, a value per token in every column."""
    out = []
    for i, row in enumerate(rows):
        S, nothing = len(row["tokens"]), [None] * len(row["tokens"])
        out.append(
            {"schema_version": 1, "step": 12, "rank": 0, "micro_step": 0, "micro_sequence_idx": i}
            | {"export_sequence_idx": i, "env_name": "arithmetic", "token_ids": row["tokens"]}
            | {"position_ids": list(range(S)), "loss_mask": [bool(x) for x in whole(row, "is_response", 0)]}
            | {"advantages": [0.5] * S, "inference_logprobs": whole(row, "logp_mu", 0.0)}
            # Far from mu's 0 on the prompt: an importer that took the prompt's values would show a large gap.
            | {"trainer_logprobs": whole(row, "logp_old", -11.9), "entropy": whole(row, "entropy_old", 11.9)}
            | {"mismatch_kl": nothing, "log_importance_ratio": nothing, "importance_ratio": nothing}
            | {"prob_delta": nothing, "is_masked": nothing, "is_masked_high": nothing, "is_masked_low": nothing}
            | {"rl_weights": nothing, "ce_weights": nothing, "ref_kl_weights": nothing}
        )
    return lines(folder / "token_exports" / "step_12" / "rank_0.jsonl", out)


def verl_v1(folder: Path, rows: Rows) -> Path:
    """`12.engines.jsonl` of docs/doctor.md's hook: the transfer queue's unpadded fields, a routing row per token."""
    out = []
    for row in rows:
        # verl keeps a routing row for every token; the last token's is filler.
        P, filler = row["num_prompt"], [[[0] * len(layer) for layer in row["experts_mu"][0]]]
        out.append(
            {"step": 12, "prompts": row["tokens"][:P], "responses": row["tokens"][P:], "score": row["reward"]}
            | {"response_mask": [int(x) for x in row["is_response"]], "rollout_log_probs": row["logp_mu"]}
            | {"old_log_probs": row["logp_old"], "entropy": row["entropy_old"]}
            | {"routed_experts": row["experts_mu"] + filler}
        )
    return lines(folder / "12.engines.jsonl", out)


def trl(folder: Path, rows: Rows) -> Path:
    """`trl_engines_12.jsonl` of docs/doctor.md's hook: prompts left-padded, completions right-padded, with zeros."""
    P = max(row["num_prompt"] for row in rows) + 1
    T, out = max(len(row["logp_mu"]) for row in rows) + 1, []
    for row in rows:
        p, t = row["num_prompt"], len(row["logp_mu"])
        right = [0] * (T - t)
        out.append(
            {"prompt_ids": [0] * (P - p) + row["tokens"][:p], "prompt_mask": [0] * (P - p) + [1] * p}
            | {"completion_ids": row["tokens"][p:] + right, "completion_mask": [1] * t + right}
            | {"sampling_per_token_logps": row["logp_mu"] + right, "old_per_token_logps": row["logp_old"] + right}
            | {"tool_mask": [int(x) for x in row["is_response"]] + [1] * (T - t)}
        )
    return lines(folder / "trl_engines_12.jsonl", out)


def miles(folder: Path, rows: Rows, is_copied: bool = False) -> Path:
    """`policy_loss_debug/rank_0_call_0.pt`: three log-probs per token, no token ids; `is_copied`: old is mu's own."""
    samples = []
    for index, row in enumerate(rows):
        mu, old = torch.tensor(row["logp_mu"]), torch.tensor(row["logp_old"])
        samples.append(
            {"index": index, "total_length": len(row["tokens"]), "response_length": len(mu), "train_log_probs": old}
            | {"old_log_probs": mu if is_copied else old, "advantages": torch.ones(len(mu)), "rollout_log_probs": mu}
            | {"local_loss_mask": torch.tensor(row["is_response"]).float(), "train_rollout_abs_diff": (old - mu).abs()}
        )
    path = folder / "policy_loss_debug" / "rank_0_call_0.pt"
    path.parent.mkdir(parents=True)
    rest = {"ppo_kl": torch.zeros(3), "pg_loss": torch.zeros(3), "finite": {"ppo_kl": True, "pg_loss": True}}
    torch.save({"rank": 0, "call": 0, "samples": samples, **rest}, path)
    return path


def dashboard(folder: Path, rows: Rows) -> Path:
    """miles's `rollout_0.parquet`: a row per sample (eight per group), int32 tokens, int8 masks, float32 log-probs."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table(
        {
            "sample_index": pa.array(range(len(rows)), pa.int32()),
            "response_length": pa.array([len(row["logp_mu"]) for row in rows], pa.int32()),
            "total_length": pa.array([len(row["tokens"]) for row in rows], pa.int32()),
            "tokens": pa.array([row["tokens"] for row in rows], pa.list_(pa.int32())),
            "loss_mask": pa.array([[int(x) for x in row["is_response"]] for row in rows], pa.list_(pa.int8())),
            "rollout_log_probs": pa.array([row["logp_mu"] for row in rows], pa.list_(pa.float32())),
        }
    )
    parquet.write_table(table, path := folder / "rollout_0.parquet", row_group_size=8)
    return path


def open_instruct(folder: Path, rows: Rows) -> Path:
    """`{run}_rollouts_000000.jsonl`: a RolloutRecord per line."""
    records = [
        {"step": 0, "sample_idx": i, "prompt_idx": i // 2, "prompt_tokens": row["tokens"][: row["num_prompt"]]}
        | {"response_tokens": row["tokens"][row["num_prompt"] :], "reward": row["reward"], "advantage": 0.5}
        | {"finish_reason": "stop", "dataset": "gsm8k", "ground_truth": None, "request_info": None}
        | {"logprobs": row["logp_mu"]}
        for i, row in enumerate(rows)
    ]
    return lines(folder / "grpo_rollouts_000000.jsonl", records)


def vllm(folder: Path, rows: Rows) -> Path:
    """`vllm.jsonl`: RequestOutputs of one completion; every second one has routes as the HTTP server encodes them."""
    out = []
    for i, row in enumerate(rows):
        P, experts = row["num_prompt"], np.array(row["experts_mu"], dtype=np.uint8)
        buffer = io.BytesIO()
        np.save(buffer, experts)
        routes = base64.b64encode(buffer.getvalue()).decode() if i % 2 else experts.tolist()
        logprobs = [
            # Two candidates per position, as the sampled token's value must be found by its id.
            {str(token): {"logprob": x, "rank": 1, "decoded_token": "?"}, "99": {"logprob": -9.0, "rank": 2}}
            for token, x in zip(row["tokens"][P:], row["logp_mu"], strict=True)
        ]
        completion = {"index": 0, "text": "5", "token_ids": row["tokens"][P:], "logprobs": logprobs}
        completion |= {"routed_experts": routes, "finish_reason": "stop"}
        out.append({"request_id": str(i), "prompt_token_ids": row["tokens"][:P], "outputs": [completion]})
    return lines(folder / "vllm.jsonl", out)


def skyrl(folder: Path, rows: Rows) -> Path:
    """`batch.pt`: the left-padded tensors of a TrainingInputBatch, as the lines of docs/doctor.md save them."""
    S, T = max(len(row["tokens"]) for row in rows) + 1, max(len(row["logp_mu"]) for row in rows) + 1

    def left(values: list[Any], width: int) -> torch.Tensor:
        tensor = torch.tensor(values)
        return torch.cat([tensor.new_zeros((width - len(tensor), *tensor.shape[1:])), tensor])

    # SkyRL has a row for every token; the importer drops the last one.
    whole_rows = [row["experts_mu"] + row["experts_mu"][-1:] for row in rows]
    content = {
        "sequences": torch.stack([left(row["tokens"], S) for row in rows]),
        "attention_mask": torch.stack([left([1] * len(row["tokens"]), S) for row in rows]),
        "response_mask": torch.stack([left([1] * len(row["logp_mu"]), T) for row in rows]),
        "loss_mask": torch.stack([left([float(x) for x in row["is_response"]], T) for row in rows]),
        "rollout_logprobs": torch.stack([left(row["logp_mu"], T) for row in rows]),
        "action_log_probs": torch.stack([left(row["logp_old"], T) for row in rows]),
        "rollout_expert_indices": torch.stack([left(routes, S) for routes in whole_rows]),
        # True on rows that no engine recorded: the last token is never an input.
        "router_padding_mask": torch.stack([left([False] * len(row["experts_mu"]) + [True], S) for row in rows]),
        "advantages": torch.zeros(len(rows), T),
    }
    torch.save(content, path := folder / "batch.pt")
    return path


def old_side(folder: Path, rows: Rows) -> Path:
    """`old.jsonl`: the trainer's side alone, as `--old` takes it."""
    names = ("logp_old", "entropy_old", "experts_old")
    return lines(folder / "old.jsonl", [{name: row[name] for name in names} for row in rows])
