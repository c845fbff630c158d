"""`firstorder filter`: pass rates of a problem file under a run's starting model and engine."""

from __future__ import annotations

import hashlib
import json

import torch

from lab.filtering import Band, ProblemFile, Summary, filter_problems
from lab.progress import ProgressKind
from lab.strict import ConfigError
from lab.tasks.tokenizers import load_tokenizer
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.model.checkpoint import read_config, to_hf
from sandbox.run import check_positions, initial_model, open_task
from sandbox.training.numerics import of_precision
from theory.contracts import Sampling


def filter_data(
    config: SandboxRun, data: str, *, num_samples: int, band: Band, progress: ProgressKind = "none"
) -> Summary:
    """Filters the problems of `data`, read by the config's task block; the block's own file is not filtered.

    The model is that of `model.path`, after the cold start if the config has one; mu is its rollout engine, defects
    included; temperature and length are those of `algorithm.sampling`. Raises the errors of `filter_problems`, and
    ConfigError if the config's task reads no problem file, and ValueError if a response may not fit the model.
    """
    config = config.settled()
    if not config.task.reads_problems:
        raise ConfigError(f"task.kind: expected jsonl or dataset (the format of DATA), got {config.task.kind}")
    assert config.model.path is not None, "SandboxRun requires a model folder for every problem file"
    config.kernels().set_threads(config.threads or 1)  # as in the run, whose own rollout engine samples
    tokenizer = load_tokenizer(config.model.path)
    file = ProblemFile.open(data, config.task, tokenizer)
    longest = max((len(prompt.tokens) for prompt in file.prompts), default=0)
    check_positions(config, read_config(config.model.path), longest)
    if config.cold_start is None:
        model = load_model(config.model.path)
    else:
        model = initial_model(config, open_task(config), progress)
    numerics = of_precision(config.training.precision)
    kernels = config.kernels()
    engine = SandboxEngine(model.config, config.engine.defects, tokenizer.end_ids, numerics=numerics, kernels=kernels)
    engine.load_model(model, version=0)
    block = config.algorithm.sampling
    sampling = Sampling(block.max_tokens, num_samples, block.temperature, config.seed)
    return filter_problems(file, engine, sampling, band, sampler=_sampler(config, model), progress=progress)


def _sampler(config: SandboxRun, model: MoE) -> str:
    """A hash of everything that defines mu: sizes, weights, precision, kernels and defects."""
    settings = [repr(model.config), config.training.precision, config.engine.model_dump(mode="json")]
    # Torch's operators add nothing, so that rates from before the kernels had a choice keep their hash.
    if config.compile:
        settings.append("compiled")
    digest = hashlib.sha256(json.dumps(settings).encode())
    for name, tensor in to_hf(model):
        digest.update(name.encode())
        # As bytes, since numpy has no bf16.
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


__all__ = ["filter_data"]
