"""The parts of a claim: a paper's finding, the predictions written before the runs, and the runs that decide it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sandbox.ledger.exact import Link
from sandbox.ledger.statistics import Expected

FRESH = 104
"""The first seed that decides: those below were seen when the statistics and the border study were designed
(docs/decisions/0007 and 0008)."""

Row = Mapping[str, Any]
"""One finished cell, as in results/claims/cells.jsonl (see `cells.py`)."""


@dataclass(frozen=True)
class OnMap:
    """An arm's place in a phase diagram: the diagram's title and the row; N is its column.

    The row is a replay mode, of which a diagram over regimes has a line for each of them. A diagram of one `regime` has
    a row per engine instead, in the order of `place`.
    """

    title: str
    row: str
    regime: str = ""
    place: int = 0


@dataclass(frozen=True)
class Arm:
    """A way to train: its changes to its regime's config, as dotted keys and YAML values, and N.

    A regime's config is on-policy: `num_steps` updates on mini-batches of `num_prompts` prompts. With N mini-batches a
    global step has N times the prompts and there are 1/N as many steps, so that arms of all N take the same number of
    updates on mini-batches of one size, as in MiniRL (arXiv 2512.01374) sec. 4.4.
    """

    name: str
    changes: tuple[tuple[str, str], ...] = ()
    num_minibatches: int = 1
    made_by: Literal["training", "engine_fit", "branch"] = "training"
    """The source of its rows: a training run, an engine fitted to a real one (`engine_fit.py`), or a branch of another
    arm's run (`branch.py`)."""
    own_cold_start: bool = False
    """Whether each seed has its own initial model, as a claim about models needs; else all share one."""
    start: Arm | None = None
    """The arm from whose run a branch starts; None for other rows."""
    on_map: OnMap | None = field(default=None, compare=False)
    """Its place in the phase diagrams, if any; not part of its identity."""

    def __post_init__(self) -> None:
        if (self.made_by == "branch") != (self.start is not None):
            got = "none" if self.start is None else self.start.name
            raise ValueError(f"start: expected an arm for a branch and none for others, got {got} ({self.made_by})")
        if self.num_minibatches < 1:
            raise ValueError(f"num_minibatches: expected at least 1, got {self.num_minibatches}")


@dataclass(frozen=True)
class Measure:
    """One number of a finished cell: `of(row)` in `unit`, described by `words`; nan if the row has no such data."""

    name: str
    words: str
    unit: str
    of: Callable[[Row], float]
    same: tuple[str, ...] = ()
    """Fields in which both rows of a pair must agree, or the pair counts as missing: a time needs one machine."""
    kind: Literal["number", "event", "time"] = "number"
    """The kind of measure: a number that varies between seeds, 1 or 0 for an event, or the share of a run before an
    event (1 without it). It determines how an effect is tested (contrasts.py, events.py)."""
    spacing: Callable[[Row], float] | None = None
    """For a time that is known only at some moments of a run, the share of it between them; nan if the row lacks it."""


