"""A group of actors of one run: their processes, and the end of them."""

from __future__ import annotations

from typing import Any

from lab.ray_session import fetch
from scaled.cluster.ray_cluster import Cluster


class ActorGroup:
    """Actors at places of the cluster, by number; a subclass starts them."""

    cluster: Cluster
    actors: list[Any]

    def pids(self) -> list[int]:
        """Process ids of the actors."""
        return fetch([actor.pid.remote() for actor in self.actors])

    def close(self) -> None:
        """Ends the actors' processes."""
        for actor in self.actors:
            self.cluster.kill(actor)
        self.actors = []


__all__ = ["ActorGroup"]
