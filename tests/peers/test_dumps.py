"""The hooks of docs/doctor.md on verl's own dump code, and on the names that TRL's own method returns."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.doctor.importers import load_dump
from tests.lab.doctor.test_batch import FIELDS, PROMPTS, TRACE, code, padded
from tests.peers import trl_code, verl_code


def sources(package: str, path: str, cls: str, *names: str) -> list[str]:
    """These methods of a peer's class as they stand in its file, decorators included, without their indent."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    text = (Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8")
    body = next(node.body for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == cls)
    found = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    rows = text.splitlines()
    return [
        textwrap.dedent("\n".join(rows[min([found[name].lineno, *(d.lineno for d in found[name].decorator_list)]) - 1 :
                                       found[name].end_lineno]))
        for name in names
    ]  # fmt: skip


class Tokenizer:
    """Texts of ids: what they say is nothing to the doctor."""

    pad_token_id = 0

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids.tolist()))

    def batch_decode(self, rows: torch.Tensor, skip_special_tokens: bool) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


@pytest.fixture
def trainer() -> Iterator[Callable[..., tuple[Any, dict[str, Any]]]]:
    """Makes an object with verl's own methods, and their names; what they write in threads is there at the end."""
    pools: list[ThreadPoolExecutor] = []

    def make(path: str, cls: str, change: Callable[[str], str] = lambda text: text) -> tuple[Any, dict[str, Any]]:
        names: dict[str, Any] = {
            "os": os, "json": json, "ThreadPoolExecutor": ThreadPoolExecutor, "KVBatchMeta": object,
            "DataProto": object, "marked_timer": lambda *_, **__: nullcontext(), "json_encode_default": str,
        }  # fmt: skip
        methods = ("_write_generations", "_dump_generations", "_init_dump_executor", "_shutdown_dump_executor")
        for text in sources("verl", path, cls, *methods, "_log_rollout_data"):
            exec("from __future__ import annotations\n" + change(text), names)
        mine = {name: names[name] for name in (*methods, "_log_rollout_data")}
        names[cls] = type(cls, (), mine)
        one = names[cls]()
        one.global_steps, one.tokenizer = 12, Tokenizer()
        one._init_dump_executor()
        pools.append(one._dump_executor)
        return one, names

    yield make
    for pool in pools:
        pool.shutdown()


def assert_ours(path: Path) -> None:
    """The file is verl's to the doctor, and holds the trace."""
    dump = load_dump(path)
    assert dump.format == "verl" and dump.trace.step == 12
    for name in ("tokens", "num_prompt", "is_response", "logp_mu", "logp_old"):
        assert torch.equal(getattr(dump.trace, name), getattr(TRACE, name)), name


@pytest.mark.skipif(not verl_code.IS_INSTALLED, reason="verl is not installed: make test-peers")
def test_the_hook_of_the_newer_trainer_stands_on_verls_own_method(tmp_path: Path, trainer: Any) -> None:
    """verl's `_log_rollout_data` runs below the page's lines: its texts are written, and beside them our file."""

    class Queue:
        @staticmethod
        def kv_batch_get(*, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
            B = len(PROMPTS)
            others = {"uid": np.array(keys), "rm_scores": torch.zeros(B, 3), "reward_model": np.array([{}] * B)}
            tensors = {name: [torch.tensor(row) for row in rows] for name, rows in FIELDS.items()}
            jagged = {n: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for n, rows in tensors.items()}
            return {name: (others | jagged)[name] for name in select_fields}

    one, names = trainer("trainer/ppo/v1/trainer_base.py", "PPOTrainer")
    names |= {"tq": Queue}
    exec(code("doctor.md", "What to add to verl"), names)
    batch = SimpleNamespace(keys=[f"a_{i}_0" for i in range(len(PROMPTS))], partition_id="train")
    one._log_rollout_data(batch, {}, str(tmp_path))
    one._shutdown_dump_executor()
    assert len((tmp_path / "12.jsonl").read_text().splitlines()) == len(PROMPTS)
    assert_ours(tmp_path / "12.engines.jsonl")


@pytest.mark.skipif(not verl_code.IS_INSTALLED, reason="verl is not installed: make test-peers")
def test_the_lines_of_the_old_trainer_stand_in_verls_own_method(tmp_path: Path, trainer: Any) -> None:
    """With the page's lines before `_dump_generations`, the file that verl's own writer makes is the trace."""
    lines = code("doctor.md", "What to add to verl", number=1)

    def hooked(text: str) -> str:
        call = "self._dump_generations("
        if call not in text:
            return text
        before, after = text.split(call)
        indent = before[before.rindex("\n") + 1 :]
        return before[: -len(indent)] + textwrap.indent(lines, indent) + indent + call + after

    one, _ = trainer("trainer/ppo/ray_trainer.py", "RayPPOTrainer", hooked)
    prompts = padded(PROMPTS, 0, to_the_left=True)
    there = padded([[1] * len(row) for row in PROMPTS], 0, to_the_left=True)
    responses = {name: padded(rows, 0) for name, rows in FIELDS.items() if name != "prompts"}
    mask = torch.cat([there, padded([[1] * len(row) for row in FIELDS["responses"]], 0)], 1)

    class Batch(list[Any]):
        batch = responses | {
            "prompts": prompts,
            "attention_mask": mask,
            "token_level_scores": torch.zeros(len(prompts), 3),
        }
        non_tensor_batch: dict[str, Any] = {}  # noqa: RUF012

    batch = Batch(SimpleNamespace(non_tensor_batch={}) for _ in PROMPTS)
    one._log_rollout_data(batch, {}, {}, str(tmp_path))
    one._shutdown_dump_executor()
    assert_ours(tmp_path / "12.jsonl")


@pytest.mark.skipif(not trl_code.IS_INSTALLED, reason="TRL is not installed: make test-peers")
def test_trls_method_returns_what_its_hook_reads() -> None:
    """Every name of the batch in the page's lines is a key that GRPOTrainer's own method puts into what it returns."""
    (text,) = sources("trl", "trainer/grpo_trainer.py", "GRPOTrainer", "_generate_and_score_completions")
    keys = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "output" and isinstance(node.ctx, ast.Store):
            keys.add(ast.literal_eval(node.slice))
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "output"
            and isinstance(node.value, ast.Dict)
        ):
            keys |= {ast.literal_eval(key) for key in node.value.keys if key is not None}
    hook = ast.parse(code("doctor.md", "What to add to TRL"))
    lists = [node for node in ast.walk(hook) if isinstance(node, ast.List)]
    read = {element.value for found in lists for element in found.elts if isinstance(element, ast.Constant)}
    assert len(read) == 7 and read <= keys, read - keys
