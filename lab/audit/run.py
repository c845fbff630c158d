"""The audit itself: a row for every policy, distance, reward, group and objective of a config, by enumeration.

Paper: MiniRL (arXiv 2512.01374) Eq. 2 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from lab.audit.cases import BUILDERS, Builder, Case
from lab.audit.config import AuditConfig, AuditObjective
from lab.audit.table import COLUMNS, DRIFTS, error_column
from lab.casebook import Rows
from lab.config.load import config_hash
from theory.exact.drift_metric import token_drift
from theory.exact.estimator import Estimate, estimate
from theory.exact.expected import expected_update
from theory.exact.groups import Group
from theory.exact.levels import sequence_kl, token_kl
from theory.exact.problem import Problem, true_gradient
from theory.objectives import Objective
from theory.streams import stream


def audit(
    config: AuditConfig,
    builders: Mapping[str, Builder] | None = None,
    report: Callable[[int, int, str], None] | None = None,
    former: Sequence[Rows] = (),
    keep: Callable[[Rows], None] | None = None,
) -> pd.DataFrame:
    """One row per case, pair of distances, objective and group, with the columns of `lab.audit.COLUMNS`.

    `attrs` has the config's name and hash. `builders` adds kinds of policies; `report(done, total, words)` is called
    after every case. `former` are the rows of the first cases from an interrupted call; `keep(rows)` receives those of
    every other case. Raises ValueError for a tree, a distance or a reward that cannot be enumerated.
    """
    table = BUILDERS | dict(builders or {})
    blocks = [(block, table[block.kind](config, block)) for block in config.policies]
    total, rows = sum(cases.total for _, cases in blocks), []
    done = 0
    for block, cases in blocks:
        for case in cases.each:
            # By position: cases come in one order for a config, and the records are of the same config's hash.
            found = former[done] if done < len(former) else _rows(config, case)
            if keep is not None and done >= len(former):
                keep(found)
            rows += found
            done += 1
            if report is not None:
                report(done, total, f"{block.label}, T = {case.keys['length']}, {case.keys['reward']}")
    frame = pd.DataFrame(rows, columns=[*COLUMNS, *map(error_column, config.num_responses)])
    frame["num_draws"] = frame["num_draws"].astype("Int64")  # nullable integers: a None would make the column float
    frame.attrs |= {"name": config.name, "config_hash": config_hash(config)}
    return frame


# ---- rows ------------------------------------------------------------------------------------------------------------


def _rows(config: AuditConfig, case: Case) -> Rows:
    """All rows of a case; shared values are computed once."""
    measured = _Measured(config.seed, case)
    rows = []
    for level in case.levels:
        place = dict(case.keys) | measured.distances(level)
        for objective in config.objectives:
            if objective.name not in case.labels:
                continue
            for group in config.groups:
                found = measured.estimate(level, objective, group.build())
                _require_finite(found, objective.name)
                row = place | {"objective": objective.name, "group": str(group.size), "baseline": group.baseline}
                row |= _numbers(found, config.num_responses) | measured.drift(level, objective, group.build(), found)
                row |= {
                    "bias_discrepancy": measured.estimate((level[0], 0.0), objective, group.build()).bias,
                    "bias_staleness": measured.estimate((0.0, level[1]), objective, group.build()).bias,
                    "bias_on_policy": measured.estimate((0.0, 0.0), objective, group.build()).bias,
                }
                rows.append(row)
    return rows


def _require_finite(found: Estimate, name: str) -> None:
    """Raises ValueError for figures that no page can show, from numbers of an objective that overflow."""
    for what, value in (("bias", found.bias), ("variance", found.variance)):
        if not math.isfinite(value):
            size = float(found.truth.norm())
            raise ValueError(
                f"objectives: expected a finite {what} of {name}, got {value} (the true gradient's length: {size:.3g})"
            )


def _numbers(found: Estimate, num_responses: Sequence[int]) -> dict[str, Any]:
    """The columns of an estimate; the direction of a zero gradient is nan."""
    truth = float(found.truth.square().sum())
    return {
        "bias": found.bias,
        "direction_bias": found.direction_bias,
        "cosine": found.cosine,
        "scale": found.scale,
        "variance": found.variance / truth,
        **{error_column(n): found.error(n) for n in num_responses},
        "num_draws": found.num_draws,
    }


@dataclass
class _Measured:
    """The estimates and true gradients of one case, each computed once."""

    seed: int
    case: Case
    _problems: dict[tuple[float, float], Problem] = field(default_factory=dict)
    _truths: dict[float, Tensor] = field(default_factory=dict)
    _estimates: dict[tuple[tuple[float, float], str, Group], Estimate] = field(default_factory=dict)

    def problem(self, level: tuple[float, float]) -> Problem:
        if level not in self._problems:
            self._problems[level] = self.case.problem(*level)
        return self._problems[level]

    def truth(self, level: tuple[float, float]) -> Float[Tensor, " Q"]:
        """The target's gradient, which does not depend on the inference engine."""
        # Keyed by the staleness alone: the target is pi, whatever mu is.
        if level[1] not in self._truths:
            self._truths[level[1]] = true_gradient(self.problem(level))
        return self._truths[level[1]]

    def estimate(self, level: tuple[float, float], objective: AuditObjective, group: Group) -> Estimate:
        key = (level, objective.name, group)
        if key not in self._estimates:
            # Named by the case and not by order: a resume samples the same groups. Two sizes of groups share their
            # random numbers.
            names = [str(value) for value in self.case.keys.values()]
            generator = stream(self.seed, "audit", "groups", *names, objective.name, *map(str, level))
            built: Objective = objective.build()
            self._estimates[key] = estimate(self.problem(level), built, group, generator, self.truth(level))
        return self._estimates[key]

    def drift(
        self, level: tuple[float, float], objective: AuditObjective, group: Group, found: Estimate
    ) -> dict[str, float]:
        """The columns of drift; nan if groups are sampled."""
        if found.num_draws is not None:
            return dict.fromkeys(DRIFTS, math.nan)
        built, problem = objective.build(), self.problem(level)
        update, length = expected_update(problem, built, group), found.truth.norm()
        along = update.drift @ found.mean / found.mean.norm() / length
        values = (update.drift.norm() / length, along, token_drift(update))
        return dict(zip(DRIFTS, map(float, values), strict=True))

    def distances(self, level: tuple[float, float]) -> dict[str, float]:
        """The columns of requested and measured distances, KL in nats, and of the routers."""
        problem = self.problem(level)
        tree, mu, old, pi = problem.target.tree, problem.logp_mu, problem.logp_old, problem.target.logp()
        return {
            "asked_discrepancy": level[0] if math.isfinite(level[0]) else math.nan,
            "asked_staleness": level[1],
            "kl_mu_old": token_kl(tree, mu, old),
            "kl_old_pi": token_kl(tree, old, pi),
            "kl_mu_pi": token_kl(tree, mu, pi),
            "kl_sequence": sequence_kl(tree, mu, pi),
            "router_disagreement": getattr(problem, "disagreement", math.nan),
            "router_staleness": getattr(problem, "staleness", math.nan),
        }
