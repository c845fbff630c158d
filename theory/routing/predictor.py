"""The evolution predictor: one linear map W_p per router that anticipates how its logits will move.

It biases the choice of experts in the pass that records the route, learns from the logits that later passes see on the
same rows, and never receives or sends a gradient through the model.

Letters beyond theory/contracts.py: F feature rows. Paper: Pr2 (arXiv 2606.00395) sec. 4, App. D, E and G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from theory.divergences import kl_of_terms
from theory.fields import About, require_ranges
from theory.routing.features import RouterFeatures, layer_products


@dataclass(frozen=True)
class PredictorSettings:
    """The predictor's training: its learning rate over the model's, its loss, and feature rows per response.

    The paper's multipliers are 5e1 to 1e4 on learning rates from 2.5e-7 to 2e-6 (App. E.1), for Pr3 1e1 and 1e2
    (App. F); it has no default. Ours is that of Qwen3-30B at N = 8, which it trains at our default rate (1e3 on 1e-6):
    the predictor's own rate is then 1e-3; the paper's are 1e-5 to 2e-2. num_positions is its T_c.
    """

    learning_rate_multiplier: Annotated[
        float,
        About(
            "its learning rate over the model's; null: 1e-3 over optimizer.learning_rate (Pr2 App. E.1: 5e1 to 1e4 on "
            "2.5e-7 to 2e-6)",
            gt=0,
        ),
    ] = 1e3
    loss: Annotated[
        Literal["kl", "delta"],
        About("kl: the predicted distribution (Pr2 Eq. 8); delta: the change of logits (App. G)"),
    ] = "kl"
    num_positions: Annotated[
        int,
        About(
            "T_c: rows per response whose router features are kept (Pr2 App. E.1); where only metrics read them, at "
            "most 65,536 of a batch",
            ge=1,
        ),
    ] = 2048

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.loss not in LOSSES:
            raise ValueError(f"expected loss to be one of {list(LOSSES)}, got {self.loss!r}")


def predictive_logits(
    logits_old: Float[Tensor, "N E"], hidden_old: Float[Tensor, "N D"], W_p: Float[Tensor, "D E"]
) -> Float[Tensor, "N E"]:
    """p_old + h_old W_p, the logits of the predictive distribution (Pr2 Eq. 4); 16-bit logits widen to float32."""
    # Widened before the sum: in 16 bits a bias below the spacing of the logits would be lost.
    wide = torch.promote_types(logits_old.dtype, torch.float32)
    return logits_old.to(wide) + hidden_old.to(wide) @ W_p.to(hidden_old.device, wide)


LOSSES = ("delta", "kl")


def loss_and_gradients(
    loss: Literal["kl", "delta"],
    logits_pi_FLE: Float[Tensor, "F L E"],
    features: RouterFeatures,
    predictor: Mapping[int, Float[Tensor, "D E"]],
    weight_F: Float[Tensor, " F"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, "L D E"]]:
    """The loss, nats, at least 0, and its gradient by each layer's W_p.

        kl:     L_Pr2 = sum_l mean_t KL(softmax(p_pi) || softmax(p_old + h_old W_p))    (Pr2 Eq. 8)
        delta:  sum_l mean_t KL(softmax(p_pi - p_old) || softmax(h_old W_p))            (Pr2 App. G)

    Both are convex in W_p, with one minimiser where the drift of the logits is linear in h_old. W_p enters the guess
    alone, linearly, so that dL/dW_l = mean_t h_t (softmax(guess_t) - softmax(target_t)) for both. Differentiated, the
    loss reaches W_p alone: the logits of pi are the teacher, and the features are data. The value is in float64, from
    logits in W_p's type. `weight_F` sums to 1 and makes the mean over rows an expectation.
    Raises ValueError where rows or layers differ, where a layer has no W_p, and where there are no rows.
    """
    hidden_FLD, target_FLE, guess_FLE = _target_and_guess(loss, logits_pi_FLE, features, predictor)
    residual_FLE = guess_FLE.log_softmax(dim=-1).exp() - target_FLE.log_softmax(dim=-1).exp()
    residual_FLE = residual_FLE / len(features.rows) if weight_F is None else residual_FLE * weight_F[:, None, None]
    # (r^T h)^T takes half the time of h^T r. Contiguous, as the fused AdamW reads memory without regard to strides.
    gradient_LED = torch.bmm(residual_FLE.permute(1, 2, 0), hidden_FLD.transpose(0, 1))
    return _kl(target_FLE, guess_FLE, weight_F), gradient_LED.transpose(1, 2).contiguous()


def _target_and_guess(
    loss: str, logits_pi_FLE: Tensor, features: RouterFeatures, predictor: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The routers' inputs, and the logits of target and guess, all in W_p's type."""
    if logits_pi_FLE.shape != features.logits.shape:
        raise ValueError(f"expected logits of shape {tuple(features.logits.shape)}, got {tuple(logits_pi_FLE.shape)}")
    if features.hidden is None:
        raise ValueError("expected features with the router's input (hidden), got logits alone")
    if len(features.rows) == 0:
        raise ValueError("expected at least 1 feature row, got 0")
    # Not a subset either: a predictor without features would silently never learn.
    if set(predictor) != set(features.layer_numbers):
        raise ValueError(f"expected a predictor for layers {list(features.layer_numbers)}, got {sorted(predictor)}")
    W_LDE = torch.stack([predictor[number] for number in features.layer_numbers])
    pi, old, hidden = (x.detach().to(W_LDE) for x in (logits_pi_FLE, features.logits, features.hidden))
    bias = layer_products(hidden, W_LDE)
    return (hidden, pi, old + bias) if loss == "kl" else (hidden, pi - old, bias)


