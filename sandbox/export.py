"""The sandbox's models as Hugging Face folders that transformers, vLLM and Megatron's loaders open: what scaled runs
start from.
"""

from __future__ import annotations

import filecmp
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lab.config.load import load
from lab.config.run import RunConfig
from lab.files import atomic_folder
from lab.hf.families import FAMILIES, OWN
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.tasks.tokenizers import CharTokenizer
from sandbox.config import SandboxRun
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.model.checkpoint import save
from sandbox.run import initial_model, open_task

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""The files that are copied where the model was opened from a folder."""


def initial(config: SandboxRun, report: bool = True) -> MoE:
    """The model that a run of this config starts RL from: after the cold start, from its cache where it was done."""
    torch.set_num_threads(1)  # as in a run, so that the cold start gives the same bits
    return initial_model(config, open_task(config), "lines" if report else "none")


def trained(folder: RunFolder, config: SandboxRun) -> tuple[MoE, int]:
    """The model of the run's newest checkpoint and its step; ValueError where there is none or it does not fit.

    The weights are the policy's own: under Pr3 the predictor, which mu's gates held besides, is left out.
    """
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise ValueError(
            f"{folder.path}: expected a run with a checkpoint, got none; its config exports where it starts"
        )
    if config.model.path is not None:
        model = load_model(config.model.path)
    else:
        model = MoE(config.model.build(open_task(config).tokenizer.vocab_size), torch.Generator())
    prefix = "model."
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
    """Writes the Hugging Face folder, whole or not at all; False where exactly this export is there already.

    `tokenizer` goes along: a task's own, or the files of the folder that the model was opened from.

    Raises ValueError where the model is one that only this project opens, and where `to` holds anything else.
    """
    if model.config.shape().family == OWN:
        classes = ", ".join(row.hf_class for row in FAMILIES.values() if "sandbox" in row.worlds and not row.is_own)
        raise ValueError(
            f"model: expected one that transformers has a class for ({classes}), got one with a gate, a norm or a "
            "shared expert that none of them has"
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        if to.is_dir() and _holds(to, lambda folder: _fill(model, tokenizer, folder)):
            return False
        raise ValueError(f"--to: expected a folder that is empty, absent or holds exactly this export, got {to}")
    to.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(to) as folder:
        _fill(model, tokenizer, folder)
    return True


def tokenizer_of(config: SandboxRun) -> CharTokenizer | Path:
    """The tokenizer of this config's model: its task's characters, or the files of the folder it comes from."""
    if config.model.path is not None:
        return Path(config.model.path)
    tokenizer = open_task(config).tokenizer
    assert isinstance(tokenizer, CharTokenizer), "a task that brings its own tokenizer is one of characters"
    return tokenizer


def _fill(model: MoE, tokenizer: CharTokenizer | Path, folder: Path) -> None:
    save(model, folder)
    # safetensors makes a private file; weights are as readable as the config beside them.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    if isinstance(tokenizer, CharTokenizer):
        tokenizer.save(folder)
        return
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def _holds(to: Path, fill: Callable[[Path], None]) -> bool:
    """Whether the folder has the files that `fill` writes, byte for byte, and no others."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        fill(scratch)
        if {p.name for p in to.iterdir()} != {p.name for p in scratch.iterdir()}:
            return False
        return all(filecmp.cmp(to / p.name, p, shallow=False) for p in scratch.iterdir())


def open_source(path: Path, schemas: Mapping[str, type[RunConfig]]) -> tuple[SandboxRun, RunFolder | None]:
    """The config in a YAML file, or that of a run folder together with the folder; ConfigError for another world's."""
    folder = RunFolder.open(path) if path.is_dir() else None
    config = load(path if folder is None else folder.path / "config.yaml", [], schemas)
    if not isinstance(config, SandboxRun):
        raise ConfigError(f"{path}: backend: expected a config of the sandbox, got {config.backend}")
    return config, folder
