"""The work that the benchmark times, and the two sides that do it: this sandbox and Hugging Face transformers.

Both sides have the same weights and get the same tokens, so that their log-probs and gradients can be compared first.
The learning rate is 0, so that every repetition does the same work, the optimiser's included.
Papers: MiniRL (arXiv 2512.01374) Eq. 7 for the loss, R3 (2510.11370) and Pr2 (2606.00395) for replay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sandbox.engines.engine import SandboxEngine
from sandbox.engines.prefix_cache import PrefixCache
from sandbox.kernels import EAGER, Kernels
from sandbox.model import MoE
from sandbox.model.checkpoint import save
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from theory.advantages import group_mean
from theory.algorithm import Algorithm, OptimizerSettings
from theory.contracts import MiniBatch, Prompt, Response, Rollouts, Sampling, TokenBatch, TokenScores, UpdateStats
from theory.loop import StepResult, global_step, hand_over
from theory.objectives import preset
from theory.routing.passes import Mode, RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.streams import stream
from theory.turns import roll_out

MODEL = ModelConfig(
    vocab_size=64,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    experts_per_token=2,
    expert_size=64,
    max_positions=64,
)
SEED = 0
STOP = 1
NUM_TURNS = 4
TURNS_MODEL = replace(MODEL, vocab_size=8, max_positions=192)
"""The same decoder with a vocabulary so small that a turn ends after some eight tokens."""
OFF_POLICY = 4
"""N, the number of updates of an off-policy global step."""
MOST_RESPONSES = 2**14
"""Responses of the work: their KV cache takes 1.5 GB."""
OPTIMIZER = OptimizerSettings(learning_rate=0.0, weight_decay=0.0)
OBJECTIVE = preset("minirl")


@dataclass(frozen=True)
class Work:
    """One global step: P prompts x G responses. ValueError if the model or the mini-batches cannot hold it."""

    num_prompts: int = 16
    num_responses: int = 8
    prompt_tokens: int = 12
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if self.num_prompts < 1 or self.num_prompts % OFF_POLICY:
            raise ValueError(f"num_prompts: expected a multiple of {OFF_POLICY}, got {self.num_prompts}")
        if self.num_prompts * self.num_responses > MOST_RESPONSES:
            raise ValueError(
                f"num_prompts: expected at most {MOST_RESPONSES:,} responses in all, got {self.num_prompts} x "
                f"{self.num_responses}"
            )
        if self.num_responses < 2:
            raise ValueError(f"num_responses: expected at least 2, got {self.num_responses}")
        if not 1 <= self.max_tokens <= MODEL.max_positions - self.prompt_tokens:
            limit = MODEL.max_positions - self.prompt_tokens
            raise ValueError(f"max_tokens: expected 1 to {limit} after {self.prompt_tokens}, got {self.max_tokens}")

    @property
    def sampling(self) -> Sampling:
        """The sampling settings of both sides."""
        return Sampling(max_tokens=self.max_tokens, num_responses=self.num_responses, seed=SEED)

    @property
    def few_positions(self) -> int:
        """T_c of Pr2 (arXiv 2606.00395) App. E.1 for its longest responses: 2K of 16K tokens, an eighth."""
        return max(1, self.max_tokens // 8)

    def algorithm(self, mode: Mode, num_minibatches: int, num_positions: int | None = None) -> Algorithm:
        """The algorithm of such a global step, with router features on all response rows or on `num_positions`."""
        return Algorithm(
            OBJECTIVE,
            mode=mode,
            predictor=PredictorSettings(1.0, num_positions=num_positions or self.max_tokens),
            num_prompts=self.num_prompts,
            num_responses=self.num_responses,
            num_minibatches=num_minibatches,
            max_tokens=self.max_tokens,
            optimizer=OPTIMIZER,
        )


class EvenTokens:
    """A task without cost: random prompts, and the share of even tokens as reward, so that no group is uniform."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """Random tokens; the same ones for the same step."""
        draws = stream(SEED, "bench-prompts", step)
        # From 2 on: token 0 pads, and 1 ends a response.
        tokens_PS = torch.randint(2, MODEL.vocab_size, (num_prompts, self.work.prompt_tokens), generator=draws)
        return [Prompt(f"{step}-{p}", tuple(tokens_S), "") for p, tokens_S in enumerate(tokens_PS.tolist())]

    def held_out(self) -> Sequence[Prompt]:
        """No prompts: nothing is evaluated here."""
        return ()

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The share of even tokens, in [0, 1]."""
        return even_share(response)