def _kl(target_FLE: Tensor, guess_FLE: Tensor, weight_F: Tensor | None = None) -> Tensor:
    """Sum over layers of the mean over rows of KL(target || guess), or of the weighted sum over rows."""
    # In float64, as float32's rounding is as large as the KL of two close routers; a layer at a time, for the memory.
    layers = zip(target_FLE.unbind(1), guess_FLE.unbind(1), strict=True)
    each_FL = torch.stack([kl_of_terms(p_FE.double(), q_FE.double()) for p_FE, q_FE in layers], dim=1)
    return each_FL.mean(dim=0).sum() if weight_F is None else (weight_F.to(each_FL) @ each_FL).sum()


def fold(
    named_tensors: Iterable[tuple[str, Tensor]],
    predictor: Mapping[int, Float[Tensor, "D E"]],
    gates: Mapping[int, str],
) -> Iterator[tuple[str, Tensor]]:
    """The named tensors with each predicted layer's gate weight (E, D) replaced by W + W_p^T; `gates` are their names.

    Since h W + h W_p = h (W + W_p), an engine with these weights routes by the predictive distribution and weighs by
    it (Pr2 Eq. 4-6, App. C.2), with no change to the model. The sum is taken in W_p's type and returned in the gate's.
    Raises ValueError for a gate of another shape, and, once exhausted, for a layer whose gate never came.
    """
    waiting = {gates[number]: number for number in predictor}
    for name, tensor in named_tensors:
        if name not in waiting:
            yield name, tensor
            continue
        # Popped, so that the names left at the end are the gates that never came.
        bias = predictor[waiting.pop(name)].detach().T
        if tensor.shape != bias.shape:
            raise ValueError(f"{name}: expected a gate of shape {tuple(bias.shape)}, got {tuple(tensor.shape)}")
        # A new tensor: the trainer's own gate stays W.
        yield name, (tensor.detach().to(bias) + bias).to(tensor)
    if waiting:
        raise ValueError(f"expected a gate weight for each predicted layer, got none named {sorted(waiting)}")


BLOCK_BYTES = 2**30
"""Bytes of the routers' inputs, in W_p's type, that a step has at a time: a mini-batch of a 30B model has many times as
many."""


