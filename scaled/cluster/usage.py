"""The resources that a global step uses: processor time by role, and bytes of routes and features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from lab.ray_session import fetch
from theory.contracts import Rollouts

ANSWER_S = 10.0
"""Seconds that a process has to report its processor time; without an answer the step lacks the metric."""


def payloads(rollouts: Rollouts) -> dict[str, float]:
    """Bytes of mu's routing records and router features, by metric name; absent where there are none."""
    found: dict[str, float] = {}
    if rollouts.experts is not None:
        found["transfer/routes_bytes"] = float(rollouts.experts.nbytes)
    if rollouts.features is not None:
        found["transfer/features_bytes"] = float(rollouts.features.nbytes)
    return found


class Processors:
    """Processor seconds of ranks and engines between two calls of `take`, by metric name."""

    def __init__(self) -> None:
        self._before: dict[str, dict[int, float]] = {}

    def take(self, ranks: Sequence[Any], engines: Sequence[Any]) -> dict[str, float]:
        """Seconds since the last call that a role answered; a new process counts from its start, a dead one not at all.

        An actor answers between two of its calls: an engine that is sampling does not, and the metric is absent.
        """
        now = {"timing_s/cpu_ranks": _seconds(ranks), "timing_s/cpu_engines": _seconds(engines)}
        found = {
            name: sum(seconds - self._before.get(name, {}).get(pid, 0.0) for pid, seconds in by_process.items())
            for name, by_process in now.items()
            if by_process
        }
        # A role that did not answer keeps its last times: without them it would count from its processes' start.
        self._before |= {name: by_process for name, by_process in now.items() if by_process}
        return found


def _seconds(actors: Sequence[Any]) -> dict[int, float]:
    """Processor seconds by process; nothing where one of them does not answer."""
    try:
        return dict(fetch([actor.cpu_seconds.remote() for actor in actors], timeout=ANSWER_S))
    except RayError:  # the next call that needs the actor reports its death
        return {}


__all__ = ["Processors", "payloads"]
