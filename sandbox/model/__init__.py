"""The decoder: its layers, sizes and KV cache, and its Hugging Face folders.

`load(folder)(tokens_BS)` gives logits. A set of kernels (sandbox/kernels) does the arithmetic.
"""

from sandbox.model.checkpoint import load
from sandbox.model.config import ModelConfig
from sandbox.model.decoder import MoE
from sandbox.model.kv_cache import KVCache
from sandbox.model.layers import Routing

__all__ = ["KVCache", "MoE", "ModelConfig", "Routing", "load"]
