"""A Ray cluster for one run: joined or started, with a place for every rank and every engine, and left afterwards.

The ranks of a TP group, and of an EP group that fits, share a machine. Separate placement gives ranks and engines
their own GPUs. Colocated placement puts engine i on the GPUs of ranks [i * TP, (i + 1) * TP); they take turns. Where
the cluster has no GPU, places are CPUs.

Ray packs greedily, the largest bundle first, each on the machine with most free: `units.shares` has the machines that
this takes. Where others use GPUs it may miss a packing: with 8 and 6 free, a unit of 6 goes to the 8, and one of two
engines of 4 finds no place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lab.ray_session import SETTINGS, ray_session
from scaled.cluster import interface
from scaled.cluster.transfer import Parcel, pack, unpack
from scaled.config import ScaledRun
from scaled.units import unit_of

Role = Literal["rank", "engine"]

PROJECT = Path(__file__).resolve().parents[2]
PLACEMENT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Place:
    """An actor's place: a bundle of the placement group, its share of it, and the ranks whose GPUs it shares."""

    bundle: int
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    shares: tuple[int, ...] = ()


@dataclass
class Cluster:
    """A connected Ray with reserved places; `spawn` starts an actor at one of them."""

    has_gpus: bool
    group: PlacementGroup
    places: dict[tuple[Role, int], Place]
    logs: Path
    interface: str | None = None
    is_alone: bool = True
    actors: list[Any] = field(default_factory=list)
    devices: dict[int, str] = field(default_factory=dict)
    """The GPUs of each rank, as its process names them."""
    shared_devices: dict[int, str] = field(default_factory=dict)
    """Those of each colocated engine."""
    nodes: Sequence[str] = ()
    """The machine of each bundle."""

    def machines_of_ranks(self) -> list[str]:
        """The machine of each rank, in their order."""
        num = sum(role == "rank" for role, _ in self.places)
        return [self.nodes[self.places["rank", i].bundle] for i in range(num)]

    def spawn(self, role: Role, index: int, cls: type, *args: Any) -> Any:
        """Starts an actor `cls(log file, *args)` at its place; returns its Ray handle."""
        place = self.places[role, index]
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=place.bundle)
        options: dict[str, Any] = {
            "num_cpus": place.num_cpus,
            "num_gpus": place.num_gpus,
            "scheduling_strategy": strategy,
            "runtime_env": {"env_vars": self._environment(place, index)},
            "max_restarts": 0,  # the groups replace lost actors: a new one needs weights
        }
        actor = ray.remote(cls).options(**options).remote(str(self.logs / f"{role}-{index}.log"), *args)
        self.actors.append(actor)
        return actor

    def _environment(self, place: Place, index: int) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
        variables |= interface.variables(self.interface, self.is_alone)
        if not self.has_gpus:
            variables["OMP_NUM_THREADS"] = "1"  # a place is one CPU
        if place.shares:
            # Ranks start first: only they know which of the machine's GPUs Ray gave to their bundle.
            # An actor that asks for no GPU keeps it only under SETTINGS of lab/ray_session.py.
            # Ranks that start again may get them in another order; an engine returns to those that it had.
            own = ",".join(self.devices[rank] for rank in place.shares)
            variables["CUDA_VISIBLE_DEVICES"] = self.shared_devices.setdefault(index, own)
            # Here, too: a Ray that runs already lacks our settings, and releases before 2.60 may empty the list.
            variables |= SETTINGS
        return variables

    def kill(self, actor: Any) -> None:
        """Ends an actor immediately, whatever it is doing."""
        if actor in self.actors:
            self.actors.remove(actor)
        ray.kill(actor, no_restart=True)


@contextlib.contextmanager
def cluster(config: ScaledRun, folder: Path) -> Iterator[Cluster]:
    """The cluster of a run, its actors' output under `folder`/logs; everything it started ends with the block.

    A process that is connected to Ray already keeps its connection. Raises ValueError, naming the field, where the
    cluster has too few places.
    """
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    memory = int(config.cluster.object_store_gib * 2**30)
    # Without GPUs places are CPUs: a Ray of our own counts as many as there are actors, whatever the machine has.
    num_cpus = None if torch.cuda.is_available() else config.training.num_ranks + config.rollout.num_engines
    name = config.cluster.interface
    own = interface.LOOPBACK if name is None else interface.address_of(name)
    with ray_session(config.cluster.address, num_cpus=num_cpus, object_store_bytes=memory, own_address=own):
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        node_gpus = int(max(resources.get("GPU", 0) for resources in alive))
        bundles, places = places_of(config, node_gpus)
        # First, as a placement group would wait for resources that no machine has.
        _check_resources(config, bundles)
        group = placement_group(bundles, strategy="PACK")
        # A connection that this process had already may be to several machines, which loopback does not join.
        is_alone = config.cluster.address is None and len(alive) == 1
        made = Cluster(node_gpus > 0, group, places, logs, name, is_alone)
        try:
            if not group.wait(PLACEMENT_TIMEOUT_S):
                raise ValueError(
                    f"cluster.address: expected {_listed(bundles)} free, each on one machine, got no placement within "
                    f"{PLACEMENT_TIMEOUT_S:g} s"
                )
            nodes = placement_group_table(group)["bundles_to_node_id"]
            made.nodes = [nodes[b] for b in range(len(bundles))]
            if node_gpus > 0:
                num_units = 1 + max(place.bundle for (role, _), place in places.items() if role == "rank")
                made.places = by_node(places, made.nodes, num_units)
            yield made
        finally:
            for actor in list(made.actors):
                made.kill(actor)
            remove_placement_group(group)


