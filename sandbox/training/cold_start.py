"""The cold start: supervised training on generated demonstrations until sampled accuracy reaches a target.

RL needs a model that is sometimes right: where all rewards are 0, so are all advantages. The result is a Hugging Face
folder, cached by the hash of its inputs, so that runs that differ in engine or algorithm start from the same weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from filelock import FileLock
from jaxtyping import Bool
from torch import Tensor

from lab.evaluation import evaluate
from lab.files import atomic_folder
from lab.recording import NonFiniteError
from lab.tasks import DemonstratedTask
from sandbox.config import ColdStartBlock
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.model.checkpoint import save
from sandbox.training.head import head_scores
from theory.contracts import Environment, Prompt
from theory.streams import derive_seed, stream
from theory.turns import sampled_tokens

PROCEDURE = 1
"""Part of the cache key: raise it when the procedure changes."""

Report = Callable[[int, float, float], None]
"""Called at every check with the number of updates, the last loss in nats per token, and the accuracy in [0, 1]."""


def cold_start(
    model: MoE,
    task: DemonstratedTask,
    block: ColdStartBlock,
    *,
    description: dict,
    max_tokens: int,
    max_turns: int = 1,
    report: Report | None = None,
) -> tuple[MoE, dict[str, float]]:
    """The model after its supervised stage, and {"accuracy" in [0, 1], "num_updates"}; cached.

    If the cache has no such model, trains `model` in place and returns its saved copy. `description` holds the parts of
    the config that define the model and the task, for the cache key. Raises ValueError if the target is not reached
    within `max_updates`, or if every response of the teacher's first batch is longer than `max_tokens`; NonFiniteError
    if a loss is not finite.
    """
    block = block.model_copy(update={"teacher": block.teacher or task.teachers[0]})
    limits = {"max_tokens": max_tokens, "max_turns": max_turns}
    # The default teacher and a single turn are left out of the key, so that caches older than these options stay valid.
    unnamed = {"cache", "teacher"} if block.teacher == task.teachers[0] else {"cache"}
    limit = max_tokens if max_turns == 1 else limits
    # The key has torch's version, as another one may round differently.
    key = json.dumps([PROCEDURE, torch.__version__, description, block.model_dump(exclude=unnamed), limit])
    folder = Path(block.cache) / hashlib.sha256(key.encode()).hexdigest()[:12]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # If several runs start at once, one trains; the others wait here and then find its folder.
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            summary = _train(model, task, block, limits, report)
            with atomic_folder(folder) as scratch:
                save(model, scratch)
                (scratch / "cold_start.json").write_text(json.dumps(summary), encoding="utf-8")
    # The process that trained the model reads it back, too, so that all runs start from the same file.
    return load_model(folder), json.loads((folder / "cold_start.json").read_text(encoding="utf-8"))


def _train(
    model: MoE, task: DemonstratedTask, block: ColdStartBlock, limits: dict[str, int], report: Report | None
) -> dict[str, float]:
    engine = SandboxEngine(model.config, (), task.tokenizer.end_ids)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=block.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    accuracy = 0.0
    for update in range(block.max_updates):
        rate = block.learning_rate * min(1.0, (update + 1) / max(1, block.warmup_updates))
        for group in optimizer.param_groups:
            group["lr"] = rate
        # `prompts` takes a step's number. RL uses 0, 1, ...; a hash gives the cold start other problems.
        prompts = task.prompts(derive_seed(block.seed, "cold_start", update), block.batch_size)
        draws = stream(block.seed, "demonstrations", update)
        demonstrations = [task.demonstration(p, draws, str(block.teacher)) for p in prompts]
        if update == 0:
            _check_fit(demonstrations, block, limits["max_tokens"])
        masks = [
            sampled_tokens(task, p, d, task.tokenizer.eos_id) for p, d in zip(prompts, demonstrations, strict=True)
        ]
        loss = demonstration_loss(model, prompts, demonstrations, masks)
        if not torch.isfinite(loss):
            raise NonFiniteError(f"cold start: the loss of update {update} is {loss.item()}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (update + 1) % block.check_every == 0 or update + 1 == block.max_updates:
            engine.load_model(model, version=update + 1)
            accuracy = _accuracy(engine, task, block, limits, update)
            if report is not None:
                report(update + 1, loss.item(), accuracy)
            if accuracy >= block.target_accuracy:
                return {"accuracy": accuracy, "num_updates": update + 1}
    raise ValueError(
        f"cold_start.target_accuracy: expected to reach {block.target_accuracy} within {block.max_updates} updates, "
        f"got {accuracy:.3f}"
    )


def _check_fit(demonstrations: Sequence[Sequence[int]], block: ColdStartBlock, max_tokens: int) -> None:
    """Raises ValueError if even the shortest demonstration exceeds `max_tokens`: accuracy would stay at 0."""
    shortest = min(map(len, demonstrations))
    if shortest > max_tokens:
        raise ValueError(
            f"algorithm.sampling.max_tokens: expected room for the responses of cold_start.teacher {block.teacher}, at "
            f"least {shortest} tokens, got {max_tokens}"
        )


def demonstration_loss(
    model: MoE, prompts: Sequence[Prompt], demonstrations: Sequence[Sequence[int]], masks: Sequence[Bool[Tensor, " _"]]
) -> Tensor:
    """The mean negative log-likelihood, in nats per token, of the demonstrations' tokens whose mask is True."""
    S = max(len(p.tokens) + len(d) for p, d in zip(prompts, demonstrations, strict=True))
    tokens_BS = torch.zeros(len(prompts), S, dtype=torch.int64)
    is_target_BS = torch.zeros(len(prompts), S, dtype=torch.bool)
    for b, (prompt, demonstration, mask) in enumerate(zip(prompts, demonstrations, masks, strict=True)):
        start, stop = len(prompt.tokens), len(prompt.tokens) + len(demonstration)
        tokens_BS[b, :stop] = torch.tensor([*prompt.tokens, *demonstration])
        is_target_BS[b, start:stop] = mask
    hidden_BSD = model.forward_hidden(tokens_BS[:, :-1])
    target_BS = is_target_BS[:, 1:]  # row s predicts token s + 1
    return -head_scores(model, hidden_BSD[target_BS], tokens_BS[:, 1:][target_BS]).logp_n.mean()


class _Check:
    """The task with check problems in place of the held-out ones, which the cold start must not see."""

    def __init__(self, task: DemonstratedTask, check: Sequence[Prompt]):
        self.prompts, self.reward = task.prompts, task.reward
        self._check = check
        # `roll_out` recognises an environment by this method, so only an environment's check may have it.
        if isinstance(task, Environment):
            self.observe = task.observe

    def held_out(self) -> Sequence[Prompt]:
        return self._check


def _accuracy(
    engine: SandboxEngine, task: DemonstratedTask, block: ColdStartBlock, limits: dict[str, int], update: int
) -> float:
    prompts = task.prompts(derive_seed(block.seed, "cold_start_check", update), block.num_check)
    metrics = evaluate(
        engine,
        _Check(task, prompts),
        num_samples=1,
        max_prompts=block.num_check,
        **limits,
        temperature=1.0,
        seed=derive_seed(block.seed, "cold_start_sampling", update),
    )
    return metrics["eval/accuracy"]