def block_rows(layers: int, width: int, element_bytes: int = 4) -> int:
    """Feature rows of a block, at least 1: at most BLOCK_BYTES of inputs of this width in as many layers."""
    return max(1, BLOCK_BYTES // (layers * width * element_bytes))


def _in_blocks(
    features: RouterFeatures, logits_pi_FLE: Tensor, weight_F: Tensor | None, size: int
) -> Iterator[tuple[Tensor, RouterFeatures, Tensor | None, float]]:
    """The logits of pi, the features and the weights of `size` rows at a time, and the block's share of the mean."""
    num = len(features.rows)
    if num <= size:
        yield logits_pi_FLE, features, weight_F, 1.0
        return
    hidden, logits, numbers = features.hidden, features.logits, features.layer_numbers
    for start in range(0, num, size):
        own = slice(start, min(num, start + size))
        count = own.stop - start
        # As the rows of one response: whose they are makes no difference here.
        offsets = torch.tensor([0, count])
        inputs = None if hidden is None else hidden[own]
        some = RouterFeatures(features.rows[own], offsets, inputs, logits[own], numbers)
        weight = None if weight_F is None else weight_F[own]
        yield logits_pi_FLE[own], some, weight, count / num if weight is None else 1.0


def learns(minibatch_index: int) -> bool:
    """Whether the predictor learns on this mini-batch (from 0): not on the first, where pi is old (Pr2 Alg. 3)."""
    return minibatch_index >= 1


class PredictorTrainer:
    """The predictors of all layers, zero at the start, and their AdamW (no weight decay).

    A step minimises the settings' loss at learning rate `lr * learning_rate_multiplier`.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        model_width: int,
        num_experts: int,
        settings: PredictorSettings,
        betas: tuple[float, float] = (0.9, 0.999),
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings = settings
        self.parameters = {
            number: torch.nn.Parameter(torch.zeros(model_width, num_experts, dtype=dtype, device=device))
            # Sorted, as `reduce` pairs the gradients of two ranks by their order.
            for number in sorted(layer_numbers)
        }
        if not self.parameters:
            raise ValueError("expected at least one MoE layer to predict, got none")
        # The rate is set before every step.
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=0.0, betas=betas, weight_decay=0.0, fused=True
        )

    def step(
        self,
        features_old: RouterFeatures,
        logits_pi_FLE: Float[Tensor, "F L E"],
        lr: float,
        reduce: Callable[[Sequence[Tensor]], None] | None = None,
        weight_F: Float[Tensor, " F"] | None = None,
    ) -> dict[str, float]:
        """One AdamW step; `reduce` averages the gradients in place over data-parallel ranks before it.

        `weight_F` weighs the rows, where they are not drawn but listed with their probabilities.
        Returns predictor/loss (nats, before the step, on this rank's rows) and predictor/weight_norm (Frobenius norm
        over all layers, after it).
        """
        parameters = list(self.parameters.values())
        # The gradient by formula: on a few thousand rows a backward pass would cost as much as the loss again.
        with torch.no_grad():
            loss, gradient_LDE = self._loss_and_gradients(logits_pi_FLE, features_old, weight_F)
        for number, gradient_DE in zip(features_old.layer_numbers, gradient_LDE, strict=True):
            self.parameters[number].grad = gradient_DE
        # Every parameter has a gradient by now (`_target_and_guess`), so that all ranks reduce the same tensors.
        if reduce is not None:
            reduce([parameter.grad for parameter in parameters if parameter.grad is not None])
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.settings.learning_rate_multiplier
        self.optimizer.step()
        # To None: the gradients are views of one tensor, which is freed with the last of them.
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            weight_norm = torch.stack([*parameters]).double().square().sum().sqrt()
        return {"predictor/loss": loss.item(), "predictor/weight_norm": weight_norm.item()}

    def _loss_and_gradients(
        self, logits_pi_FLE: Tensor, features: RouterFeatures, weight_F: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As the function of that name, a block of rows at a time: the sums of the blocks' losses and gradients."""
        if logits_pi_FLE.shape != features.logits.shape:  # here, as two blocks may have the same shapes
            raise ValueError(
                f"expected logits of shape {tuple(features.logits.shape)}, got {tuple(logits_pi_FLE.shape)}"
            )
        W_DE = next(iter(self.parameters.values()))
        size = block_rows(len(features.layer_numbers), len(W_DE), W_DE.element_size())
        found: tuple[Tensor, Tensor] | None = None
        for logits, some, weight, share in _in_blocks(features, logits_pi_FLE, weight_F, size):
            loss, gradient_LDE = loss_and_gradients(self.settings.loss, logits, some, self.parameters, weight)
            if found is None:  # a share of 1, that of a block alone, changes no bit
                found = loss * share, gradient_LDE.mul_(share)
            else:
                found = found[0] + loss * share, found[1].add_(gradient_LDE, alpha=share)
        assert found is not None, "there is a block even of no rows, which is refused"
        return found

    def weights(self) -> dict[int, Float[Tensor, "D E"]]:
        """W_p by layer number, copied: later steps do not change them."""
        return {number: parameter.detach().clone() for number, parameter in self.parameters.items()}

    def state_tensors(self) -> dict[str, Tensor]:
        """Weights and optimiser state as named tensors; loading them resumes to the same bits."""
        state = {}
        for number, parameter in self.parameters.items():
            state[f"predictor.{number}.weight"] = parameter.detach().clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                state[f"predictor.{number}.{key}"] = value.detach().clone()
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; raises ValueError where names or shapes differ from this trainer's."""
        # AdamW has no state before its first step.
        has_stepped = any(name.endswith(".exp_avg") for name in state)
        keys = ("weight", "step", "exp_avg", "exp_avg_sq") if has_stepped else ("weight",)
        expected = {f"predictor.{number}.{key}" for number in self.parameters for key in keys}
        if set(state) != expected:
            raise ValueError(f"expected tensors {sorted(expected)}, got {sorted(state)}")
        for number, parameter in self.parameters.items():
            for key in keys:
                name = f"predictor.{number}.{key}"
                if key != "step" and state[name].shape != parameter.shape:
                    raise ValueError(f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(state[name].shape)}")
        # Copied only once all is checked: a wrong state changes nothing.
        for number, parameter in self.parameters.items():
            # Cloned, as AdamW updates its moments in place and `.to` below may copy nothing.
            mine = {key: state[f"predictor.{number}.{key}"].clone() for key in keys}
            with torch.no_grad():
                parameter.copy_(mine.pop("weight"))
            # A state from before the first step has no moments: this trainer's own must go.
            self.optimizer.state.pop(parameter, None)
            if mine:
                step = mine.pop("step").to(parameter.device)  # a fused optimiser counts on the device
                moments = {key: value.to(parameter) for key, value in mine.items()}
                self.optimizer.state[parameter] = {"step": step, **moments}
