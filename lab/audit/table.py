"""The columns of an audit, its medians over policies, and the terminal table.

Medians are over seeds, with quartiles; comparisons have bootstrap intervals (scipy.stats.bootstrap) over the same
seeds. `COLUMNS` has the meaning of every column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table
from scipy import stats

from lab.report.style import number
from theory.objectives.factors import LARGEST
from theory.streams import derive_seed

COLUMNS: dict[str, str] = {
    "policy": "policies: kind and vocabulary",
    "kind": "tabular, bigram, counts or moe",
    "num_tokens": "tokens of the vocabulary, the end token included",
    "has_end": "whether a response can end early",
    "length": "longest response T, tokens",
    "seed": "number of the random policy",
    "reward": "shape of the reward",
    "engine": "departure of the inference engine from the training engine",
    "mode": "routing replay",
    "asked_discrepancy": "requested KL(mu || old) per token, nats; nan if the engine has no such dial",
    "asked_staleness": "requested KL(old || pi) per token, nats",
    "kl_mu_old": "KL(mu || old) per token, nats: training-inference discrepancy",
    "kl_old_pi": "KL(old || pi) per token, nats: policy staleness",
    "kl_mu_pi": "KL(mu || pi) per token, nats: both",
    "kl_sequence": "KL(mu || pi) of whole responses, nats",
    "router_disagreement": "share of (row, layer) pairs where mu's experts are not old's natural ones; nan: no router",
    "router_staleness": "share of (row, layer) pairs where the experts that train are not pi's own; nan: no router",
    "objective": "label of the objective",
    "group": "responses compared with each other, or infinite",
    "baseline": "baseline subtracted from rewards: the objective's own, the mean, none",
    "bias": "||E[g] - grad J|| / ||grad J||",
    "direction_bias": "the least bias that a rescaling leaves: sqrt(1 - cosine^2)",
    "cosine": "cosine between E[g] and grad J",
    "scale": "<E[g], grad J> / ||grad J||^2: the step along the true gradient",
    "variance": "trace of one response's share of the covariance, over ||grad J||^2: n responses have variance / n",
    "drift": "||drift|| / ||grad J||: the part of E[g] that no choice of token earned (theory/exact/expected.py)",
    "drift_along": "<drift, E[g]> / (||E[g]|| ||grad J||): the part of it along the expected step",
    "drift_tokens": "the expectation that rollout_corr/drift estimates, in advantages; nan: tokens depend on others",
    "bias_discrepancy": "bias with the discrepancy alone (pi := old)",
    "bias_staleness": "bias with the staleness alone (mu := old)",
    "bias_on_policy": "bias with neither gap: the objective's own (length normalisation, clips, groups)",
    "num_draws": "groups that advantages were sampled from; none if all is exact",
}
"""Name to meaning of every column except the errors, error_<n>."""

CASE = ("policy", "engine", "mode", "reward", "group", "baseline")
"""The columns whose values never mix in a median."""
LEVEL = ("length", "asked_discrepancy", "asked_staleness")
DRIFTS = ("drift", "drift_along", "drift_tokens")
BIASES = ("bias", "direction_bias", "bias_discrepancy", "bias_staleness", "bias_on_policy")


def error_column(num_responses: int) -> str:
    """Column name of the root mean squared error of an estimate from that many responses, over ||grad J||."""
    return f"error_{num_responses}"


def sample_sizes(frame: pd.DataFrame) -> list[int]:
    """The sample sizes that the frame has errors for."""
    return [int(name.removeprefix("error_")) for name in frame if str(name).startswith("error_")]


def measures(frame: pd.DataFrame) -> list[str]:
    """The columns that are measured numbers."""
    distances = ["kl_mu_old", "kl_old_pi", "kl_mu_pi", "kl_sequence"]
    errors = [error_column(n) for n in sample_sizes(frame)]
    drifts = [name for name in DRIFTS if name in frame]  # older records have none
    return [*distances, *BIASES, "cosine", "scale", "variance", *drifts, *errors]


def medians(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians over seeds of every measure, a row per case, level and objective, with quartiles as <name>_q1, _q3.

    `num_policies` counts the seeds. Rows keep the order in which the audit made them.
    """
    keys, names = [*CASE, *LEVEL, "objective"], measures(frame)
    rows, numbered = [], frame.reset_index(drop=True)
    table = np.asarray(frame[names], dtype=np.float64)  # once: of each part it would take milliseconds
    for place, part in parts(numbered, keys):
        # Not nanquantile: where one policy has no direction, the median of directions is nan.
        quartiles = np.quantile(table[part.index], (0.25, 0.5, 0.75), axis=0)
        for values, suffix in zip(quartiles, ("_q1", "", "_q3"), strict=True):
            place |= {f"{name}{suffix}": float(value) for name, value in zip(names, values, strict=True)}
        rows.append(place | {"num_policies": len(distinct(part, "seed"))})
    return pd.DataFrame(rows)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as mappings from column to value."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def parts(frame: pd.DataFrame, keys: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The rows that agree in all keys, with these keys, in order of appearance; nan is a value like any other."""
    grouped: Any = frame.groupby(list(keys), sort=False, dropna=False)
    for values, part in grouped:
        yield dict(zip(keys, values, strict=True)), part


