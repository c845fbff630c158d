"""The arms that claims share. Two claims with the same arm share its runs."""

from __future__ import annotations

from dataclasses import replace

from sandbox.ledger.claim import Arm, OnMap

NO_CLIP = (("algorithm.objective.eps_low", "1.0"), ("algorithm.objective.eps_high", "1e9"))
"""A trust region that never binds: ratios from 0 to 10^9."""

CLIP_HIGHER = (("algorithm.objective.eps_high", "0.27"),)
"""The upper clip of GRPO in R3 (arXiv 2510.11370) sec. 5.1; Pr2 (arXiv 2606.00395) App. E has 0.28."""

TIS = ("algorithm.objective.correction", "{name: token_tis, cap: 2.0}")
"""Truncated importance sampling with the cap of R3 (arXiv 2510.11370) sec. 5.1."""

COLLAPSES = {"hot": 14}
"""Seeds per regime in which runs collapse, for claims about collapses. No collapse in any of them decides nothing: 14
seeds miss what happens to one seed in ten with a probability of 0.23."""

COLLAPSES_AND_NOISY = COLLAPSES | {"noisy": 14}
"""The same for claims that are also tried in `noisy`."""

AND_NOISY = ("paper", "stress", "hot", "noisy")
"""The regimes of claims about training on-policy and under GRPO, with `noisy`, where rewards have errors."""

SEEN_IN_NOISY = "One run of minirl-N1, minirl_no_is-N1 and minirl-R3-N1 was seen, with other errors, before."

SEEDS_OF_SMALL_SPREAD = 14
"""Seeds of claims whose measure varies little between seeds compared with its margin: five had been seen, which leaned
to a side or just missed Holm's level; a claim about final accuracy would need some sixty."""

SHORT = (("num_steps", "40"), ("evaluation.every", "40"), ("traces.every", "40"), ("checkpoint.every", "40"))
DENSE = (("model.num_experts", "0"),)

MAPS = {"minirl": "MiniRL", "minirl_no_is": "MiniRL without the weight", "grpo": "GRPO"}
"""Presets with a phase diagram over engine gap, replay mode and off-policiness, and its title."""


def arm(
    preset: str, replay: str = "none", n: int = 1, *, name: str = "", changes: tuple[tuple[str, str], ...] = ()
) -> Arm:
    """A preset under a replay mode with N mini-batches; `name` describes `changes`."""
    words = [preset, *([name] if name else []), *([replay] if replay != "none" else []), f"N{n}"]
    own = (("algorithm.objective.preset", preset), ("algorithm.replay.mode", replay))
    on_map = OnMap(MAPS[preset], replay) if preset in MAPS and not name and not changes else None
    return Arm("-".join(words), own + (CLIP_HIGHER if preset == "grpo" else ()) + changes, n, on_map=on_map)


def short(preset: str, replay: str = "none", *, name: str, changes: tuple[tuple[str, str], ...]) -> Arm:
    """The first 40 updates of an arm, from each seed's own cold start: enough for claims about a model's engine gap."""
    made = arm(preset, replay, name=f"{name}-short", changes=changes + SHORT)
    return replace(made, own_cold_start=True)


def without_clipping(preset: str, replay: str = "none", n: int = 1) -> Arm:
    """An arm with a trust region that never binds; MiniRL's has its own phase diagram."""
    on_map = OnMap("MiniRL without clipping", replay) if preset == "minirl" else None
    return replace(arm(preset, replay, n, name="noclip", changes=NO_CLIP), on_map=on_map)


def dense(preset: str, n: int = 1) -> Arm:
    """The dense twin of an arm: each MoE layer becomes an MLP as wide as the experts that a token uses."""
    return arm(preset, n=n, name="dense", changes=DENSE)
