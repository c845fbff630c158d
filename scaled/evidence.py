"""The `evidence:` block of a promoted config: its runs, their outcomes, and the questions that they leave open.

It changes no number of the run that carries it, and no hash; `firstorder promote` writes it, people read it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lab.strict import Strict
from lab.verdict import VerdictRules


class RunEvidence(Strict):
    """One run that the promotion rests on.

    `run` is its folder, <name>/<UTC time>-<config hash>; the hashes differ by the seed alone. `reasons` are the rules
    that fired, or what kept the verdict open; `remarks` are on a stable run. Both accuracies are held-out ones, in
    [0, 1], over `num_samples` responses each; null where fewer than two are recorded. `started` is UTC; `commit` is
    null outside a checkout.
    """

    run: str
    seed: int = Field(ge=0)
    config_hash: str
    verdict: Literal["stable", "collapsed", "undecided"]
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    accuracy_first: float | None = None
    accuracy_final: float | None = None
    num_samples: int | None = Field(default=None, ge=1)
    num_steps: int = Field(ge=1)
    started: str
    commit: str | None = None
    has_local_changes: bool | None = None


class MetricSpread(Strict):
    """One final metric over the runs that recorded it; the standard deviation (n - 1) of a single run is null.

    A run's final value is its mean over the last `verdict_rules.window` recorded values; for accuracy it is the last
    one.
    """

    mean: float
    standard_deviation: float | None = Field(default=None, ge=0)
    lowest: float
    highest: float
    num_runs: int = Field(ge=1)


class Evidence(Strict):
    """The evidence for the algorithm block of this config, and where the config departs from it."""

    runs: tuple[RunEvidence, ...] = Field(min_length=1, description="the runs, by seed; times are UTC")
    engine: str = Field(description="the inference engine they ran against, as JSON")
    verdict_rules: VerdictRules = Field(description="the thresholds of their verdicts at promotion")
    final: dict[str, MetricSpread] = Field(
        description="final metrics over the runs; a run's value is its mean over the last verdict_rules.window values"
    )
    mapped: dict[str, str] = Field(
        description="fields of `algorithm` that differ from the runs': the change, and the rule behind it"
    )
    allowed_unstable: str | None = Field(
        default=None, min_length=1, description="why it was promoted without stable runs of several seeds"
    )
    unknown: tuple[str, ...] = Field(
        default=(), description="facts that the runs' records cannot show, one sentence each"
    )
