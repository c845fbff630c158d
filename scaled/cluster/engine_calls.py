"""A group's engines in Ray actors, and calls of them: an engine that dies or does not answer is replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from lab.ray_session import fetch, wait
from scaled.cluster.actors import ActorGroup
from scaled.cluster.engine_actor import BuildEngine, EngineActor
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.transfer import Meter
from scaled.config import LimitsBlock
from scaled.objects import OF_ENGINE


class EngineLost(ChildProcessError):
    """An inference engine was lost once more than `rollout.max_restarts` allows; the message says which and why."""


Lost = Callable[[int, str, float], None]
"""Called with an engine's index, the reason that it counts as lost, and the seconds until another had its weights."""

STAGES = {"start": "start", "load_weights": "push", "turn": "push", "score": "score", "work": "score"}
"""An engine's methods, each with the stage whose limit (cluster.limits) applies; `sample` has rollout.timeout_s."""


@dataclass(eq=False)
class _Call:
    """A call of an engine.

    references: those of all its values. since: when it became the engine's oldest one. done: called at its answer.
    """

    method: str
    references: list[Any]
    since: float | None = None
    done: Callable[[], None] = lambda: None


Lines = dict[int, deque[_Call]]
"""The calls that each engine has not answered, oldest first: actors answer in order."""


