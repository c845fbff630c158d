"""The benchmark's third side: TRL's GRPOTrainer over the same model, prompts and loss, one global step at a time.

TRL owns its training loop, so the loop runs on its own stack and waits wherever a global step begins. Written for TRL
1.16 and transformers 5; its figures are those of the documented loop, with the fastest settings that we know.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

from sandbox.bench.reference_work import MODEL, OPTIMIZER, SEED, STOP, EvenTokens, Transformers, Work
from theory.contracts import Prompt

STEPS = 10_000
"""Global steps that the trainer is configured to take: more than anyone times."""


def is_installed() -> bool:
    """Whether TRL can be imported here (the extra `bench`)."""
    # TRL's trainer imports accelerate, which is missing if TRL is installed without dependencies (`make test-peers`).
    needed = ("trl", "accelerate", "datasets", "tokenizers", "greenlet")
    return all(importlib.util.find_spec(name) is not None for name in needed)


class StepByStep:
    """Runs a loop that calls `pause` where a step begins, one step per call of `advance`, on its own stack.

    It uses a greenlet, not a thread: OpenMP keeps a team of threads for every thread that computes, and once these
    outnumber the processors, no team waits actively any more. On two cores that made every side two to four times
    slower.
    """

    def __init__(self, loop: Callable[[], object]) -> None:
        self._loop = loop
        self._inner: Any = None
        self._outer: Any = None

    def advance(self) -> None:
        """Runs the loop from one pause to the next. Raises the loop's errors, and RuntimeError once it has ended."""
        from greenlet import greenlet

        if self._inner is None:
            self._inner = greenlet(self._loop)
            self._run()  # up to the first step
        self._run()

    def pause(self) -> None:
        """Called by the loop where a step begins: waits for the next `advance`."""
        self._outer.switch()

    def _run(self) -> None:
        from greenlet import getcurrent

        if not self._inner.dead:
            # Its parent, too: when the loop ends or raises, the parent continues, so that `advance` raises the error.
            self._outer = self._inner.parent = getcurrent()
            self._inner.switch()
        if self._inner.dead:
            raise RuntimeError("expected a loop with another step, got one that has ended")


class TRL:
    """Global steps of TRL's GRPOTrainer: N mini-batches per generation, AdamW at the other sides' learning rate."""

    def __init__(self, work: Work, peer: Transformers, num_minibatches: int) -> None:
        # The loop starts with the first `advance`, when the trainer that needs its pause is there.
        self._steps = StepByStep(lambda: self._trainer.train())
        self._trainer = _trainer(work, peer, num_minibatches, self._steps.pause)

    def step(self) -> None:
        """Takes one global step: generation, old log-probs if N > 1, N updates."""
        self._steps.advance()


def settings(work: Work, num_minibatches: int, folder: str) -> dict[str, Any]:
    """The arguments of GRPOConfig: MiniRL's advantages (no division by std), no KL, all tokens at temperature 1."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": work.num_prompts * work.num_responses // num_minibatches,
        "steps_per_generation": num_minibatches,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "num_generations": work.num_responses,
        "max_completion_length": work.max_tokens,
        "generation_kwargs": {"min_new_tokens": work.max_tokens},
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "learning_rate": OPTIMIZER.learning_rate,
        "weight_decay": OPTIMIZER.weight_decay,
        "max_grad_norm": OPTIMIZER.max_grad_norm,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "optim": "adamw_torch_fused",
        "max_steps": STEPS * num_minibatches,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "use_vllm": False,
        "disable_dropout": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "seed": SEED,
    }


def _trainer(work: Work, peer: Transformers, num_minibatches: int, pause: Callable[[], None]) -> Any:
    import copy

    import datasets
    import transformers
    import trl  # type: ignore[import-not-found]

    class PauseAtGlobalSteps(transformers.TrainerCallback):
        """Pauses before the first mini-batch of every global step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % num_minibatches == 0:
                pause()

    def share_of_even_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]

    prompts = [{"prompt": as_text(prompt)} for prompt in EvenTokens(work).prompts(0, 64 * work.num_prompts)]
    return trl.GRPOTrainer(
        model=copy.deepcopy(peer.model).train(),
        args=trl.GRPOConfig(**settings(work, num_minibatches, tempfile.mkdtemp(prefix="firstorder-bench-"))),
        train_dataset=datasets.Dataset.from_list(prompts),
        reward_funcs=share_of_even_tokens,
        processing_class=word_tokenizer(),
        callbacks=[PauseAtGlobalSteps()],
    )


def as_text(prompt: Prompt) -> str:
    """The prompt in the words of `word_tokenizer`."""
    return " ".join(f"t{token}" for token in prompt.tokens)


def word_tokenizer() -> Any:
    """A tokenizer whose word `t17` is token 17, as TRL takes text. Tokens 0 (pad) and 1 (stop) occur in no prompt."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Names that are no part of another word: a special `t1` would be found inside `t17`.
    special = {0: "<pad>", STOP: "<stop>"}
    vocabulary = {special.get(token, f"t{token}"): token for token in range(MODEL.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<stop>", unk_token="<pad>", padding_side="left"
    )
