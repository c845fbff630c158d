"""Laws of the shims: Megatron fails without each of them, runs with all of them, and torch is left as it was.

A test that fails with "ran" says that its shim can go.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from lab.hf import ModelShape, parse_shape
from scaled.config import TrainingBlock
from tests.scaled.megatron_world import free_ports, joined, spawn, tiny_config

# Shim -> a word of the error without it. The order is that in which a first run meets them.
ALONE = {
    "generator": "CUDA",
    "current_device": "CUDA",
    "streams": "CUDA",
    "device_keyword": "CUDA",
    "router_gemm": "name 'te_general_gemm' is not defined",
    "type_names": "torch.cuda.FloatTensor",
    "latent_attention": "isinstance() arg 2 must be a type",
}
TOGETHER = {
    "tied_head": "CUDA",
    "synchronize": "CUDA",
    "split_sizes": "all_to_all_single(): incompatible function arguments",
    "rotary_positions": "no pinned memory allocator",
    "uneven_splits": "invalid tensor size",
}
FASTER = ("bf16_products", "expert_bias")
"""Megatron runs without these, slowly."""


def _attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # its words are the result
        return f"{type(error).__name__}: {error}"
    return "ran"


def _stepwise(steps: list[tuple[str, Callable[[], Any]]]) -> dict[str, tuple[str, str]]:
    """For each shim what its action said without it, with the shims before it, and what it says with it or with those
    after it: the second word is of the last attempt at the action."""
    from scaled.megatron_engine import cpu_shims

    install, cpu_shims.install = cpu_shims.install, lambda names=None: None
    install(())
    said: dict[str, tuple[str, str]] = {}
    for name, action in steps:
        before = _attempt(action)
        install((name,))
        said[name] = (before, _attempt(action))
    return said


def _build(training: TrainingBlock, shape: ModelShape) -> list[Any]:
    from scaled.megatron_engine.model import build_model

    return build_model(shape, training)


def _run_forward(training: TrainingBlock, shape: ModelShape) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = _build(training, shape)
    tokens_BS = torch.zeros(2, 8, dtype=torch.int64)

    def step(_: Any, chunk: Any) -> Any:
        return chunk(tokens_BS, torch.arange(8).expand(2, 8), None), lambda output: (output.sum(), {})

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(()),
        model=chunks[0],
        num_microbatches=1,
        seq_length=8,
        micro_batch_size=2,
        forward_only=False,
    )
    return chunks


def _optimizer(training: TrainingBlock, shape: ModelShape) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = _build(training, shape)
    wrap = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model: list[Any] = [DistributedDataParallel(chunk.config, wrap, chunk) for chunk in chunks]
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0, use_distributed_optimizer=True)
    return get_megatron_optimizer(settings, model)


def run_alone(rank: int, ports: list[int]) -> Any:
    """The shims that one rank needs, one after the other in one process; then what became of torch."""
    from scaled.megatron_engine import parallel

    training, shape = TrainingBlock(precision="fp32"), parse_shape(tiny_config())
    latent = parse_shape(tiny_config("deepseek_v3"))
    before, state = _fingerprint(), torch.get_rng_state()
    left = iter(ports)

    def initialize() -> None:
        parallel.shutdown()
        parallel.initialize(training, rank, 1, TCPStore("127.0.0.1", next(left), 1, True))

    def join_and(action: Callable[..., Any], shape: ModelShape) -> Callable[[], Any]:
        return lambda: action(training, shape)

    said = _stepwise(
        [
            ("generator", initialize),
            ("current_device", join_and(_build, shape)),
            ("streams", join_and(_build, shape)),
            ("device_keyword", join_and(_run_forward, shape)),
            ("router_gemm", join_and(_run_forward, shape)),
            ("type_names", join_and(_optimizer, shape)),
            ("latent_attention", join_and(_build, latent)),
        ]
    )
    parallel.shutdown()
    return said, before == _fingerprint(), torch.equal(state, torch.get_rng_state())


def _exchange(group: Any) -> None:
    """Rank r's rows [r, r + 1) of 3 to all ranks, and their gradients back: 1 and 2 rows under two ranks."""
    from megatron.core.tensor_parallel import mappings

    rank, sizes = group.rank(), [1, 2]
    own = torch.full((sizes[rank], 2), float(rank + 1), requires_grad=True)
    whole = mappings.gather_from_sequence_parallel_region(own, group=group, output_split_sizes=sizes)
    assert whole[:, 0].tolist() == [1.0, 2.0, 2.0]
    whole.backward(torch.arange(6.0).view(3, 2))
    assert own.grad is not None and torch.equal(own.grad, 2 * torch.arange(6.0).view(3, 2).split(sizes)[rank])


