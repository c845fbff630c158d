"""A `RolloutEngine` over several inference engines in Ray actors, each with a contiguous share of the prompts.

An engine that dies or does not answer is replaced. Its replacement gets the same weights and samples the share again
from the same seeds, so that a death changes no token. Weights stay in the object store until the next push; Ray spills
them to disk if it needs the room.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from scaled.cluster.actors import ActorGroup
from scaled.cluster.engine_actor import BuildEngine, EngineActor
from scaled.cluster.features import StoredFeatures
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.storing import unpack_apart
from scaled.cluster.transfer import Meter, pack, shares, unpack
from scaled.cluster.weights import Convert, StoredTensors, stored, unchanged
from scaled.config import LimitsBlock
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling


class EngineLost(ChildProcessError):
    """An inference engine was lost once more than `rollout.max_restarts` allows; the message says which and why."""


Lost = Callable[[int, str, float], None]
"""Called with an engine's index, the reason that it counts as lost, and the seconds until another had its weights."""

STORED_PARTS = 32
"""The most objects that store one engine's routes: a rank fetches only those with responses of its own."""

STAGES = {"start": "start", "load_weights": "push", "turn": "push", "score": "score", "work": "score"}
"""An engine's methods, each with the stage whose limit (cluster.limits) applies; `generate` has rollout.timeout_s."""


