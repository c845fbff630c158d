"""The arms of the border study: an engine gap, a remedy and N; every seed has its own initial model.

Claims 36 to 49 and the map share them, so that nothing is run twice. docs/decisions/0008 is the study's design.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sandbox.claims.arms import TIS, arm
from sandbox.ledger.cells import MAX_GRAD_NORM
from sandbox.ledger.claim import FRESH, Arm, Claim, OnMap, Prediction
from sandbox.ledger.course import COLLAPSED

BorderClaim = partial(
    Claim,
    home="border",
    regimes=("border",),
    first_seed=FRESH,
    shown=("eval/accuracy", "rollout_corr/k3_kl", "actor/entropy"),
)
"""A claim of the border study: tried in its regime alone, on fresh seeds."""

_FP8 = "{kind: weight_precision}, {kind: activation_precision}"

GAPS: dict[str, str | None] = {
    "exact": "[]",
    "r0": f"[{_FP8}]",
    "r0.1": f"[{_FP8}, {{kind: router_noise, std: 0.1}}]",
    "r0.2": f"[{_FP8}, {{kind: router_noise, std: 0.2}}]",
    "r0.3": f"[{_FP8}, {{kind: router_noise, std: 0.3}}]",
    "r0.5": None,
    "r1.0": f"[{_FP8}, {{kind: router_noise, std: 1.0}}]",
    "logits1.1": f"[{_FP8}, {{kind: logit_noise, std: 1.1}}]",
    "logits1.6": f"[{_FP8}, {{kind: logit_noise, std: 1.6}}]",
    "int4": "[{kind: weight_precision, format: int4, scale: block, block_size: 16}, {kind: activation_precision}]",
    "stale": "[{kind: stale_weights, versions: 1}]",
}
"""Engines: FP8 with router noise of 0 to 1 (None: the regime's own), and controls that leave the routers unchanged or
do not redraw their error. KL before training on three models: r0.3 0.127, logits1.1 and int4 near it (0.13); r0.5
0.307, logits1.6 0.311. stale: exact numerics at the weights of the previous rollout, without a KL before training."""

ROUTER_GAPS = ("exact", "r0", "r0.1", "r0.2", "r0.3", "r0.5")
GAP_WORDS = {"exact": "exact", "r0": "FP8"} | {f"r{x}": f"FP8, noise {x}" for x in ("0.1", "0.2", "0.3", "0.5")}
DEGREES = (1, 2, 4, 8, 16)

REMEDIES: dict[str, tuple[str, bool]] = {
    "none": ("none", False), "tis": ("none", True), "R2": ("R2", False), "R3": ("R3", False),
    "tis-R3": ("R3", True), "Pr2": ("Pr2", False), "Pr3": ("Pr3", False),
}  # fmt: skip
"""Replay mode, and whether tokens are weighted by old/mu, truncated at 2."""

REMEDY_WORDS = {
    "none": "no remedy", "tis": "token TIS", "R2": "R2", "R3": "R3", "tis-R3": "TIS and R3", "Pr2": "Pr2", "Pr3": "Pr3",
}  # fmt: skip

NORMS = {"grpo": "1.0", "gspo": "0.7", "minirl": "7.0", "minirl_no_is": "7.0", "minirl_lengthnorm": "0.5"}
"""Gradient clipping at three times each preset's median norm in an exact engine's run (seed 20)."""


def at(gap: str, remedy: str, n: int, preset: str = "grpo") -> Arm:
    """The arm of a preset under an engine gap with a remedy and N mini-batches per global step."""
    replay, is_weighted = REMEDIES[remedy]
    engine, norm = GAPS[gap], NORMS[preset]
    changes = () if engine is None else (("engine.defects", engine),)
    # GRPO's clipping is that of the regime's file (configs/claims/border.yaml), so its arms need not state it.
    changes += () if norm == "1.0" else ((MAX_GRAD_NORM, norm),)
    changes += (TIS,) if is_weighted else ()
    words = [gap, *(["tis"] if is_weighted else [])]
    return replace(arm(preset, replay, n, name="-".join(words), changes=changes), own_cold_start=True)


def most_collapse(words: str, treatment: Arm, planned: float | None = None) -> Prediction:
    """The prediction that more than half of the arm's runs collapse; `words` name the arm."""
    words = f"{words}: more than half of the runs collapse"
    return Prediction(words, treatment, control=0.5, measure=COLLAPSED, expected="more", planned=planned)


def slower(arm: Arm) -> Arm:
    """The arm at half the study's learning rate."""
    changes = (*arm.changes, ("algorithm.optimizer.learning_rate", "1e-3"))
    return replace(arm, name=f"{arm.name}-slower", changes=changes)


def longer(arm: Arm, updates: int) -> Arm:
    """The arm over so many updates, a multiple of N; the study's own runs make 400."""
    return replace(arm, name=f"{arm.name}-U{updates}", changes=(*arm.changes, ("num_steps", str(updates))))


def with_free_norm(arm: Arm) -> Arm:
    """The arm without gradient clipping: its threshold lies above every norm that a run has had."""
    changes = (*(one for one in arm.changes if one[0] != MAX_GRAD_NORM), (MAX_GRAD_NORM, "1e9"))
    return replace(arm, name=f"{arm.name}-free_norm", changes=changes)


def with_dual_clip(arm: Arm) -> Arm:
    """GRPO's arm with a second clip, at 3 (arXiv 1912.09729): a token whose advantage is negative has no gradient where
    pi/old is above it."""
    changes = dict(arm.changes)
    assert changes["algorithm.objective.preset"] == "grpo", arm.name
    # The preset differs from GRPO also in its advantage and its aggregation, so GRPO's are stated.
    changes |= {
        "algorithm.objective.preset": "ppo_dual_clip",
        "algorithm.objective.advantage": "group_norm",
        "algorithm.objective.aggregation": "length_norm",
    }
    return replace(arm, name=f"{arm.name}-dual_clip", changes=tuple(changes.items()))


def of_batch(arm: Arm, num_responses: int) -> Arm:
    """The arm with so many responses per update, a multiple of the 8 per prompt; the study's own number is 64."""
    changes = (*arm.changes, ("algorithm.batch.num_prompts", str(num_responses // 8)))
    return replace(arm, name=f"{arm.name}-B{num_responses}", changes=changes)


SUM_NORMS = {2: "1.6", 6: "0.9"}
"""Gradient clipping by number of digits: three times GRPO's median norm in an exact engine's run (seed 20)."""


def sums(digits: int, gap: str, remedy: str = "none", n: int = 8) -> Arm:
    """The arm of GRPO on sums of two numbers instead of Countdown, worked out by columns, at a quarter of the rate.

    A response has 10 tokens per digit and a few more: 22 for 2 digits, 61 for 6. At the study's own rate even an exact
    engine's runs collapse.
    """
    changes = (
        ("task", f"{{kind: arithmetic, min_digits: {digits}, max_digits: {digits}, num_held_out: 64}}"),
        ("cold_start.teacher", "columns"),
        ("algorithm.sampling.max_tokens", str(12 * digits + 4)),
        ("algorithm.optimizer.learning_rate", "5e-4"),
        (MAX_GRAD_NORM, SUM_NORMS[digits]),
    )
    base = at(gap, remedy, n)
    return replace(base, name=f"{base.name}-sums{digits}", changes=(*base.changes, *changes))


SUMS: tuple[tuple[int, str, str], ...] = (
    (2, "exact", "none"), (2, "r0.5", "none"), (6, "exact", "none"), (6, "r0.1", "none"), (6, "r0.2", "none"),
    (6, "r0.2", "tis"), (6, "r0.2", "R3"),
)  # fmt: skip
"""The places on sums that have runs, all at N = 8: digits, gap and remedy."""


def remedies_at(gap: str, n: int) -> tuple[str, ...]:
    """The remedies that differ there: with one mini-batch R2 and Pr2 equal no remedy and Pr3 is R3; an exact engine has
    no gap to weigh, and R3 is R2 under it."""
    if gap == "exact":
        return ("none",) if n == 1 else ("none", "R2", "Pr2")
    return ("none", "tis", "R3", "tis-R3") if n == 1 else tuple(REMEDIES)


_ORDER = ("none", "R3", "tis", "tis-R3", "R2", "Pr3", "Pr2")


def _on_map(gap: str, remedy: str, n: int) -> Arm:
    title = f"GRPO, {REMEDY_WORDS[remedy]}"
    return replace(at(gap, remedy, n), on_map=OnMap(title, GAP_WORDS[gap], "border", ROUTER_GAPS.index(gap)))


MAP: tuple[Arm, ...] = tuple(
    _on_map(gap, remedy, n)
    for gaps in (tuple(gap for gap in ROUTER_GAPS if gap != "r0"), ("r0",))
    for remedy in _ORDER
    for gap in gaps
    for n in DEGREES
    if remedy in remedies_at(gap, n)
)
"""All arms of the phase diagram, in the order of the queue: whole panels, and FP8 without router noise last."""

DEMO: dict[str, Arm] = {
    "exact": at("exact", "none", 8), "none": at("r0.5", "none", 8), "r2": at("r0.5", "R2", 8),
    "tis": at("r0.5", "tis", 8), "r3": at("r0.5", "R3", 8), "minirl": at("r0.5", "none", 8, "minirl"),
}  # fmt: skip
"""The runs of `make demo`, here with an initial model per seed."""