def even_share(response: Response) -> float:
    """The share of a response's tokens that are even, in [0, 1]."""
    return float((response.tokens % 2 == 0).float().mean())


class Sandbox:
    """This project's side."""

    def __init__(self, work: Work, model: MoE) -> None:
        self.work = work
        self.model = model
        self.task = EvenTokens(work)
        self.prompts = self.task.prompts(0, work.num_prompts)
        self.engine = SandboxEngine(MODEL, (), kernels=model.kernels)
        self.engine.load_model(model, version=0)
        self.trainer = SandboxTrainingEngine(model, OPTIMIZER)
        # `gradient` must not time the optimiser, which the row of the global step includes.
        self.trainer.take_step = _nothing

    def generate(self) -> Rollouts:
        """All responses at full length, with log-probs and routing record."""
        return self.engine.generate(self.prompts, self.work.sampling)

    def ragged(self) -> Rollouts:
        """Responses of different lengths, which end at a stop token: the inputs of scoring and training."""
        engine = SandboxEngine(MODEL, (), stop_tokens=(STOP,), kernels=self.model.kernels)
        engine.load_model(self.model, version=0)
        return engine.generate(self.prompts, self.work.sampling)

    def score(self, rollouts: Rollouts) -> TokenScores:
        """The old pass: log-probs, entropies, routing record."""
        return self.trainer.score(rollouts, RoutingPlan("natural"))

    def minibatch(self, rollouts: Rollouts) -> MiniBatch:
        """All responses as one mini-batch, with the loop's advantages."""
        rewards_B = torch.tensor([self.task.reward(r.prompt, r) for r in rollouts.responses])
        advantages_B = group_mean(rewards_B.view(-1, self.work.num_responses)).reshape(-1)
        return MiniBatch(rollouts, self.score(rollouts).logp_BT, advantages_B, index=0, num_minibatches=1)

    def gradient(self, minibatch: MiniBatch) -> UpdateStats:
        """MiniRL's forward and backward, with the gradient's norm, metrics and routing record."""
        return self.trainer.update(minibatch, OBJECTIVE, RoutingPlan("natural"))

    def step(self, mode: Mode, num_minibatches: int, num_positions: int | None = None) -> Callable[[], StepResult]:
        """A whole global step on its own engines, as a function that can be called repeatedly."""
        algorithm = self.work.algorithm(mode, num_minibatches, num_positions)
        model = MoE(MODEL, kernels=self.model.kernels)
        model.load_state_dict(self.model.state_dict())
        predictor = algorithm.predictor if algorithm.passes.trains_predictor else None
        trainer, engine = (
            SandboxTrainingEngine(model, OPTIMIZER, predictor, keep_old_pass=num_minibatches == 1),
            SandboxEngine(MODEL, (), kernels=model.kernels),
        )
        hand_over(algorithm, engine, trainer, version=0)
        # Always step 0: the same prompts, draws and, at a learning rate of 0, weights in every repetition.
        return lambda: global_step(0, algorithm, engine, trainer, self.task, SEED)


