"""The sandbox's training engine: scores sampled tokens with `old`, and takes gradient steps with `pi`.

Scoring and training run the same forward pass, so pi equals old bit for bit before the first update of a global step.
It computes in float32 on the exact kernels unless `numerics` says otherwise (sandbox/training/numerics.py).
Extra letters: Q trainable parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy

import torch
from jaxtyping import Float
from torch import Tensor

from lab.recording import NonFiniteError
from sandbox.kernels.numerics import EXACT, Numerics
from sandbox.model import MoE
from sandbox.model.checkpoint import to_hf
from sandbox.training.forward import BatchRoutes, Forward, Kept, concat_routes, forward_pass
from theory.algorithm import OptimizerSettings
from theory.contracts import MiniBatch, NamedTensors, Rollouts, TokenBatch, TokenScores, UpdateStats
from theory.objectives import Objective, Top, combine_metrics
from theory.routing.features import RouterFeatures
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings, PredictorTrainer, fold
from theory.routing.replay import NaturalRouting, ReplayContext
from theory.top_tokens import TokenRows


class SandboxTrainingEngine:
    """TrainingEngine over a sandbox MoE: AdamW, warm-up, clipping by global norm, optional predictor (Pr2, Pr3).

    keep_old_pass: the old pass keeps its graph, and an update on the same responses trains on it without a new pass.
    For global steps of one mini-batch, where pi's pass has the bits of old's, routes included (for R2 by MiniRL, arXiv
    2512.01374, Table 1). It has no effect where the two differ: inexact numerics, several micro-batches, Pr2, and Pr3,
    whose old pass has no features.
    """

    def __init__(
        self,
        model: MoE,
        optimizer: OptimizerSettings,
        predictor: PredictorSettings | None = None,
        freeze_router: bool = False,
        micro_batch_size: int = 128,
        keep_reference: bool = False,
        numerics: Numerics = EXACT,
        keep_old_pass: bool = False,
    ):
        self.model = model
        self.keep_old_pass = keep_old_pass
        self._kept: Kept | None = None
        self.numerics = numerics
        # Copied before a checkpoint is loaded, so that a resumed run has the reference that it began with.
        self.reference = deepcopy(model).requires_grad_(False) if keep_reference else None
        self.settings = optimizer
        self.micro_batch_size = micro_batch_size
        self.num_updates = 0
        for parameter in model.router_parameters():
            parameter.requires_grad_(not freeze_router)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in trained]
        self.parameters = [parameter for _, parameter in trained]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        # Lightning replaces it by its own wrapper of the optimiser (sandbox/training/learner.py).
        self.take_step: Callable[[], object] = self.optimizer.step
        self.predictor: PredictorTrainer | None = None
        if predictor is not None:
            config = model.config
            self.predictor = PredictorTrainer(
                config.moe_layers, config.hidden_size, config.num_experts, predictor, dtype=model.norm.dtype
            )

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        """log pi_old of every sampled token and the entropy (nats) of every next-token distribution, detached."""
        whole = rollouts.padded()
        B, T = whole.is_response_BT.shape
        logp_BT, entropy_BT, squares_BT = (self.model.norm.new_zeros(B, T) for _ in range(3))
        seen, logp_top = BatchRoutes(), list[TokenRows]()
        keeps = self._keeps(rollouts, plan)
        # `held` packs weights for whole passes, which take no gradients: a pass with a graph cannot use them.
        with torch.set_grad_enabled(keeps), nullcontext() if keeps else self.model.held():
            for chosen in self._micro_batches(B):
                with self._context(whole, plan, chosen) as context:
                    batch = whole.select(chosen)
                    forward = forward_pass(self.model, batch, context, self.numerics, has_entropy=True)
                # Micro-batches are contiguous, and as wide as their own longest response.
                own = slice(chosen[0], chosen[-1] + 1), slice(forward.logp_BT.shape[1])
                logp_BT[own] = forward.logp_BT.detach()
                assert forward.entropy_BT is not None and forward.sum_squares_BT is not None
                entropy_BT[own], squares_BT[own] = forward.entropy_BT, forward.sum_squares_BT
                if forward.logp_top_BTK is not None:
                    lengths_b = batch.num_tokens_B - batch.num_prompt_B
                    logp_top.append(TokenRows.packed(forward.logp_top_BTK.detach(), lengths_b))
                # Only now is the context closed: leaving it checks that every MoE layer was routed.
                seen.add(context)
                self._kept = Kept(rollouts.responses, forward, plan.source, seen) if keeps else None
        router_scores = RouterFeatures.concat(seen.scores) if seen.scores else None
        top = TokenRows.concat(logp_top) if logp_top else None
        return TokenScores(logp_BT, entropy_BT, *concat_routes(seen), top, router_scores, squares_BT)

    def score_reference(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        """log pi_ref of every sampled token, under the weights that this engine was built with, naturally routed."""
        if self.reference is None:
            raise ValueError("score_reference: expected an engine that keeps a reference, got keep_reference=False")
        whole = rollouts.padded()
        logp_BT = self.model.norm.new_zeros(whole.is_response_BT.shape)
        with torch.no_grad(), self.reference.held():
            for chosen in self._micro_batches(len(rollouts)):
                logp = forward_pass(self.reference, whole.select(chosen), NaturalRouting(), self.numerics).logp_BT
                logp_BT[chosen[0] : chosen[-1] + 1, : logp.shape[1]] = logp
        return logp_BT

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        """One clipped AdamW step up the objective, then one predictor step if the mini-batch carries features."""
        rollouts, shift_BT, gains_BT = minibatch.rollouts, minibatch.router_shift_BT, minibatch.advantages_BT
        whole = rollouts.padded()
        # Of the whole mini-batch, so that the objectives of micro-batches add up to its objective.
        totals = objective.totals(minibatch.logp_old_BT, whole.logp_mu_BT, whole.is_response_BT)
        logp_pi_BT = torch.zeros_like(minibatch.logp_old_BT)
        seen = BatchRoutes()
        value = torch.zeros(())
        parts: list[tuple[int, dict[str, Tensor]]] = []
        self.optimizer.zero_grad(set_to_none=True)
        for chosen in self._micro_batches(len(rollouts)):
            with self._with_graph(rollouts, whole, plan, chosen) as (forward, routes):
                width = forward.logp_BT.shape[1]
                output = objective(
                    forward.logp_BT,
                    minibatch.logp_old_BT[chosen, :width],
                    forward.batch.logp_mu_BT,
                    minibatch.advantages_B[chosen],
                    forward.batch.is_response_BT,
                    logp_ref_BT=None if minibatch.logp_ref_BT is None else minibatch.logp_ref_BT[chosen, :width],
                    top=_top(forward, minibatch, chosen),
                    router_shift_BT=None if shift_BT is None else shift_BT[chosen, :width],
                    advantages_BT=None if gains_BT is None else gains_BT[chosen, :width],
                    totals=totals,
                )
                (-output.objective).backward()
            logp_pi_BT[chosen[0] : chosen[-1] + 1, :width] = forward.logp_BT.detach()
            value += output.objective.detach()
            parts.append((int(forward.batch.is_response_BT.sum()), output.metrics))
            seen.extend(routes)
        metrics = combine_metrics(parts) | {"actor/objective": value.item()}
        metrics |= self._take_step()
        _, natural, features = concat_routes(seen)
        if minibatch.features is not None and self.predictor is not None:
            assert features is not None, "a mini-batch with cached features ran without capturing pi's logits"
            # The model's rate of this step, warm-up included; the predictor's settings multiply it.
            rate = metrics["actor/lr"]
            metrics |= self.predictor.step(minibatch.features, features.logits, rate)
        return UpdateStats(metrics, logp_pi_BT, natural, features)

    def token_gradients(
        self, rollouts: Rollouts, plan: RoutingPlan, position: int
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, "B Q"]]:
        """log pi of each response's token at `position`, and its gradient in the Q trainable parameters.

        It runs the forward and backward of `update`, with one backward per response; the responses are one micro-batch.
        """
        forward, _ = self.differentiable(rollouts, plan)
        rows = [self.gradient(logp) for logp in forward.logp_BT[:, position]]
        return forward.logp_BT[:, position].detach(), torch.stack(rows)

    def gradient(self, value: Float[Tensor, ""]) -> Float[Tensor, " Q"]:
        """The gradient of a value from `differentiable` in the Q trainable parameters; its graph is kept."""
        # Without `allow_unused`: experts are stacked, so one that no token chose has a gradient of 0 and not None.
        parts = torch.autograd.grad(value, self.parameters, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts])

    def differentiable(self, rollouts: Rollouts, plan: RoutingPlan) -> tuple[Forward, ReplayContext]:
        """The forward of `update` with its graph, all responses as one micro-batch, and its closed context."""
        whole = rollouts.padded()
        with self._context(whole, plan, range(len(rollouts))) as context:
            forward = forward_pass(self.model, whole, context, self.numerics)
        return forward, context

    def named_tensors(self, folded: bool = False) -> NamedTensors:
        """The present weights under their Hugging Face names, detached; `folded` adds the predictor to the gates."""
        tensors = to_hf(self.model)
        return fold(tensors, self.predictor_weights(), self.model.config.shape().gates) if folded else tensors

    def predictor_weights(self) -> dict[int, Tensor]:
        """W_p by layer number; empty without a predictor."""
        return {} if self.predictor is None else self.predictor.weights()

    def state_tensors(self) -> dict[str, Tensor]:
        """The state from which a resumed run continues with the same bits: weights, AdamW moments, predictor."""
        # Clones, here and below: the optimiser moves weights and moments in place.
        tensors = {f"model.{name}": tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(tensor).detach().clone()
        if self.predictor is not None:
            tensors |= self.predictor.state_tensors()
        tensors["num_updates"] = torch.tensor(self.num_updates)
        return tensors

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`. Raises ValueError if the checkpoint is from another model or mode."""
        own = self.model.state_dict()
        given = _with_prefix(tensors, "model.")
        for name, tensor in own.items():
            if name not in given:
                raise ValueError(f"checkpoint does not fit the config: it has no weight {name}")
            if given[name].shape != tensor.shape:
                raise ValueError(
                    f"checkpoint does not fit the config: weight {name} is {tuple(given[name].shape)}, "
                    f"expected {tuple(tensor.shape)}"
                )
        predictor = {name: tensor for name, tensor in tensors.items() if name.startswith("predictor.")}
        if bool(predictor) != (self.predictor is not None):
            has, wants = ("a", "none") if predictor else ("no", "one")
            raise ValueError(
                f"checkpoint does not fit the config: it has {has} predictor, the replay mode needs {wants}"
            )
        self._kept = None  # its graph belongs to the weights until now
        self.model.load_state_dict(given)
        for name, parameter in zip(self.names, self.parameters, strict=True):
            state = {}  # a checkpoint from before the first update has no moments
            keys = ("step", "exp_avg", "exp_avg_sq")
            if any(f"optimizer.{key}.{name}" in tensors for key in keys):
                # Cloned: several engines may start from the same tensors (sandbox/ledger/branch.py).
                state = {key: _required(tensors, f"optimizer.{key}.{name}").clone() for key in keys}
            self.optimizer.state[parameter] = state
        if self.predictor is not None:
            self.predictor.load_state_tensors(predictor)
        self.num_updates = int(_required(tensors, "num_updates"))

    def _take_step(self) -> dict[str, float]:
        norm = self._gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.max_grad_norm, norm)
        rate = self.settings.rate_at(self.num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.take_step()
        self.num_updates += 1
        return {"actor/grad_norm": norm.item(), "actor/lr": rate}

    def _gradient_norm(self) -> Tensor:
        """The Euclidean norm of all gradients; NonFiniteError names the parameters whose own are not finite."""
        found = {n: p.grad for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(found.values()))
        # Checked before the step, so that weights stay finite, and before clipping, which would spread one NaN to all.
        if torch.isfinite(norm):
            return norm
        bad = [n for n, gradient in found.items() if not torch.isfinite(gradient).all()]
        if bad:
            raise NonFiniteError(
                f"actor/grad_norm is {norm.item()}: the gradient of {', '.join(bad[:3])} is not finite"
            )
        # From 2e19 on a norm's square is no number of float32, though the gradients are, and can be clipped.
        return torch.nn.utils.get_total_norm([gradient.double() for gradient in found.values()])

    def _micro_batches(self, B: int) -> Iterator[list[int]]:
        for start in range(0, B, self.micro_batch_size):
            yield list(range(start, min(B, start + self.micro_batch_size)))

    def _keeps(self, rollouts: Rollouts, plan: RoutingPlan) -> bool:
        """Whether the next update may train on this old pass."""
        # A pass without feature rows is Pr3's old pass, or one of pi's ahead of its update (theory/preparation.py).
        is_pass_of_pi = self.numerics is EXACT and plan.source != "predicted" and plan.feature_rows is not None
        return self.keep_old_pass and is_pass_of_pi and len(rollouts) <= self.micro_batch_size

    @contextmanager
    def _with_graph(
        self, rollouts: Rollouts, whole: TokenBatch, plan: RoutingPlan, chosen: Sequence[int]
    ) -> Iterator[tuple[Forward, BatchRoutes]]:
        """A micro-batch's pass with gradients: the kept old pass, or a new one whose context is open until backward.

        Routes are complete once it is left.
        """
        kept, self._kept = self._kept, None  # a graph serves one backward only
        if kept is not None and kept.serves(rollouts, plan):
            yield kept.forward, kept.routes
            return
        routes = BatchRoutes()
        with self._context(whole, plan, chosen) as context:
            yield forward_pass(self.model, whole.select(chosen), context, self.numerics), routes
        routes.add(context)

    def _context(self, whole: TokenBatch, plan: RoutingPlan, chosen: Sequence[int]) -> ReplayContext:
        num_rows_B = (whole.num_tokens_B[list(chosen)] - 1).tolist()
        return ReplayContext(plan.select(chosen), num_rows_B, max(num_rows_B), self.model.config.moe_layers)


def _top(forward: Forward, minibatch: MiniBatch, chosen: Sequence[int]) -> Top | None:
    """mu's likeliest tokens of a micro-batch under all policies; None if the rollouts have none."""
    pi_BTK, mu, old = forward.logp_top_BTK, forward.batch.top, minibatch.logp_old_top
    if pi_BTK is None or mu is None or old is None:
        return None
    return Top(pi_BTK, old.select(chosen).padded(), mu.logp_rows.padded(), mu.is_complete)


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _required(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"checkpoint does not fit the config: it has no tensor {name}")
    return tensors[name]