class RolloutGroup(ActorGroup):
    """`RolloutEngine` over `num_engines` actors. Seconds and bytes go to `meter` under their metric names.

    `convert` turns training weights into the tensors that the engines load.

    Raises EngineLost after `max_restarts` restarts; an error of the engine itself (a prompt that is too long) comes
    through unchanged.
    """

    def __init__(
        self,
        cluster: Cluster,
        build: BuildEngine,
        num_engines: int,
        *,
        timeout_s: float,
        max_restarts: int,
        bucket_bytes: int,
        convert: Convert = unchanged,
        limits: LimitsBlock | None = None,
        meter: Meter | None = None,
        lost: Lost | None = None,
    ):
        self.cluster, self.build = cluster, build
        self.limits = LimitsBlock() if limits is None else limits
        self.timeout_s, self.max_restarts = timeout_s, max_restarts
        self.bucket_bytes, self.convert = bucket_bytes, convert
        self.meter = Meter() if meter is None else meter
        self.lost: Lost = (lambda index, reason, seconds: None) if lost is None else lost
        self.restarts = 0
        self.version = -1
        self._weights: list[Any] = []
        self._homes: dict[str, int] = {}
        self._one_at_a_time = threading.Lock()
        self.actors = [cluster.spawn("engine", i, EngineActor) for i in range(num_engines)]
        self._call_all("start", build)

    def close(self) -> None:
        """Ends the engines for good: a thread that waits for one gets EngineLost, and none takes its place."""
        self.max_restarts = -1
        super().close()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """As theory's contract; the draw does not depend on how many engines share the prompts, nor on their shares.

        A later turn goes to the engine that sampled the prompt's first turn: it may still cache the conversation. With
        `sampling.enough` each engine has a share of the groups, and ends its call once its share of `enough`, rounded
        up, is complete: which tokens a call samples does not depend on the engines' pace.
        """
        G = sampling.num_responses
        sampling.limits(len(prompts) * G)  # raises if the draws do not fit the responses
        with self.meter.seconds("timing_s/gen"):
            is_first_turn = not sampling.draws
            parts = self._groups(sampling) if sampling.enough else self._parts(prompts, is_first_turn)
            num_groups = len({draw.group for draw in sampling.draws})
            calls = {}
            # Responses are numbered on from a share's first prompt: shares of a first turn are contiguous, and later
            # turns have draws, which no number changes.
            for i, part in parts.items():
                draws = tuple(sampling.draws[p * G + g] for p in part for g in range(G)) if sampling.draws else ()
                own = len({draw.group for draw in draws})
                # Shares that were rounded down could add up to fewer groups than the step needs.
                enough = -(-sampling.enough * own // num_groups) if sampling.enough else 0
                share = tuple(prompts[p] for p in part), replace(sampling, draws=draws, enough=enough)
                calls[i] = ("generate", (pack(share), part[0] * G, min(len(part), STORED_PARTS)))
            found = self._call(calls)
            answers: list[Rollouts] = []
            for i in parts:
                parcel, stored_routes = found[i]
                answer: Rollouts = unpack_apart(parcel, stored_routes, self, i)
                # Routes and features lie in objects of their own, and the parcel has only their places.
                num_bytes = parcel.num_bytes + (0 if answer.experts is None else answer.experts.nbytes)
                num_bytes += answer.features.nbytes if isinstance(answer.features, StoredFeatures) else 0
                self.meter.add("transfer/rollout_bytes", float(num_bytes))
                answers.append(answer)
            together = Rollouts.concat(answers)
            # Back to the caller's order: place[p] is prompt p's position among the engines' answers.
            place = {p: k for k, p in enumerate(p for part in parts.values() for p in part)}
            return together.select([place[p] * G + g for p in range(len(prompts)) for g in range(G)])

    def _parts(self, prompts: Sequence[Prompt], is_first_turn: bool) -> dict[int, list[int]]:
        """The prompts of each engine: even, contiguous shares, or those whose first turn it sampled."""
        even = {
            p: i for i, (start, stop) in enumerate(shares(len(prompts), len(self.actors))) for p in range(start, stop)
        }
        if is_first_turn:
            self._homes = {prompt.id: even[p] for p, prompt in enumerate(prompts)}
        parts: dict[int, list[int]] = {}
        for p, prompt in enumerate(prompts):
            home = even[p] if is_first_turn else self._homes.get(prompt.id, even[p])
            parts.setdefault(home, []).append(p)
        return dict(sorted(parts.items()))

    def _groups(self, sampling: Sampling) -> dict[int, list[int]]:
        """The prompts of each engine: even shares of the groups, none of which is split."""
        members: dict[int, list[int]] = {}
        for p, draw in enumerate(sampling.draws):
            members.setdefault(draw.group, []).append(p)
        each = list(members.values())
        parts = {
            i: [p for group in each[start:stop] for p in group]
            for i, (start, stop) in enumerate(shares(len(each), len(self.actors)))
        }
        return {i: part for i, part in parts.items() if part}

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As theory's contract, for every engine: converted once, and sent in buckets through the object store.

        Weights of a group of ranks are converted in the ranks' processes and go straight to the engines: none of their
        bytes passes through this process.
        """
        with self.meter.seconds("timing_s/push"):
            # Frees the previous version before the next one fills the store. Where a rank dies in between, an engine
            # that is replaced then gets none, and not a part of them: the next push has all.
            self._weights, self.version = [], -1
            sent = []
            for reference, num_bytes in stored(named_tensors, self.bucket_bytes, self.convert):
                self.meter.add("transfer/weights_bytes", float(num_bytes))
                sent.append(reference)
            # Before the call, so that the replacement of an engine lost in it loads these.
            self._weights, self.version = sent, version
            self._call_all("load_weights", self._weights, version)

    def staged(self, named_tensors: NamedTensors) -> NamedTensors:
        """The weights as they are now, converted and in the object store, for `load_weights` to send later."""
        with self.meter.seconds("timing_s/push"):
            kept = list(stored(named_tensors, self.bucket_bytes, self.convert))
        return StoredTensors(lambda convert: iter(kept))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Log-probabilities of tokens 1.. of every sequence, by engine: every engine scores them all."""
        found = self._call_all("score", [list(s) for s in sequences])
        return [unpack(found[i]) for i in sorted(found)]

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of work(*arguments, engine), run in every engine's process."""
        parcel = ray.put(pack((work, arguments)))
        found = self._call({i: ("work", (parcel, i)) for i in range(len(self.actors))})
        return [unpack(found[i]) for i in range(len(self.actors))]

    def turn(self, awake: bool) -> None:
        """Wakes the engines, or puts them to sleep while ranks use their GPUs (colocated placement)."""
        self._call_all("turn", awake)

    def _call_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        return self._call(dict.fromkeys(range(len(self.actors)), (method, arguments)))

    def _call(self, calls: dict[int, tuple[str, tuple[Any, ...]]]) -> dict[int, Any]:
        """As `_answers`, one thread's call after another's: two would both replace a lost engine."""
        with self._one_at_a_time:
            return self._answers(calls)

    def _answers(self, calls: dict[int, tuple[str, tuple[Any, ...]]]) -> dict[int, Any]:
        """The answers by engine; a lost engine is replaced, and the new one asked again.

        If a call has several values, its answer is the first one and references to the others.
        """
        found: dict[int, Any] = {}
        others: dict[int, list[Any]] = {}

        def ask(i: int) -> Any:
            first, *others[i] = self._ask(i, *calls[i])
            return first

        pending = {ask(i): i for i in calls}
        deadlines = {i: time.monotonic() + self._limit(calls[i][0]) for i in calls}
        while pending:
            left = min(deadlines[i] for i in pending.values()) - time.monotonic()
            done, _ = ray.wait(list(pending), num_returns=1, timeout=max(left, 0.0))
            late = [ref for ref, i in pending.items() if time.monotonic() >= deadlines[i]]
            # An answer that is ready comes first: a late engine is restarted in a round without one.
            for ref in done or late:
                i = pending.pop(ref)
                lost, answer = self._answer(ref, calls[i][0]) if done else (self._late(calls[i][0]), None)
                if lost is None:
                    found[i] = (answer, others[i]) if others[i] else answer
                    continue
                self._restart(i, lost)
                if calls[i][0] == "start":
                    # The new one has been built: a second engine in its process would take its memory twice.
                    found[i] = None
                    continue
                pending[ask(i)] = i
                deadlines[i] = time.monotonic() + self._limit(calls[i][0])
        return found

    def _ask(self, i: int, method: str, arguments: tuple[Any, ...]) -> list[Any]:
        """References to all values of the call."""
        call = getattr(self.actors[i], method)
        if method == "generate":  # its last argument is the number of objects for routes, beside the answer
            return call.options(num_returns=1 + arguments[-1]).remote(*arguments)
        return [call.remote(*arguments)]

    def _answer(self, ref: Any, method: str) -> tuple[str | None, Any]:
        """The reason that the engine counts as lost, or None, and its answer; errors of its own code are raised."""
        try:
            return None, ray.get(ref, timeout=self._limit(method))
        except RayActorError:
            return "its process ended", None
        except GetTimeoutError:
            return self._late(method), None
        except RayTaskError as error:
            # The engine's own (vllm_engine/engine.py `_run`): it answers, but samples nothing any more.
            if isinstance(error.cause, TimeoutError):
                return str(error.cause), None
            raise error.cause from error  # its text is the traceback in the engine's process

    def _late(self, method: str) -> str:
        field = f"cluster.limits.{STAGES[method]}" if method in STAGES else "rollout.timeout_s"
        return f"no answer to {method} within {self._limit(method):g} s, {field}"

    def _limit(self, method: str) -> float:
        return getattr(self.limits, STAGES[method]) if method in STAGES else self.timeout_s

    def _restart(self, i: int, reason: str | None) -> None:
        """Puts another engine in its place, with the same weights."""
        first, start = reason or "", time.monotonic()
        while reason is not None:  # the new engine can be lost as well
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
            self.cluster.kill(self.actors[i])  # a process that only hangs would keep the place
            self.actors[i] = self.cluster.spawn("engine", i, EngineActor)
            reason, _ = self._answer(self._ask(i, "start", (self.build,))[0], "start")
            if reason is None and self.version >= 0:
                weights = self._ask(i, "load_weights", (self._weights, self.version))
                reason, _ = self._answer(weights[0], "load_weights")
        self.lost(i, first, time.monotonic() - start)


__all__ = ["EngineLost", "Lost", "RolloutGroup"]
