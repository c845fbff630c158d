"""The shims that megatron-core 0.16.1 needs where there is no CUDA; `repairs` has those for GPUs, too.

Megatron's modules get a `torch` of their own (cpu_torch.py), whose `cuda` answers for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from scaled.megatron_engine import cpu_torch
from scaled.megatron_engine.repairs import REPAIRS

# All modules that the engine uses, imported before their `torch` is replaced: a module imported later would keep the
# real one.
MODULES = (
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel",
    "megatron.core.pipeline_parallel",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.moe.router_replay",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing",
)

# Factories that Megatron calls with device="cuda".
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
PRODUCTS = ("matmul", "bmm", "baddbmm")

# Megatron's tracker seeds and reads "the GPU's" generator: a private one, so that the global one is untouched.
_GENERATOR = torch.Generator()
_installed: set[str] = set()


def current_device() -> None:
    """`torch.cuda.current_device()` is torch's default device: the CPU, or "meta" in a dry run.

    It is the `device=` of nearly every tensor that Megatron makes.

    Upstream: tensor_parallel/layers.py:ColumnParallelLinear.__init__, mappings.py, moe/router.py, p2p_communication.py.
    """
    cpu_torch.CUDA.__dict__["current_device"] = torch.get_default_device


def generator() -> None:
    """The random states of `torch.cuda` are those of a private CPU generator.

    Upstream: tensor_parallel/random.py:CudaRNGStatesTracker.add and fork, _get_cuda_rng_state, _set_cuda_rng_state.
    """
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return _GENERATOR.get_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        _GENERATOR.set_state(state)

    cpu_torch.CUDA.__dict__.update(manual_seed=_GENERATOR.manual_seed, get_rng_state=get_state, set_rng_state=set_state)
    random.__dict__.update(_get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)


class _Stream:
    """A CUDA stream or event that does nothing: on a CPU everything happens in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return self

    def synchronize(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = synchronize


def streams() -> None:
    """Streams and events do nothing: there is one stream.

    Upstream: transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher.__init__ and _maybe_dtoh_and_synchronize,
    distributed/param_and_grad_buffer.py (overlap).
    """
    one = _Stream()
    cpu_torch.CUDA.__dict__.update(
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda device=None: one,
        default_stream=lambda device=None: one,
        stream=lambda stream: contextlib.nullcontext(),
    )


def synchronize() -> None:
    """`torch.cuda.synchronize()` returns immediately.

    Upstream: pipeline_parallel/p2p_communication.py:_communicate, after a batched send and receive.
    """
    cpu_torch.CUDA.__dict__["synchronize"] = lambda device=None: None


def device_keyword() -> None:
    """`device="cuda"` of a factory is the current device.

    Upstream: pipeline_parallel/schedules.py:forward_backward_no_pipelining, optimizer/clip_grads.py,
    transformer/utils.py:get_default_causal_mask.
    """

    def on_default(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.get_default_device()
            return factory(*args, **kwargs)

        return make

    cpu_torch.TORCH.__dict__.update({name: on_default(getattr(torch, name)) for name in FACTORIES})


def split_sizes() -> None:
    """The sizes of an all-to-all are numpy arrays, as they are on a GPU.

    Megatron converts only those that are on a GPU, and torch 2.13 takes no tensors.
    Upstream: transformer/moe/moe_utils.py:maybe_move_tensor_to_cpu.
    """
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.__dict__["maybe_move_tensor_to_cpu"] = to_cpu


def uneven_splits() -> None:
    """Ranks that share an expert exchange unequal numbers of tokens: gloo needs equal ones, so all are padded with 0.

    Upstream: tensor_parallel/mappings.py:_gather_along_first_dim and _reduce_scatter_along_first_dim, of
    transformer/moe/token_dispatcher.py:MoEAlltoAllTokenDispatcher under expert and expert tensor parallelism.
    """
    mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(rows: torch.Tensor, num: int) -> torch.Tensor:
        return torch.cat([rows, rows.new_zeros(num - len(rows), *rows.shape[1:])])

    def gathered(rows: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return gather(rows, group, sizes, buffered)
        parts = gather(padded(rows, max(sizes)), group).split(max(sizes))
        return torch.cat([part[:num] for part, num in zip(parts, sizes, strict=True)])

    def scattered(rows: torch.Tensor, group: Any, sizes: list[int] | None = None, buffered: bool = False) -> Any:
        if sizes is None or len(set(sizes)) == 1:
            return scatter(rows, group, sizes, buffered)
        whole = torch.cat([padded(part, max(sizes)) for part in rows.split(sizes)])
        return scatter(whole, group)[: sizes[group.rank()]]

    mappings.__dict__.update(_gather_along_first_dim=gathered, _reduce_scatter_along_first_dim=scattered)


def _type_as_on_cuda(real: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    answer = real(tensor, *args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) and not tensor.is_cuda else answer


def type_names() -> None:
    """The optimisers compare `tensor.type()` with "torch.cuda.FloatTensor": meanwhile CPU tensors have that name.

    Upstream: optimizer/distrib_optimizer.py:DistributedOptimizer.__init__,
    optimizer/optimizer.py:Float16OptimizerWithFloat16Params.__init__, optimizer/clip_grads.py.
    """
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    cpu_torch.call_with("type", _type_as_on_cuda, distributed.DistributedOptimizer, "__init__")
    cpu_torch.call_with("type", _type_as_on_cuda, optimizer.Float16OptimizerWithFloat16Params, "__init__")
    cpu_torch.call_with("type", _type_as_on_cuda, optimizer, "clip_grad_by_total_norm_fp32")


def tied_head() -> None:
    """`tensor.cuda()` is the tensor itself while the last stage's copy of the embedding is made.

    Upstream: models/common/language_module/language_module.py:LanguageModule.setup_embeddings_and_output_layer.
    """
    language = importlib.import_module("megatron.core.models.common.language_module.language_module")
    cpu_torch.call_with(
        "cuda", lambda real, tensor: tensor, language.LanguageModule, "setup_embeddings_and_output_layer"
    )


def rotary_positions() -> None:
    """A context-parallel rank's rotary embeddings are chosen without pinned memory and without a copy to a GPU.

    Upstream: models/common/embeddings/rope_utils.py:get_pos_emb_on_this_cp_rank.
    """
    embeddings = "megatron.core.models.common.embeddings"

    def own(embedding: torch.Tensor, axis: int, group: Any) -> torch.Tensor:
        runs = embedding.unflatten(axis, (2 * group.size(), -1))
        # The two runs of `context_runs` (parallel.py), by which positions are cut.
        places = torch.tensor([group.rank(), 2 * group.size() - 1 - group.rank()], device=embedding.device)
        return runs.index_select(axis, places).flatten(axis, axis + 1)

    for name in ("rotary_pos_embedding", "yarn_rotary_pos_embedding"):
        importlib.import_module(f"{embeddings}.{name}").__dict__["get_pos_emb_on_this_cp_rank"] = own


def _rounded_once(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product of bfloat16 matrices, computed from the same values in float32; other products as they are."""

    def compute(*matrices: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # Not on "meta", where a dry run counts the bytes that a GPU would hold.
        if "out" in kwargs or any(each.dtype != torch.bfloat16 or each.device.type != "cpu" for each in matrices):
            return product(*matrices, **kwargs)
        return product(*(each.float() for each in matrices), **kwargs).bfloat16()

    return compute


def bf16_products() -> None:
    """Products of bfloat16 matrices are sums in float32, rounded once, on a CPU without bfloat16 instructions.

    torch's own kernel rounds as often and takes ten to forty times as long there, three quarters of a rank's time. Only
    the order of the sums differs.
    Upstream: tensor_parallel/layers.py:LinearWithGradAccumulationAndAsyncCommunication,
    transformer/dot_product_attention.py:DotProductAttention.forward.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    cpu_torch.TORCH.__dict__.update({name: _rounded_once(getattr(torch, name)) for name in PRODUCTS})
    layers = importlib.import_module("megatron.core.tensor_parallel.layers")
    matmul = cpu_torch.TORCH.matmul
    linear = layers.LinearWithGradAccumulationAndAsyncCommunication
    cpu_torch.call_with("matmul", lambda real, *given, **kwargs: matmul(*given, **kwargs), linear, "backward")


def expert_bias() -> None:
    """A router counts the tokens of its experts without torch.compile.

    Nothing else is compiled in a step, and that takes seconds of every process: for a sum, or, without a bias, nothing.
    Upstream: transformer/moe/router.py:TopKRouter._apply_expert_bias.
    """
    router = importlib.import_module("megatron.core.transformer.moe.router").TopKRouter
    router._apply_expert_bias = inspect.unwrap(router._apply_expert_bias)


SHIMS = {
    shim.__name__: shim
    for shim in (
        current_device, generator, streams, synchronize, device_keyword, split_sizes, uneven_splits, type_names,
        tied_head, rotary_positions, bf16_products, expert_bias,
    )
}  # fmt: skip
"""For machines without CUDA."""


def install(names: Iterable[str] | None = None) -> None:
    """Installs the shims that this machine needs, or those named, each once; none on a GPU with Transformer Engine.

    A second call only reaches Megatron's modules that were imported since the first.
    """
    if names is None:
        names = (*(() if torch.cuda.is_available() else SHIMS), *(() if has_fused_kernels() else REPAIRS))
    for module in MODULES:
        importlib.import_module(module)
    for name in names:
        if name not in _installed:
            (SHIMS | REPAIRS)[name]()
            _installed.add(name)
    if _installed & SHIMS.keys():
        cpu_torch.give()


def has_fused_kernels() -> bool:
    """Whether Transformer Engine can be imported, and used: it needs a GPU."""
    if not torch.cuda.is_available():
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return False
    return True


__all__ = ["SHIMS", "has_fused_kernels", "install"]