class EngineCalls(ActorGroup):
    """`num_engines` actors, and calls of them. Restarts go to `meter`, and to `lost`. Engines cut their records by
    `layer_sets`.

    A replacement gets the weights `_weights`, where there are any (`version` >= 0). Raises EngineLost after
    `max_restarts` restarts; an error of the engine itself (a prompt that is too long) comes through unchanged.
    """

    def __init__(
        self,
        cluster: Cluster,
        build: BuildEngine,
        num_engines: int,
        *,
        timeout_s: float,
        max_restarts: int,
        limits: LimitsBlock | None = None,
        meter: Meter | None = None,
        lost: Lost | None = None,
        layer_sets: Sequence[Sequence[int]] = (),
    ):
        self.cluster, self.build, self.layer_sets = cluster, build, layer_sets
        self.limits = LimitsBlock() if limits is None else limits
        self.timeout_s, self.max_restarts = timeout_s, max_restarts
        self.meter = Meter() if meter is None else meter
        self.lost: Lost = (lambda index, reason, seconds: None) if lost is None else lost
        self.restarts = 0
        self.version = -1
        self._weights: list[Any] = []
        self._lost: dict[int, tuple[str, float]] = {}
        self._one_at_a_time = threading.Lock()
        self.actors = [cluster.spawn("engine", i, EngineActor) for i in range(num_engines)]
        self._call_all("start", build, layer_sets)

    def close(self) -> None:
        """Ends the engines for good: a thread that waits for one gets EngineLost, and none takes its place."""
        self.max_restarts = -1
        super().close()

    def _call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        return self._call(dict.fromkeys(range(len(self.actors)), (method, arguments)))

    def _call(self, calls: dict[int, tuple[str, tuple[Any, ...]]]) -> dict[int, Any]:
        """As `_answers`, one thread's call after another's: two would both replace a lost engine."""
        with self._one_at_a_time:
            return self._answers(calls)

    def _answers(self, calls: dict[int, tuple[str, tuple[Any, ...]]]) -> dict[int, Any]:
        """The answers by engine; a lost engine is replaced, and the new one asked again."""
        found: dict[int, Any] = {}
        lines: Lines = {i: deque([self._ask(i, *call)]) for i, call in calls.items()}
        while any(lines.values()):
            i, _, lost, answer = self._wait(lines)
            if lost is not None:
                lines[i] = self._replaced(i, lost)
                # A new engine has been started: a second one in its process would take its memory twice.
                if calls[i][0] != "start":
                    lines[i].append(self._ask(i, *calls[i]))
            elif not lines[i]:
                found[i] = answer
        return found

    def _ask(self, i: int, method: str, arguments: tuple[Any, ...]) -> _Call:
        if not self.actors:
            raise EngineLost(f"engine {i} was lost: the group of engines was closed")
        call = getattr(self.actors[i], method)
        if method == "sample":
            return _Call(method, call.options(num_returns=1 + OF_ENGINE).remote(*arguments))
        return _Call(method, [call.remote(*arguments)])

    def _wait(self, lines: Lines) -> tuple[int, _Call, str | None, Any]:
        """The first answer to any engine's oldest call, taken off its line: the engine, the call, the reason that the
        engine counts as lost or None, and the first value of the answer."""
        while True:
            heads = {i: line[0] for i, line in lines.items() if line}
            deadlines = {i: self._deadline(call) for i, call in heads.items()}
            left = min(deadlines.values()) - time.monotonic()
            done = wait([c.references[0] for c in heads.values()], left)
            # An answer that is ready comes first: a late engine is lost in a round without one.
            late = [i for i in heads if not done and time.monotonic() >= deadlines[i]]
            if ready := [i for i, call in heads.items() if call.references[0] in done] or late:
                call = lines[ready[0]].popleft()
                reference, method = call.references[0], call.method
                lost, answer = self._answer(reference, method) if done else (self._late(method), None)
                if lost is None:
                    call.done()
                return ready[0], call, lost, answer

    def _answer(self, ref: Any, method: str) -> tuple[str | None, Any]:
        """The reason that the engine counts as lost, or None, and its answer; errors of its own code are raised."""
        try:
            return None, fetch(ref, timeout=self._limit(method))
        except RayActorError:
            return "its process ended", None
        except GetTimeoutError:
            return self._late(method), None
        except RayTaskError as error:
            # The engine's own (vllm_engine/engine.py `sample`): it answers, but samples nothing any more.
            if isinstance(error.cause, TimeoutError):
                return str(error.cause), None
            raise error.cause from error  # its text is the traceback in the engine's process

    def _late(self, method: str) -> str:
        field = f"cluster.limits.{STAGES[method]}" if method in STAGES else "rollout.timeout_s"
        return f"no answer to {method} within {self._limit(method):g} s, {field}"

    def _deadline(self, call: _Call) -> float:
        """The time of the oldest call of its engine by which it must have been answered."""
        if call.since is None:
            call.since = time.monotonic()
        return call.since + self._limit(call.method)

    def _limit(self, method: str) -> float:
        return getattr(self.limits, STAGES[method]) if method in STAGES else self.timeout_s

    def _replaced(self, i: int, reason: str) -> deque[_Call]:
        """Puts another engine in the place of a lost one; the calls that build it and give it the same weights."""
        if self.restarts >= self.max_restarts:
            raise EngineLost(
                f"rollout.max_restarts: engine {i} was lost ({reason}); expected at most {self.max_restarts} "
                f"restarts, got {self.restarts + 1}"
            )
        self.restarts += 1
        logging.getLogger(__name__).warning(
            "engine %d was lost (%s; its output is in logs/engine-%d.log); another takes its place", i, reason, i
        )
        self.meter.add("rollout/engine_restarts", 1.0)
        # The new engine can be lost as well, before it has the weights: that is one loss still.
        first, start = self._lost.setdefault(i, (reason, time.monotonic()))
        self.cluster.kill(self.actors[i])  # a process that only hangs would keep the place
        self.actors[i] = self.cluster.spawn("engine", i, EngineActor)
        calls = deque([self._ask(i, "start", (self.build, self.layer_sets))])
        if self.version >= 0:
            calls.append(self._ask(i, "load_weights", (self._weights, self.version)))

        def done() -> None:
            del self._lost[i]
            self.lost(i, first, time.monotonic() - start)

        calls[-1].done = done
        return calls


__all__ = ["EngineCalls", "EngineLost", "Lines", "Lost"]
