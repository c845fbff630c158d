"""Megatron ranks in Ray actors that hold one model: they score sampled tokens and export weights.

Every rank gets the whole batch, once, through the object store, works on its own share and returns its part; of routes,
features and mu's likeliest tokens it gets the places, and fetches what its share needs. Pure functions turn the parts
into the values that theory's contract promises. Ranks wait for each other in collectives, so the death of one ends the
group: RankDied, and the caller starts another group.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NoReturn, Protocol, runtime_checkable

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import Tensor
from torch._C._distributed_c10d import Store

from lab.overflow import Fp16Overflow, Overflow
from lab.ray_session import fetch, wait
from scaled.cluster.actors import ActorGroup
from scaled.cluster.buckets import Bucket, Staging
from scaled.cluster.interface import address_of, listening, store
from scaled.cluster.ray_cluster import Cluster, Worker
from scaled.cluster.storing import pack_apart, unpack_apart
from scaled.cluster.transfer import Meter, Parcel, pack, unpack
from scaled.cluster.weights import Convert, StoredTensors, converted
from scaled.config import LimitsBlock, ModelBlock, TrainingBlock
from scaled.objects import OF_RANK
from theory.contracts import NamedTensors, Rollouts, TokenScores, UpdateStats
from theory.routing.passes import RoutingPlan

SETTLE_S = 20.0
"""Seconds to wait, after a rank's error, for news of a neighbour's death: the collective breaks before Ray knows."""

BUCKETS_AHEAD = 2
"""Buckets that a rank may export before the driver takes them."""


class RankDied(ChildProcessError):
    """A rank's process ended or hangs; the message says which. The group cannot be used any more.

    `rank` is the first one that is known to be lost.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


@runtime_checkable
class ModelRank(Protocol):
    """The object that a rank actor holds at least; see docs/decisions/0004-scaled.md."""

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> Any:
        """This rank's part of the old pass."""
        ...

    def give_way(self) -> None:
        """Frees GPU memory for engines until the next update."""
        ...

    def export(self, folded: bool) -> NamedTensors:
        """The weights that this rank yields; `folded` adds W_p to the gates. A collective: every rank must iterate."""
        ...


STAGES = {
    "devices": "start", "rendezvous": "start", "start": "start", "export": "push", "give_way": "push", "score": "score",
    "score_reference": "score", "predictor_weights": "score", "work": "score", "update": "update", "save": "save",
    "begin_save": "save", "has_saved": "save", "load": "load",
}  # fmt: skip
"""A rank's methods, each with the stage whose limit (cluster.limits) applies to it."""

BuildModelRank = Callable[[int, int, Store], ModelRank]
"""(rank, number of ranks, the store where they meet) -> the rank, once all ranks have met."""

MEET_S = 300.0
"""Seconds that a rank waits for the store of rank 0."""


@dataclass(frozen=True)
class Assembly:
    """Pure functions that turn all ranks' parts, in rank order, into the values of theory's contract."""

    scores: Callable[[Sequence[Any]], TokenScores]
    reference: Callable[[Sequence[Any]], Tensor]
    stats: Callable[[Sequence[Any]], UpdateStats]


class RankActor(Worker):
    """One rank in its own process; all its methods run on that process's main thread."""

    rank: ModelRank
    # Rank 0's alone. It listens until the store takes it over, so that no other process gets the port.
    _socket: socket.socket | None = None

    @cached_property
    def _staging(self) -> Staging:
        return Staging()

    def rendezvous(self, interface: str | None) -> tuple[str, int]:
        """This machine's address on the interface (Ray's own by default), and a port on which it now listens."""
        address = ray.util.get_node_ip_address() if interface is None else address_of(interface)
        self._socket = listening(address)
        return address, self._socket.getsockname()[1]

    def start(self, build: BuildModelRank, rank: int, num_ranks: int, address: str, port: int) -> None:
        self.rank = build(rank, num_ranks, store(address, port, num_ranks, MEET_S, self._socket))

    def call(self, method: str, parcel: Parcel) -> tuple[Parcel | Bucket | None, ...]:
        return pack_apart(getattr(self.rank, method)(*unpack(parcel, shared=True)), OF_RANK)

    def export(self, bucket_bytes: int, folded: bool, convert: Convert) -> Iterator[Bucket | int]:
        for bucket in converted(self.rank.export(folded), bucket_bytes, convert, self._staging):
            yield bucket
            yield bucket.num_bytes  # tells the driver, which does not fetch the bucket, that it is there