def numbers(frame: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """A column as floats."""
    return np.asarray(frame[name], dtype=np.float64)


def distinct(frame: pd.DataFrame, name: str) -> list[Any]:
    """The values of a column, ascending, each once; without nan."""
    return sorted(frame[name].dropna().unique().tolist())


def where(frame: pd.DataFrame, keep: Any) -> pd.DataFrame:
    """The rows at which `keep` is true."""
    kept = pd.DataFrame(frame.loc[np.asarray(keep, dtype=bool)])
    kept.attrs = dict(frame.attrs)  # pandas does not promise to keep them
    return kept


def at_longest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at the longest responses of each kind of policies."""
    return where(frame, frame["length"] == frame.groupby(["policy", "engine"])["length"].transform("max"))


FEWEST = 6
"""Fewest policies of an interval: the least and the greatest of five values have their median between them with 94%."""


@dataclass(frozen=True)
class MedianInterval:
    """A median with its 95% bootstrap interval over policies; from -inf to inf where these are fewer than FEWEST."""

    median: float
    low: float
    high: float


def bootstrapped(
    values: NDArray[np.float64], statistic: Callable[..., Any], study: str, unit: str, names: Sequence[str | int]
) -> tuple[float, float, float]:
    """A statistic of the values, one per `unit`, and the ends of its 95% percentile-bootstrap interval.

    `study` and `names` are the stream of the resampling. Equal values are their own interval. Raises ValueError for no
    values, and for values that are not finite.
    """
    if len(values) == 0 or not np.isfinite(values).all():
        raise ValueError(f"expected finite values of at least 1 {unit}, got {values.tolist()}")
    centre = float(statistic(values))
    if np.ptp(values) == 0:
        return centre, centre, centre
    # A stream of its own, so that an interval does not depend on those before it.
    rng = np.random.default_rng(derive_seed(0, study, "bootstrap", *names))
    drawn = stats.bootstrap((values,), statistic, n_resamples=2000, method="percentile", vectorized=True, rng=rng)
    bounds = drawn.confidence_interval
    return centre, float(bounds.low), float(bounds.high)


def interval(values: NDArray[np.float64], *names: str | int) -> MedianInterval:
    """The median of the values, one per policy, with its interval; `names` is the stream of the resampling.

    Equal values are their own interval, however few. Raises ValueError for no values, and for values that are not
    finite.
    """
    if len(values) < FEWEST and np.isfinite(values).all() and len(set(values.tolist())) > 1:
        return MedianInterval(float(np.median(values)), -math.inf, math.inf)
    return MedianInterval(*bootstrapped(values, np.median, "audit", "policy", names))


def ratios(frame: pd.DataFrame, first: str, second: str) -> pd.DataFrame:
    """bias(first) / bias(second) per policy, then its median and interval: a row per case and level.

    Below 1, the first objective has less. The ratio to an exact objective is infinite, that of two such ones 1. Levels
    without a gap, where all objectives may be exact, have no row; neither have those that lack one of the objectives.
    The interval of fewer policies than FEWEST is from 0 to inf.
    """
    rows, distances = [], ("kl_mu_pi", "kl_sequence")
    gaps = where(frame, numbers(frame, "kl_mu_pi") > 0)
    for place, part in parts(gaps, [*CASE, *LEVEL]):
        # By seed, so that the division pairs the biases of one policy.
        above, below = (where(part, part["objective"] == name).sort_values("seed") for name in (first, second))
        if above.empty or below.empty:
            continue
        # Medians and bootstrap on the log scale, where swapping the two objectives only flips the sign.
        found = interval(_log_ratios(above, below), first, second, *map(str, place.values()))
        place |= {"ratio": _exp(found.median), "low": _exp(found.low), "high": _exp(found.high)}
        rows.append(place | {name: float(np.median(numbers(above, name))) for name in distances})
    # Named, because a table without rows has its columns, too.
    return pd.DataFrame(rows, columns=[*CASE, *LEVEL, "ratio", "low", "high", *distances])


def has_interval(low: Any, high: Any) -> Any:
    """Whether the ends of a ratio, or each of several, are those of an interval: not 0 and inf."""
    return (low > 0) | np.isfinite(high)


FAR = 1e6
"""Stands for the logarithm of infinity, since no bootstrap takes an infinite number: its half is infinite too."""


def _log_ratios(above: pd.DataFrame, below: pd.DataFrame) -> NDArray[np.float64]:
    first, second = (np.array([tidy(bias) for bias in numbers(part, "bias")]) for part in (above, below))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(first / second)
    return np.where((first == 0) & (second == 0), 0.0, logs.clip(-FAR, FAR))


def _exp(log: float) -> float:
    return math.exp(log) if log <= LARGEST else math.inf


# ---- as text ---------------------------------------------------------------------------------------------------------

MAX_ROWS = 100
"""Most rows of a terminal table; above, only the middle distances are shown."""


def text_columns(frame: pd.DataFrame) -> dict[str, str]:
    """Column name to heading of an objective's columns in tables."""
    heads = {"bias": "bias", "direction_bias": "direction bias", "cosine": "cosine", "scale": "step"}
    return heads | {"variance": "variance"} | {error_column(n): f"error at {n}" for n in sample_sizes(frame)}


def cell(row: Mapping[str, Any], name: str) -> str:
    """A median as text; rounding errors of the enumeration appear as 0."""
    return number(tidy(float(row[name])))


def tidy(value: float) -> float:
    """The value, or 0 if it is only float64's rounding, which the root in `direction_bias` raises to about 1e-8."""
    return 0.0 if abs(value) < 1e-7 else value


def middle(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The middle one of the distinct values (the upper of two); nan if all are nan."""
    distinct = sorted({float(value) for value in values if not math.isnan(value)})
    return distinct[len(distinct) // 2] if distinct else math.nan


def at_middle(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows at the middle discrepancy and the middle staleness; an engine without a dial has one discrepancy."""
    for name in ("asked_discrepancy", "asked_staleness"):
        frame = at_level(frame, name, middle(numbers(frame, name)))
    return frame


def at_level(frame: pd.DataFrame, name: str, level: float) -> pd.DataFrame:
    """The rows at this level, and those without a level (nan)."""
    values = numbers(frame, name)
    return where(frame, (values == level) | np.isnan(values))


def shown(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The medians for a terminal, and a line on the selection ("" for all)."""
    found = at_longest(medians(frame))
    left = [] if len(distinct(frame, "length")) == 1 else ["longest responses of each kind"]
    if len(found) > MAX_ROWS:
        found = at_middle(found)
        left.append("middle distances")
    return found, f"Shown: {', '.join(left)}. audit.json has every row." if left else ""


def case_name(row: Mapping[str, Any]) -> str:
    """The case in words, without the replay mode."""
    group = f"groups of {row['group']}" if row["group"] != "infinite" else f"infinite group, baseline {row['baseline']}"
    return f"{row['policy']}, {row['engine']}; reward {row['reward']}; {group}"


def terminal_tables(frame: pd.DataFrame) -> Iterator[Table]:
    """One rich table per case: a line for each objective, mode and pair of distances."""
    found, _ = shown(frame)
    names = ("kl_mu_old", "kl_old_pi", *text_columns(frame))
    for _, part in parts(found, [name for name in CASE if name != "mode"]):
        rows = records(part)
        title = f"{case_name(rows[0])}; T = {rows[0]['length']}, {rows[0]['num_policies']} policies"
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
        table.add_column("objective", no_wrap=True)
        table.add_column("replay", no_wrap=True)
        for head in ("KL mu, old", "KL old, pi", *text_columns(frame).values()):
            table.add_column(head, justify="right", min_width=7)
        for row in rows:
            table.add_row(row["objective"], row["mode"], *(cell(row, name) for name in names))
        yield table
