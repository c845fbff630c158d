"""Shared parts of the training engine's tests: tiny random Hugging Face folders, and processes that form a real world.

Functions given to `spawn` run in processes of their own without pytest, copies of a server that has imported megatron
and called nothing: their module must be importable, and the test process itself never imports megatron.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from lab.hf import parse_shape
from scaled.config import TrainingBlock
from tests import forks
from theory.streams import stream

K = TypeVar("K")

COMMON: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "intermediate_size": 128,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": 8,
        "intermediate_size": 32,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        **LATENT,
        "q_lora_rank": 16,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "scoring_func": "sigmoid",
    },
}


def tiny_config(family: str = "qwen3_moe", **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model: 4 layers, width 64, 8 experts, 2 per token; `changes` are fields of config.json."""
    return {**COMMON, "model_type": family, **FAMILY_FIELDS[family], **changes}


def tiny_folder(folder: Path, family: str = "qwen3_moe", seed: int = 0, num_files: int = 2, **changes: Any) -> Path:
    """A Hugging Face folder of a random fp32 model of `tiny_config`, its tensors spread over `num_files` files.

    Weights are drawn from a named stream: wide enough that logits spread by about 1 and routers choose clearly.
    """
    fields = tiny_config(family, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    generator = stream(seed, "tiny_folder", family)
    tensors = {name: _draw(name, size, generator) for name, size in parse_shape(fields).weights().items()}
    where = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(where.values())):
        own = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def file_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(size, generator=generator)
    if name.endswith("correction_bias"):
        return 0.1 * noise
    if len(size) == 1:
        return 1 + 0.1 * noise
    if "embed_tokens" in name:
        return noise
    gain = 3.0 if name.endswith("mlp.gate.weight") else 1.0
    return gain * noise / size[1] ** 0.5


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now, below those that the system hands to outgoing connections (gloo opens many).

    They are this process's for its life: some are used minutes later, while other tests look for theirs.
    """
    ports: list[int] = []
    for port in range(20000, 30000):
        if len(ports) == number:
            break
        with socket.socket(socket.AF_UNIX) as claim, socket.socket() as one, contextlib.suppress(OSError):
            claim.bind(f"\0firstorder-port-{port}")
            one.bind(("127.0.0.1", port))
            claim.detach()  # it stays open, and the name taken, until this process and its copies have ended
            ports.append(port)
    assert len(ports) == number, f"expected {number} free ports, got {len(ports)}"
    return ports


@contextlib.contextmanager
def joined(training: TrainingBlock, rank: int, port: int) -> Iterator[None]:
    """This process is `rank` of the layout's world within it."""
    from scaled.megatron_engine import parallel

    store = TCPStore("127.0.0.1", port, training.num_ranks, rank == 0, timedelta(seconds=training.timeout_s))
    parallel.initialize(training, rank, training.num_ranks, store)
    try:
        yield
    finally:
        parallel.shutdown()


def in_turn(
    rank: int, worlds: Mapping[K, TrainingBlock], ports: Sequence[int], act: Callable[[K, TrainingBlock], Any]
) -> dict[K, Any]:
    """The value of `act` as `rank` of each world, by the key of the world; each has a copy of this process.

    A model that was updated holds its gloo groups for good, and every group has a thread that wakes a hundred times
    per second: after eleven worlds in one process there were 181, and they took a third of its time.
    """
    found: dict[K, Any] = {}
    with tempfile.TemporaryDirectory(prefix="world-") as name:
        log, result = Path(name) / "log", Path(name) / "result.pt"
        for (key, training), port in zip(worlds.items(), ports, strict=True):

            def alone(key: K = key, training: TrainingBlock = training, port: int = port) -> int:
                with joined(training, rank, port):
                    torch.save(act(key, training), result)
                return 0

            if forks.end(forks.begin(alone, log)) != 0:
                raise RuntimeError(f"in {key}:\n{log.read_text()}")
            found[key] = torch.load(result, weights_only=False)
    return found


def said(action: Callable[[], Any]) -> str:
    """The words of the action's ValueError, or "ran"."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "ran"


def spawn(num_ranks: int, function: Callable[..., Any], *args: Any, limit_s: float = 180) -> list[Any]:
    """`function(rank, *args)` in `num_ranks` new processes; what each returned (anything that torch.save takes).

    Raises RuntimeError with the traceback of a rank that failed, TimeoutError with the end of its log where one takes
    longer than `limit_s`; no process outlives the call.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.scaled.megatron_imports"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        ranks = [context.Process(target=_run, args=(rank, folder, function, args)) for rank in range(num_ranks)]
        try:
            for rank in ranks:
                rank.start()
            _wait(ranks, folder, time.monotonic() + limit_s)
            return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)  # with its copies
                rank.kill()  # one that has no group yet
                rank.join()


def _wait(ranks: list[Any], folder: Path, deadline: float) -> None:
    waiting = set(range(len(ranks)))
    while waiting:
        left = deadline - time.monotonic()
        multiprocessing.connection.wait([ranks[i].sentinel for i in waiting], timeout=max(0.0, left))
        for rank in [i for i in waiting if not ranks[i].is_alive()]:
            waiting.discard(rank)
            failure = folder / f"{rank}.traceback"
            if failure.exists():
                raise RuntimeError(f"rank {rank} failed:\n{failure.read_text()}")
            if not (folder / f"{rank}.pt").exists():
                raise RuntimeError(f"rank {rank} died with exit code {ranks[rank].exitcode}:\n{_tail(folder, rank)}")
        if waiting and time.monotonic() >= deadline:
            raise TimeoutError("".join(f"rank {rank} hangs:\n{_tail(folder, rank)}" for rank in sorted(waiting)))


def _tail(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.log"
    return log.read_text(errors="replace")[-3000:] if log.exists() else ""


def _run(rank: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    try:
        result = function(rank, *args)
        torch.save(result, folder / f"{rank}.partial")
        os.replace(folder / f"{rank}.partial", folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.traceback").write_text(traceback.format_exc())
        sys.exit(1)


__all__ = ["file_tensors", "free_ports", "in_turn", "joined", "said", "spawn", "tiny_config", "tiny_folder"]
