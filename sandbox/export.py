"""The sandbox's models as Hugging Face folders for transformers, vLLM and Megatron; scaled runs start from them."""

from __future__ import annotations

from pathlib import Path

import torch

from lab.checkpoints import read_checkpoint
from lab.exporting import copy_tokenizer, has_tokenizer, write_folder
from lab.hf import read_json
from lab.hf.families import FAMILIES, OWN
from lab.records import RunFolder
from lab.tasks.tokenizers import CharTokenizer
from sandbox.config import SandboxRun
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.model.checkpoint import save
from sandbox.run import initial_model, open_task


def initial(config: SandboxRun, report: bool = True) -> MoE:
    """The model from which a run of this config starts RL: after the cold start, read from its cache if there."""
    torch.set_num_threads(1)  # as in a run, so that the cold start gives the same bits
    return initial_model(config, open_task(config), "lines" if report else "none")


def trained(folder: RunFolder, config: SandboxRun, step: int | None = None) -> tuple[MoE, int]:
    """The model of the run's checkpoint at `step` (default: the newest), and its step; ValueError if shapes differ.

    The weights are the policy's own: the predictor, which mu's gates also hold under Pr3, is left out.
    """
    checkpoint = read_checkpoint(folder.checkpoint(step))
    if config.model.path is not None:
        model = load_model(config.model.path)
    else:
        model = MoE(config.model.build(open_task(config).tokenizer.vocab_size), torch.Generator())
    prefix = "model."  # a checkpoint holds the optimiser's state beside the model's
    weights = {n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}
    expected = model.state_dict()
    for name, tensor in expected.items():
        if name not in weights or weights[name].shape != tensor.shape:
            got = "none" if name not in weights else tuple(weights[name].shape)
            raise ValueError(
                f"{folder.path}: expected a checkpoint of the config's model with {name} of shape "
                f"{tuple(tensor.shape)}, got {got}"
            )
    model.load_state_dict(weights)
    return model, checkpoint.step


def write(model: MoE, tokenizer: CharTokenizer | Path, to: Path) -> bool:
    """Writes the Hugging Face folder, whole or not at all; False if exactly this export is already there.

    `tokenizer` is the task's own, or the folder that the model was loaded from, whose tokenizer files are copied and
    whose special tokens config.json names.

    Raises ValueError if only this project can open the model, or if `to` holds anything else.
    """
    if model.config.shape().family == OWN:
        classes = ", ".join(row.hf_class for row in FAMILIES.values() if "sandbox" in row.worlds and not row.is_own)
        raise ValueError(
            f"model: expected one that transformers has a class for ({classes}), got one with a gate, a norm or a "
            "shared expert that none of them has"
        )
    return write_folder(to, lambda folder: _fill(model, tokenizer, folder))


def tokenizer_of(config: SandboxRun) -> CharTokenizer | Path:
    """The tokenizer of this config's model: the folder that the model comes from, or its task's characters.

    ValueError where the task needs a tokenizer and the folder has none.
    """
    if config.model.path is not None and has_tokenizer(Path(config.model.path)):
        return Path(config.model.path)
    tokenizer = open_task(config).tokenizer
    assert isinstance(tokenizer, CharTokenizer), "a task with its own tokenizer has one of characters"
    return tokenizer


def _fill(model: MoE, tokenizer: CharTokenizer | Path, folder: Path) -> None:
    own = isinstance(tokenizer, CharTokenizer)
    save(model, folder, None if own else read_json(tokenizer / "config.json"))
    # safetensors creates a private file; give the weights the permissions of the config beside them.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    if own:
        tokenizer.save(folder)
    else:
        copy_tokenizer(tokenizer, folder)