def places_of(config: ScaledRun, node_gpus: int) -> tuple[list[dict[str, float]], dict[tuple[Role, int], Place]]:
    """The bundles to reserve, and each actor's place in them, on machines of `node_gpus` GPUs (0: places are CPUs).

    Ray keeps a bundle on one machine, so ranks come in bundles of whole tensor- and expert-parallel groups (`unit_of`).
    Raises ValueError where colocated engines need more GPUs than the ranks have, or a TP group more than a machine;
    logs a line where EP or CP groups do.
    """
    ranks, engines = config.training.num_ranks, config.rollout.num_engines
    width = config.rollout.tensor_parallel
    places: dict[tuple[Role, int], Place] = {}
    if node_gpus == 0:
        for i in range(ranks):
            places["rank", i] = Place(i)
        for i in range(engines):
            places["engine", i] = Place(ranks + i)
        return [{"CPU": 1.0} for _ in range(ranks + engines)], places
    is_colocated = config.cluster.placement == "colocated"
    config.require_shared_gpus()
    unit = unit_of(config, node_gpus)
    for line in unit.spans:
        logging.getLogger(__name__).warning("%s", line)
    size = unit.size
    num_units = -(-ranks // size)
    # A CPU for each rank, and one for each engine that lies over some of them.
    bundles = [{"CPU": (2.0 if is_colocated else 1.0) * size, "GPU": float(size)} for _ in range(num_units)]
    for i in range(ranks):
        places["rank", i] = Place(i // size, num_gpus=1.0)
    for i in range(engines):
        if is_colocated:
            # No num_gpus: Ray gave the GPUs to the ranks, and `_environment` names them to the engine.
            # All in one bundle, as `unit_of` makes `size` a multiple of `width`.
            places["engine", i] = Place(i * width // size, shares=tuple(range(i * width, (i + 1) * width)))
        else:
            places["engine", i] = Place(num_units + i, num_gpus=float(width))
            bundles.append({"CPU": 1.0, "GPU": float(width)})
    return bundles, places


def by_node(
    places: dict[tuple[Role, int], Place], nodes: Sequence[str], num_units: int
) -> dict[tuple[Role, int], Place]:
    """The places with the ranks' `num_units` bundles sorted by machine; `nodes` has the machine of each bundle.

    Neighbours then share machines as far as possible: pipeline stages, replicas, EP groups larger than a machine.
    """
    own = nodes[:num_units]
    # First the machines with the most bundles: one with few, whose other GPUs are taken, would shift groups off the
    # full ones. Among equals, the order of their first bundle.
    order = sorted(range(num_units), key=lambda b: (-own.count(own[b]), own.index(own[b]), b))
    return {
        actor: replace(place, bundle=order[place.bundle]) if place.bundle < num_units else place
        for actor, place in places.items()
    }


def _check_resources(config: ScaledRun, bundles: list[dict[str, float]]) -> None:
    have = ray.cluster_resources()
    for kind in ("GPU", "CPU"):
        needed = sum(bundle.get(kind, 0.0) for bundle in bundles)
        if needed > have.get(kind, 0.0):
            raise ValueError(
                f"training.num_ranks: expected a cluster with {needed:g} {kind}s for {config.training.num_ranks} ranks "
                f"and {config.rollout.num_engines} engines, got {have.get(kind, 0.0):g}"
            )


def _listed(bundles: list[dict[str, float]]) -> str:
    """The bundles in words, equal ones together: 4 x (8 CPUs and 8 GPUs)."""
    numbers = Counter(" and ".join(f"{num:g} {kind}s" for kind, num in bundle.items()) for bundle in bundles)
    return ", ".join(f"{num} x ({bundle})" for bundle, num in numbers.items())


class Worker:
    """The base of every actor: its output goes to a file of the run, if the run's folder is on this machine."""

    def __init__(self, log: str):
        with contextlib.suppress(FileNotFoundError):
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            # Descriptors, not sys.stdout: libraries in C++ and child processes write to them too.
            os.dup2(file, 1)
            os.dup2(file, 2)

    def devices(self) -> str:
        """The GPUs that Ray gave to this actor, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def cpu_seconds(self) -> tuple[int, float]:
        """The process id, and the processor time that it and its children have used so far, in s."""
        own = psutil.Process()
        total = 0.0
        # Under tensor parallelism vLLM's workers are children of the engine's process.
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return own.pid, total

    def work(self, parcel: Parcel, number: int) -> Parcel:
        """A function of its arguments and this actor's number, both in the parcel; see `sources.RankGroup.ask`."""
        function, arguments = unpack(parcel, shared=True)
        return pack(function(*arguments, number))

    def pid(self) -> int:
        """The process id, for tests that kill it."""
        return os.getpid()