def tokens_only(rollouts: Rollouts) -> Rollouts:
    """Rollouts without mu's routes and features: a pass gets those that it needs in its `RoutingPlan`."""
    return replace(rollouts, experts=None, features=None)


class ScoringGroup(ActorGroup):
    """The old pass and the weights of `num_ranks` actors. Seconds go to `meter`.

    Raises RankDied if a rank's process ends, if a collective loses a rank, or if a rank does not answer within its
    stage's limit. Errors of a rank's own code come through unchanged.
    """

    def __init__(
        self,
        cluster: Cluster,
        build: BuildModelRank,
        num_ranks: int,
        assembly: Assembly,
        *,
        bucket_bytes: int,
        limits: LimitsBlock | None = None,
        meter: Meter | None = None,
    ):
        self.cluster, self.assembly, self.bucket_bytes = cluster, assembly, bucket_bytes
        self.limits = LimitsBlock() if limits is None else limits
        self.meter = Meter() if meter is None else meter
        self.actors = [cluster.spawn("rank", i, RankActor) for i in range(num_ranks)]
        try:
            if cluster.has_gpus:
                # Within the limit of a start: a rank whose GPU is not free again has no place, and never answers.
                cluster.devices = dict(enumerate(self._gather("devices", [a.devices.remote() for a in self.actors])))
            (address, port), *_ = self._gather("rendezvous", [self.actors[0].rendezvous.remote(cluster.interface)])
            starts = [a.start.remote(build, i, num_ranks, address, port) for i, a in enumerate(self.actors)]
            self._gather("start", starts)
        except Exception:
            self.close()  # ranks that still wait for the others would occupy the next group's places
            raise

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        """As theory's contract."""
        with self.meter.seconds("timing_s/old_log_prob"):
            return self.assembly.scores(self._call("score", tokens_only(rollouts), plan))

    def named_tensors(self, folded: bool = False) -> StoredTensors:
        """As theory's contract; views of shared memory, each valid until the next is requested and never to be written.

        They come in the order in which ranks send them, which may differ between calls.
        """
        return StoredTensors(partial(self._stored, folded))

    def _stored(self, folded: bool, convert: Convert) -> Iterator[tuple[Any, int]]:
        # A bucket is two objects, itself and its size (`RankActor.export`).
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2 * BUCKETS_AHEAD}
        arguments = self.bucket_bytes, folded, convert
        yield from self._merged([a.export.options(**streaming).remote(*arguments) for a in self.actors])

    def give_way(self) -> None:
        """Frees GPU memory for engines until the next update."""
        self._call("give_way")

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of work(*arguments, rank), run in every rank's process."""
        parcel = ray.put(pack((work, arguments)))
        return [
            unpack(part) for part in self._gather("work", [a.work.remote(parcel, i) for i, a in enumerate(self.actors)])
        ]

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        parcel = ray.put(pack(arguments))
        # The answer, which is fetched here, and its largest tensors, which stay in the object store.
        refs = [actor.call.options(num_returns=1 + OF_RANK).remote(method, parcel) for actor in self.actors]
        answers = self._gather(method, [answer for answer, *_ in refs])
        return [unpack_apart(answers[i], stored, self, i) for i, (_, *stored) in enumerate(refs)]

    def _merged(self, streams: list[Any]) -> Iterator[tuple[Any, int]]:
        """Buckets from whichever rank has one ready: waiting for one rank would stall the collective of the others.

        Raises Fp16Overflow, with the weights of all ranks, once all have sent theirs.
        """
        ranks = {stream: i for i, stream in enumerate(streams)}
        overflowing: dict[str, Overflow] = {}
        while ranks:
            # Else every bucket would come to the driver's machine first, which may have neither a rank nor an engine.
            done = wait(list(ranks), self.limits.push, is_read=False)
            self._require(done, "export", ranks.values())
            for stream in done:
                bucket = next(stream, None)
                if bucket is None:
                    del ranks[stream]
                    continue
                try:
                    # A failed rank's last reference is its error, in place of a bucket or of a size.
                    num_bytes: Any = fetch(next(stream, bucket))
                except RayError as error:
                    cause = getattr(error, "cause", error)
                    if not isinstance(cause, Fp16Overflow):
                        self._raise(error, ranks[stream])
                    # This rank has sent all its weights (`quantised`). The others must end their export, too.
                    overflowing |= cause.weights
                    del ranks[stream]
                    continue
                yield bucket, num_bytes
        if overflowing:
            raise Fp16Overflow.of(overflowing)

    def _gather(self, method: str, refs: list[Any]) -> list[Any]:
        """All answers in order; the first error is raised as soon as it arrives."""
        ranks = {ref: i for i, ref in enumerate(refs)}
        found: dict[int, Any] = {}
        end = time.monotonic() + getattr(self.limits, STAGES[method])
        while ranks:
            done = wait(list(ranks), end - time.monotonic())
            self._require(done, method, ranks.values())
            for ref in done:
                i = ranks.pop(ref)
                # Without waiting for the others, which may stand in a collective that this rank has left.
                try:
                    found[i] = fetch(ref)
                except RayError as error:
                    self._raise(error, i)
        return [found[i] for i in range(len(refs))]

    def _require(self, done: list[Any], method: str, waiting: Iterable[int]) -> None:
        """Raises RankDied if none of the waiting ranks has answered within the stage's limit."""
        if not done:
            stage = STAGES[method]
            raise RankDied(
                f"ranks {sorted(waiting)} of {len(self.actors)} did not answer to {method} within "
                f"{getattr(self.limits, stage):g} s (cluster.limits.{stage})",
                min(waiting),
            )

    def _raise(self, error: Exception, rank: int) -> NoReturn:
        """Raises RankDied if a rank is dead or lost to a collective, else the error of this rank's own code."""
        if isinstance(error, RayActorError):
            raise RankDied(f"rank {rank} of {len(self.actors)} died: its process ended", rank) from None
        cause: Exception = getattr(error, "cause", error)
        # Neither of these comes from a broken collective: they are checks of our own, and no neighbour is asked.
        if not isinstance(cause, (ValueError, ArithmeticError)):
            # Perhaps a collective broke: if a neighbour died, Ray reports it within moments.
            pings = [actor.pid.remote() for actor in self.actors]
            wait(pings, SETTLE_S, len(pings))
            silent: list[int] = []
            for i, ping in enumerate(pings):
                try:
                    fetch(ping, timeout=0.0)
                except RayActorError:
                    raise RankDied(f"rank {i} of {len(pings)} died; rank {rank} said: {cause}", i) from None
                except GetTimeoutError:
                    silent.append(i)
            # Torch raises RuntimeError if a collective times out or is cut off; silent ranks wait in it, or hang.
            if silent and isinstance(cause, RuntimeError) and not isinstance(cause, torch.OutOfMemoryError):
                raise RankDied(
                    f"ranks {silent} of {len(pings)} did not answer within {SETTLE_S:g} s; rank {rank} said: {cause}",
                    silent[0],
                ) from None
        raise cause from error  # its text is the traceback in the rank's process


def build_scorer(model: ModelBlock, training: TrainingBlock, rank: int, num_ranks: int, store: Store) -> ModelRank:
    """A Megatron-core rank that has met the others and never trains; its machine must have the model's folder."""
    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.scoring_rank import ScoringRank

    parallel.initialize(training, rank, num_ranks, store)
    return ScoringRank(model, training)


def megatron_assembly() -> Assembly:
    """The functions that join the parts of Megatron-core's ranks."""
    from scaled.megatron_engine import parts

    return Assembly(parts.assemble_scores, parts.assemble_logp, parts.assemble_stats)


__all__ = [
    "Assembly", "BuildModelRank", "ModelRank", "RankActor", "RankDied", "ScoringGroup", "build_scorer",
    "megatron_assembly", "tokens_only",
]  # fmt: skip