@dataclass(frozen=True)
class Prediction:
    """One comparison, written before the run: effect = mean over seeds of f(treatment) - f(control).

    A side may have several arms: its value for a seed is the mean of the measure over them, so that (a, d) against
    (b, c) is half of the interaction (a - b) - (c - d).

    f is the measure on the scale `difference`; its logarithm on `ratio`; on `spread`, |measure - the arm's median over
    seeds| (Brown and Forsythe). On `ratio_of_means` the effect is log(mean treatment / mean control), by Fieller's
    method, for measures that may be 0 in a seed. Effects on the two ratios are shown as factors, and their margin is a
    factor >= 1. `control` may be a number: the effect is then f(treatment) - f(number). The prediction holds if the
    effect is as `expected`, beyond (or within) `margin`, the smallest effect that counts; 0
    asks for the sign alone.
    """

    words: str
    treatment: Arm | tuple[Arm, ...]
    control: Arm | tuple[Arm, ...] | float
    measure: Measure
    expected: Expected
    margin: float = 0.0
    scale: Literal["difference", "ratio", "ratio_of_means", "spread"] = "difference"
    planned: float | None = None
    """The true effect, or factor, for which its seeds are planned; None: see power.py."""
    premise: Arm | None = None
    """An arm that must have collapsed with at least one seed, or the prediction is not applicable."""

    def __post_init__(self) -> None:
        if self.measure.kind != "number" and self.scale != "difference":
            raise ValueError(f"scale: expected difference for {self.measure.name}, got {self.scale}")
        if self.is_factor and self.margin < 1.0:
            raise ValueError(f"margin: expected a factor of at least 1 on the scale {self.scale}, got {self.margin}")
        if self.planned is not None and not self._holds(self.planned):
            wanted = f"an effect at which the prediction holds, with its margin of {self.margin:g}"
            raise ValueError(f"planned: expected {wanted}, got {self.planned:g} ({self.expected})")

    def _holds(self, effect: float) -> bool:
        low, high = 1.0 / self.margin if self.is_factor else -self.margin, self.margin
        return {"more": effect > high, "less": effect < low, "at_most": effect < high, "same": low < effect < high}[
            self.expected
        ]

    @property
    def is_factor(self) -> bool:
        """Whether its effect is the logarithm of a factor."""
        return self.scale in ("ratio", "ratio_of_means")

    @property
    def sides(self) -> tuple[tuple[Arm, ...], tuple[Arm, ...]]:
        """The arms of the treatment and of the control; no arm if the control is a number."""
        return _arms_of(self.treatment), _arms_of(self.control)

    @property
    def side_names(self) -> tuple[str, str]:
        """The names of the arms on either side, or the number."""
        left, right = (", ".join(arm.name for arm in side) for side in self.sides)
        return left, right or f"{self.control:g}"

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms whose cells it needs."""
        return tuple(dict.fromkeys((*self.sides[0], *self.sides[1], *_arms_of(self.premise))))


def _arms_of(side: Arm | tuple[Arm, ...] | float | None) -> tuple[Arm, ...]:
    return (side,) if isinstance(side, Arm) else side if isinstance(side, tuple) else ()


@dataclass(frozen=True)
class Claim:
    """A finding and its predictions. It is reproduced if all of them hold."""

    number: int
    name: str
    sentence: str
    source: str
    predictions: tuple[Prediction, ...]
    home: str
    """The regime that decides it, on seeds from FRESH on; all others are exploratory."""
    fresh_seeds: int = 0
    """Number of deciding seeds at home, from `fresh_from` on, as power.py recommends; 0: none."""
    fresh_from: int = FRESH
    """The first of those seeds; larger than FRESH where other claims had used its arms on earlier ones."""
    num_seeds: int = 5
    """Seeds of each of its cells in `regimes`: first_seed to first_seed + num_seeds - 1."""
    first_seed: int = 0
    """The first of those: FRESH or larger for claims that were stated after looking at runs of smaller seeds."""
    seeds_in: Mapping[str, int] = field(default_factory=dict)
    """Number of seeds in regimes that have more than `num_seeds`: those in which runs collapse."""
    regimes: tuple[str, ...] = ("paper", "stress", "hot")
    """The regimes in which it was tried on those seeds."""
    shown: tuple[str, ...] = ("reward/mean", "rollout_corr/k3_kl", "actor/entropy")
    """The metrics that its figures draw over the updates, one line per arm."""
    also: tuple[Arm, ...] = ()
    """Arms that are run for its figures only, without a prediction."""
    also_seeds: int = 0
    """Seeds of those; 0: `num_seeds`."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Remarks on its outcome by regime: what was tried, the likely reason; never the outcome itself."""
    exact: tuple[Link, ...] = ()
    """Questions of exact training that bear on it; none if it is not about an expectation, or none was asked."""
    repeats: int | None = None
    """The number of the inconclusive claim whose predictions it tries again on later seeds; None for a first trial."""
    planned: Mapping[int, float] = field(default_factory=dict)
    """The effects for which its seeds are planned, by the place of the prediction, instead of the predictions' own: a
    second trial is planned at what the first one found. Only its power reads them (`as_planned`)."""

    def __post_init__(self) -> None:
        if not self.predictions:
            raise ValueError(f"claim {self.number}: expected at least one prediction, got none")
        for regime, number in self.seeds_in.items():
            if regime not in self.regimes or number <= self.num_seeds:
                wanted = f"one of {', '.join(self.regimes)} with more than {self.num_seeds} seeds"
                raise ValueError(f"claim {self.number}: seeds_in: expected {wanted}, got {regime}: {number}")
        if self.first_seed >= FRESH and (self.fresh_seeds or self.regimes != (self.home,)):
            raise ValueError(f"claim {self.number}: home: expected a claim on fresh seeds to be tried there alone")
        if self.fresh_from < FRESH:
            raise ValueError(f"claim {self.number}: fresh_from: expected at least {FRESH}, got {self.fresh_from}")
        for place in self.planned:
            if not 0 <= place < len(self.predictions):
                wanted = f"a place below {len(self.predictions)}"
                raise ValueError(f"claim {self.number}: planned: expected {wanted}, got {place}")
        _ = self.as_planned  # refuses an effect within its margin

    def again(self, number: int, first_seed: int, num_seeds: int, planned: Mapping[int, float] | None = None) -> Claim:
        """A second trial: the same predictions and remarks at home alone, on seeds that no claim has used; `planned`
        has the effects for which it is planned, by place."""
        # All of its seeds are fresh: `deciding` then reads `first_seed` and `num_seeds`, and not `fresh_seeds`.
        return replace(
            self, number=number, name=f"{self.name}_again", repeats=self.number, regimes=(self.home,), seeds_in={},
            first_seed=first_seed, num_seeds=num_seeds, fresh_seeds=0, fresh_from=FRESH, also=(), also_seeds=0,
            planned=planned or {},
        )  # fmt: skip

    @property
    def as_planned(self) -> tuple[Prediction, ...]:
        """Its predictions with the effects for which its seeds are planned; `predictions` are what is tested."""
        return tuple(
            replace(one, planned=self.planned[place]) if place in self.planned else one
            for place, one in enumerate(self.predictions)
        )

    @property
    def places(self) -> tuple[str, ...]:
        """Its home, then the other regimes in which it was tried."""
        return tuple(dict.fromkeys((self.home, *self.regimes)))

    def deciding(self, asked: int | None = None) -> range:
        """The seeds that decide it at home: its own number of them, or `asked`; all are at least FRESH."""
        is_new = self.first_seed >= FRESH
        own, first = (self.num_seeds, self.first_seed) if is_new else (self.fresh_seeds, self.fresh_from)
        return range(first, first + (own if asked is None else asked))

    def seen(self, regime: str, asked: int | None = None) -> range:
        """The exploratory seeds, below FRESH, of a regime; none if it was not tried on them."""
        if regime not in self.regimes or self.first_seed >= FRESH:
            return range(0)
        number = self.seeds_in.get(regime, self.num_seeds) if asked is None else asked
        return range(self.first_seed, self.first_seed + number)

    def seeds(self, regime: str, asked: int | None = None) -> tuple[int, ...]:
        """All its seeds in a regime, exploratory and deciding."""
        return (*self.seen(regime, asked), *(self.deciding(asked) if regime == self.home else ()))

    def seeds_of(self, arm: Arm, regime: str, asked: int | None = None) -> tuple[int, ...]:
        """The seeds of one of its arms in a regime; an arm for figures only has `also_seeds`."""
        seen, fresh = self.seen(regime, asked), self.deciding(asked) if regime == self.home else range(0)
        if not self.is_drawn_alone(arm):
            return (*seen, *fresh)
        few = (self.also_seeds or self.num_seeds) if asked is None else asked
        # Arms without a prediction decide nothing: they take exploratory seeds where the claim has any.
        return (*seen[:few], *(fresh[:few] if self.first_seed >= FRESH else ()))

    def runs(self, regime: str, asked: int | None = None) -> list[tuple[Arm, int]]:
        """Every arm with each of its seeds in a regime."""
        return [(arm, seed) for arm in self.arms for seed in self.seeds_of(arm, regime, asked)]

    def is_drawn_alone(self, arm: Arm) -> bool:
        """Whether an arm is for figures only: it has no prediction."""
        return not any(arm in prediction.arms for prediction in self.predictions)

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Its arms without repeats: those of its predictions, in order, then those of its figures."""
        predicted = (arm for prediction in self.predictions for arm in prediction.arms)
        return tuple(dict.fromkeys((*predicted, *self.also)))


__all__ = ["FRESH", "Arm", "Claim", "Measure", "OnMap", "Prediction", "Row"]