class ToolTalk(EvenTokens):
    """Conversations: prompts of 64 tokens, and observations of 12 tokens after every turn but the last."""

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """Random tokens; the same ones for the same step."""
        draws = stream(SEED, "bench-turns", step)
        tokens_PS = torch.randint(2, TURNS_MODEL.vocab_size, (num_prompts, 64), generator=draws)
        return [Prompt(f"{step}-{p}", tuple(tokens_S), "") for p, tokens_S in enumerate(tokens_PS.tolist())]

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        """The same twelve tokens after every turn."""
        num_turns = int((response.tokens[response.is_response] == STOP).sum())
        return None if num_turns == NUM_TURNS else (2, 3, 4, 5, 6, 7) * 2


class Turns:
    """Rollouts in turns by our engine, with or without its prefix cache."""

    def __init__(self, work: Work, has_cache: bool, kernels: Kernels = EAGER) -> None:
        self.work, self.task = work, ToolTalk(work)
        self.prompts = self.task.prompts(0, work.num_prompts)
        self.engine = SandboxEngine(
            TURNS_MODEL, (), (STOP,), prefixes=PrefixCache() if has_cache else None, kernels=kernels
        )
        self.engine.load_model(MoE(TURNS_MODEL, stream(SEED, "bench-turns-model")), version=0)

    def roll_out(self) -> Rollouts:
        """All conversations, as the first under new weights: the cache is empty at the start."""
        if self.engine.prefixes is not None:
            self.engine.prefixes.clear()
        sampling = replace(self.work.sampling, max_tokens=TURNS_MODEL.max_positions - 64)
        return roll_out(self.engine, self.task, self.prompts, sampling, NUM_TURNS)


class Transformers:
    """The peer: transformers' own model class over the same weights, with its fastest experts (grouped_mm)."""

    def __init__(self, work: Work, model: MoE) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.work = work
        with tempfile.TemporaryDirectory() as folder:
            save(model, folder)
            model_class: Any = transformers.Qwen3MoeForCausalLM
            self.model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.set_experts_implementation("grouped_mm")
        # No end token and a least length: both sides sample every response to its full length.
        self.generation = transformers.GenerationConfig(
            max_new_tokens=work.max_tokens,
            min_new_tokens=work.max_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=True,
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt]) -> Tensor:
        """Samples the same number of tokens from the same prompts, without log-probs and routes."""
        tokens_BS = torch.tensor([p.tokens for p in prompts]).repeat_interleave(self.work.num_responses, 0)
        return self.model.generate(
            input_ids=tokens_BS, attention_mask=torch.ones_like(tokens_BS), generation_config=self.generation
        )

    @torch.inference_mode()
    def score(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        """The log-probs of the response tokens; those of padding have no meaning."""
        return self._logp(batch)

    def gradient(self, batch: TokenBatch, minibatch: MiniBatch) -> float:
        """The gradient's norm after forward and backward of the same loss."""
        self.model.zero_grad(set_to_none=True)
        output = OBJECTIVE(
            self._logp(batch), minibatch.logp_old_BT, batch.logp_mu_BT, minibatch.advantages_B, batch.is_response_BT
        )
        (-output.objective).backward()
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.max_grad_norm).item()

    def _logp(self, batch: TokenBatch) -> Float[Tensor, "B T"]:
        # All prompts have equal lengths here, so the last T rows of every sequence predict the response.
        inputs_BS, T = batch.tokens_BS[:, :-1], batch.is_response_BT.shape[1]
        is_token_BS = (torch.arange(inputs_BS.shape[1]) < batch.num_tokens_B[:, None]).long()
        logits_BTV = self.model(
            input_ids=inputs_BS, attention_mask=is_token_BS, use_cache=False, logits_to_keep=T
        ).logits
        return torch.log_softmax(logits_BTV, -1).gather(-1, batch.tokens_BS[:, -T:, None])[..., 0]


def reference_model(kernels: Kernels = EAGER) -> MoE:
    """The model of the reference work, 1.8 million parameters."""
    return MoE(MODEL, stream(SEED, "bench-model"), kernels)


def _nothing() -> None:
    pass