def run_together(rank: int, ports: list[int]) -> Any:
    """The shims that two ranks need."""
    from scaled.megatron_engine import cpu_shims

    cpu_shims.install([name for name in (*cpu_shims.SHIMS, *cpu_shims.REPAIRS) if name not in TOGETHER])
    plain, tied = parse_shape(tiny_config()), parse_shape(tiny_config(tie_word_embeddings=True))
    stages = TrainingBlock(num_ranks=2, precision="fp32", pipeline_parallel=2, timeout_s=60)
    experts = TrainingBlock(num_ranks=2, precision="fp32", expert_parallel=2, timeout_s=60)
    halves = TrainingBlock(num_ranks=2, precision="fp32", context_parallel=2, timeout_s=60)
    left = iter(ports)

    def inside(training: TrainingBlock, action: Callable[..., Any], shape: ModelShape) -> Callable[[], Any]:
        def run() -> None:
            with joined(training, rank, next(left)):
                action(training, shape)

        return run

    return _stepwise(
        [
            ("tied_head", inside(stages, _build, tied)),
            ("synchronize", inside(stages, _run_forward, plain)),
            ("split_sizes", inside(experts, _run_forward, plain)),
            ("rotary_positions", inside(halves, _run_forward, plain)),
            ("uneven_splits", inside(experts, lambda *_: _exchange(torch.distributed.group.WORLD), plain)),
        ]
    )


def _fingerprint() -> list[Any]:
    names = ("current_device", "current_stream", "synchronize", "manual_seed", "Stream", "get_rng_state")
    return [
        *(getattr(torch.cuda, name) for name in names),
        *(getattr(torch, name) for name in ("zeros", "tensor", "cuda", "arange")),
        torch.Tensor.type,
        torch.Tensor.cuda,
        torch.zeros(1).type(),
    ]


@pytest.fixture(scope="module")
def alone() -> Any:
    return spawn(1, run_alone, free_ports(2))[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, tuple[str, str]]]:
    return spawn(2, run_together, free_ports(10))


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_fails_without_it(name: str, alone: Any) -> None:
    """Without the shim, and with those before it, Megatron stops with the stated error."""
    before, _ = alone[0][name]
    assert before != "ran"
    assert ALONE[name] in before


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks_fail_without_it(name: str, together: list[dict[str, tuple[str, str]]]) -> None:
    """Without the shim some rank stops with the stated error; with it every rank runs."""
    said = [rank[name] for rank in together]
    assert any(TOGETHER[name] in before for before, _ in said), said
    assert all(after == "ran" for _, after in said), said


@pytest.mark.parametrize("name", ["generator", "streams", "router_gemm", "type_names", "latent_attention"])
def test_one_rank_runs_with_it(name: str, alone: Any) -> None:
    """With the shim that was missing last the action runs to its end."""
    assert alone[0][name][1] == "ran"


def test_torch_is_left_as_it_was(alone: Any) -> None:
    """After building, stepping and loading with every shim, torch's functions are its own, its generator untouched."""
    _, is_same, is_untouched = alone
    assert is_same
    assert is_untouched


def run_twice(rank: int) -> Any:
    """The changes of a second installation, and another thread's view while a type is renamed."""
    import threading

    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from scaled.megatron_engine import cpu_shims, cpu_torch

    cpu_shims.install()
    first = DistributedOptimizer.__init__
    cpu_shims.install()
    seen: list[str] = []
    with cpu_torch.method_as("type", cpu_shims._type_as_on_cuda):
        mine = torch.zeros(1).type()
        other = threading.Thread(target=lambda: seen.append(torch.zeros(1).type()))
        other.start()
        other.join()
    return DistributedOptimizer.__init__ is first, mine, seen[0], torch.zeros(1).double().type(torch.float32).dtype


def run_uncompiled(rank: int, port: int) -> tuple[list[bool], int]:
    """Whether each router with a bias counted the tokens of a step, and how many functions were compiled."""
    from scaled.megatron_engine import cpu_shims

    cpu_shims.install()
    counted: list[bool] = []
    training = TrainingBlock(precision="fp32")
    with joined(training, rank, port):
        for chunk in _run_forward(training, parse_shape(tiny_config("deepseek_v3"))):
            routers = [each for each in chunk.modules() if getattr(each, "enable_expert_bias", False)]
            counted += [bool(router.local_tokens_per_expert.sum() > 0) for router in routers]
    return counted, sum(torch._dynamo.utils.counters["frames"].values())


def test_a_step_compiles_nothing() -> None:
    """A forward and backward pass runs Megatron's functions as they are written; routers with a bias still count."""
    counted, num_compiled = spawn(1, run_uncompiled, free_ports(1)[0])[0]
    assert counted and all(counted)
    assert num_compiled == 0


def test_installing_twice_is_installing_once() -> None:
    """A second `install` wraps nothing again, and a renamed tensor type is seen by the thread that needs it alone."""
    is_same, mine, others, dtype = spawn(1, run_twice)[0]
    assert is_same
    assert (mine, others, dtype) == ("torch.cuda.FloatTensor", "torch.FloatTensor", torch.float32)


def test_every_shim_is_tested_and_names_its_place() -> None:
    """Each shim and repair is in the tables above, and says which upstream function it stands for."""
    folder = Path(__file__).parents[2] / "scaled" / "megatron_engine"
    functions = {
        node.name
        for name in ("cpu_shims.py", "repairs.py")
        for node in ast.parse((folder / name).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and "Upstream: " in (ast.get_docstring(node) or "")
    }
    assert functions == ALONE.keys() | TOGETHER.keys() | set(FASTER) == set(spawn(1, shim_names)[0])


def shim_names(rank: int) -> list[str]:
    from scaled.megatron_engine import cpu_shims

    return [*cpu_shims.SHIMS, *cpu_shims.REPAIRS]
