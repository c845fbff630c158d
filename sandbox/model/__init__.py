"""The decoder: its layers, sizes and cache, and the Hugging Face folders that hold it.

`load(folder)(tokens_BS)` gives logits. The arithmetic is that of a set of kernels (sandbox/kernels).
"""

from sandbox.model.checkpoint import load
from sandbox.model.config import ModelConfig
from sandbox.model.decoder import MoE
from sandbox.model.kv_cache import KVCache
from sandbox.model.layers import Routing

__all__ = ["KVCache", "MoE", "ModelConfig", "Routing", "load"]
