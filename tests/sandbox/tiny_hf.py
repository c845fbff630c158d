"""Tiny Hugging Face folders as transformers writes them: random weights, and a tokenizer of characters or bytes."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lab.tasks.tokenizers import load_tokenizer
from sandbox.model import load

BYTES = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))
DIGITS = "0123456789+"


def write_qwen3_moe(folder: Path, alphabet: str = BYTES, sharpness: float = 1.0) -> Path:
    """A Qwen3-MoE of two layers over the alphabet; `sharpness` scales its logits, so that it is surer than chance."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(alphabet) + 1, hidden_size=32, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=256, eos_token_id=0,
    )  # fmt: skip
    return write(folder, transformers.Qwen3MoeForCausalLM, config, alphabet, sharpness)


def write(folder: Path, model_class, config, alphabet: str, sharpness: float = 1.0) -> Path:
    """The model of the config with random weights, and a tokenizer whose id 0 ends and id i is character i - 1."""
    tokenizer = Tokenizer(models.BPE(vocab={"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    if alphabet == BYTES:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel() if alphabet == BYTES else decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def guesses(folder: Path, text: str) -> list[str]:
    """The figures that a model over DIGITS may answer with, its likeliest first token first."""
    logits_V = load(folder)(torch.tensor([load_tokenizer(folder).encode(text)]))[0, -1]
    return [DIGITS[token - 1] for token in logits_V.argsort(descending=True).tolist() if 1 <= token <= 10]
