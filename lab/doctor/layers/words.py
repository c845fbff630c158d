"""The report of `firstorder doctor --localise`: where the engines part, the first thing to check, and the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.doctor.layers.modules import FACTOR, Check
from lab.doctor.layers.pair import Jump
from lab.doctor.layers.reference import Precision
from lab.doctor.layers.routers import RoutesFound
from lab.doctor.words import plain, share
from lab.report.style import number

NORM = "Compare this norm's weight and epsilon with the folder's, and check the residual additions before it."
PARTS: Mapping[str, tuple[str, str]] = {
    "embed_tokens": (
        "the embedding",
        "Compare the embedding's rows with the folder's: padding of the vocabulary, tied weights, other tokens.",
    ),
    "input_layernorm": ("the norm before attention", NORM),
    "self_attn": (
        "attention",
        "Compare this layer's projections and its norms of queries and keys with the folder's tensors; then the "
        "rotary base, the scaling of positions, the cache's format and the mask.",
    ),
    "post_attention_layernorm": ("the norm before the MLP", NORM),
    "mlp.gate": (
        "the router",
        "Compare the router's weight and selection bias with the folder's, and check the dtype it is computed in.",
    ),
    "mlp": (
        "the MLP or its experts",
        "Compare this layer's experts with the folder's one by one: order, gate and up halves, scales of quantised "
        "experts, the routed scaling factor, the shared expert.",
    ),
    "norm": (
        "the last norm",
        "Compare its weight and epsilon with the folder's, and check the residual additions before it.",
    ),
}
"""A module's name in words and the first thing to check, by the end of its name."""
WRONG_FOLDER = (
    "Check that the folder holds the weights that ran, and that --precision is the engine's own; nearly every module "
    "differs, so no single one is at fault."
)
NOTHING = "Nothing here; check the processing of the logits: the sampler, temperature, masks."


@dataclass(frozen=True)
class Departure:
    """The place where one side leaves its reference: the verdict, the first thing to do, and the evidence."""

    label: str
    module: str | None
    """The named module; for a trace alone, the last module that it may be. None: nothing is out."""
    verdict: str
    do_first: str
    evidence: Sequence[str]
    numbers: Sequence[dict[str, Any]]

    def lines(self) -> list[str]:
        """The report as lines for a terminal."""
        return [f"{self.label}: {self.verdict}", f"Do first: {self.do_first}", *(f"  {line}" for line in self.evidence)]

    def as_object(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            "label": self.label,
            "module": self.module,
            "verdict": self.verdict,
            "do_first": self.do_first,
            "checks": plain(self.numbers),
        }


def part_of(module: str) -> tuple[str, str]:
    """The module's name in words with its layer, and the first thing to check."""
    parts = module.split(".")
    title, fix = PARTS[".".join(parts[3:]) or parts[1]]
    return (f"{title} of layer {parts[2]}" if parts[1] == "layers" else title), fix


def of_modules(label: str, checks: Sequence[Check], precision: Precision, reference: str) -> Departure:
    """The report on one engine's modules against a model."""
    out = [check for check in checks if check.is_out]
    kept = [check for check in checks if not check.is_out]
    held = f"Compared with {reference}, every module on its own recorded inputs."
    evidence = [_off(check) for check in out[:8]] + ([f"and {len(out) - 8} more"] if len(out) > 8 else [])
    if kept:
        far = max(kept, key=lambda check: check.error / check.band)
        evidence.append(
            f"{len(kept)} modules are within the band; the farthest is {far.module} at {far.error / far.band:.2g}."
        )
    numbers = [asdict(check) | {"is_out": check.is_out} for check in checks]
    evidence.append(held)
    if not out:
        return Departure(label, None, f"every module is within the band of {precision}.", NOTHING, evidence, numbers)
    title, fix = part_of(out[0].module)
    verdict = f"the first module outside the band of {precision} is {out[0].module}: {title}."
    # Norms of a fresh model are all ones and fit any folder, so they do not count.
    num_products = sum("norm" not in check.module for check in checks)
    if num_products > 3 and sum("norm" not in check.module for check in out) > 0.8 * num_products:
        verdict, fix = f"nearly every module is outside the band of {precision}, from {out[0].module} on.", WRONG_FOLDER
    return Departure(label, out[0].module, verdict, fix, evidence, numbers)


def _off(check: Check) -> str:
    return (
        f"{check.module} is off by {number(check.error)} of its output, {check.error / check.band:.3g} times the "
        f"rounding error; {share(check.share_out)} of the rows are beyond {FACTOR:g} times."
    )


def of_pair(label: str, jumps: Sequence[Jump], precision: Precision) -> Departure:
    """The report on two engines' modules against each other."""
    out = [jump for jump in jumps if jump.is_out]
    numbers = [asdict(jump) | {"is_out": jump.is_out} for jump in jumps]
    if not out:
        last = jumps[-1]
        evidence = [f"{last.module}: outputs differ by {number(last.error_out)}, inputs by {number(last.error_in)}."]
        verdict = f"no module's outputs differ more than its inputs and {precision} explain."
        return Departure(label, None, verdict, NOTHING, evidence, numbers)
    first = out[0]
    title, fix = part_of(first.module)
    verdict = f"the first module whose outputs differ more than its inputs explain is {first.module}: {title}."
    evidence = [
        f"{jump.module}: outputs differ by {number(jump.error_out)}, inputs by {number(jump.error_in)}."
        for jump in out[:8]
    ]
    evidence.append("Later modules may be out because of the first one; --model FOLDER checks each on its own.")
    return Departure(label, first.module, verdict, fix, evidence, numbers)


def of_trace(label: str, found: RoutesFound, precision: Precision, reference: str) -> Departure:
    """The report on one side of a trace against a model."""
    evidence = [
        f"layer {one.layer}: {share(one.share_differs)} of the rows take other experts ({share(one.share_expected)} by "
        f"rounding), {share(one.share_out)} beyond any margin of {precision}"
        for one in found.routers
    ]
    tokens = found.tokens
    evidence.append(
        f"log-probabilities: off by {number(tokens.error)} nats (median), {share(tokens.share_out)} of the tokens "
        f"beyond {FACTOR:g} times the rounding error ({number(tokens.band)})"
    )
    if found.unseen:
        evidence.append(f"not looked at, as no row of it is recorded: layer {', '.join(map(str, found.unseen))}")
    evidence.append(f"Compared with {reference}.")
    numbers = [asdict(one) | {"is_out": one.is_out} for one in found.routers]
    numbers.append({"tokens": asdict(tokens) | {"is_out": tokens.is_out}})
    if not found.is_out:
        what = "routes and log-probabilities" if found.routers else "log-probabilities"
        verdict = f"{what} match the model in {precision}."
        return Departure(label, None, verdict, NOTHING, evidence, numbers)
    after, to = between(found)
    verdict = f"it leaves the model in {precision} after {after} and not later than {to}."
    fix = (
        "Compare the weights between these two places with the folder's; to find the module, dump hidden states "
        "(docs/how-to/find-the-layer.md) and run --localise on them."
    )
    return Departure(label, to, verdict, fix, evidence, numbers)


def between(found: RoutesFound) -> tuple[str, str]:
    """The last place that is right, and the first one that shows the fault."""
    right = [one.layer for one in found.routers if found.first is None or one.layer < found.first.layer]
    after = f"the router of layer {right[-1]}" if right else "the tokens"
    if found.first is not None:
        return after, f"the router of layer {found.first.layer}"
    return after, "the logits"
