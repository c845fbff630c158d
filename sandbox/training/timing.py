"""The time of each part of a global step: a timer around the engines' methods, with the metric names of both worlds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from sandbox.engines.engine import SandboxEngine
from sandbox.training.engine import SandboxTrainingEngine

ROLLOUT = {"generate": "timing_s/gen", "load_weights": "timing_s/push"}
TRAINING = {
    "score": "timing_s/old_log_prob",
    "score_reference": "timing_s/ref",
    "update": "timing_s/update_actor",
}


class Stopwatch:
    """Seconds by metric name since the last `start`; a part that was not called has none."""

    def __init__(self, rollout: SandboxEngine, training: SandboxTrainingEngine) -> None:
        self._seconds: dict[str, float] = {}
        for engine, names in ((rollout, ROLLOUT), (training, TRAINING)):
            for method, metric in names.items():
                # On the instance: the process's other engines are not timed.
                setattr(engine, method, self._timed(getattr(engine, method), metric))
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begins a global step."""
        self._seconds, self._began = {}, time.perf_counter()

    def take(self) -> dict[str, float]:
        """The seconds of the step that ends now, by part, and its total as `timing_s/step`."""
        return {**self._seconds, "timing_s/step": time.perf_counter() - self._began}

    def _timed(self, method: Callable[..., Any], metric: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                # Added up: turns and further rounds of prompts call `generate` several times per global step.
                self._seconds[metric] = self._seconds.get(metric, 0.0) + time.perf_counter() - start

        return timed


__all__ = ["Stopwatch"]
