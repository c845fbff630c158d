"""`firstorder` for tests/fuzz/cluster_kills.py: a file says in which stage of a step the run is.

`python -m tests.fuzz.stages train CONFIG ...` is that command. The groups of ranks and engines, and the checkpoints,
write the stage's name into the file that MARK_FILE names as they begin, and the name before as they end.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK_FILE = "FIRSTORDER_CLUSTER_KILLS_STAGE"
BETWEEN, SAVE, PUSH = "between two stages", "save", "push"


class Mark:
    """The file that has the name of the stage; it is replaced, so that no reader sees half a name."""

    def __init__(self, path: Path) -> None:
        self.path, self.stage = path, BETWEEN
        self.set(BETWEEN)

    def set(self, stage: str) -> None:
        """The run is in this stage now."""
        part = self.path.with_suffix(".part")
        part.write_text(stage)
        os.replace(part, self.path)
        self.stage = stage

    def around(self, stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, during which the run is in that stage; a stage within another one hides it."""

        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            before = self.stage
            self.set(stage)
            try:
                return method(*args, **kwargs)
            finally:
                self.set(before)

        return marked


def install(mark: Mark) -> None:
    """Every stage of this process's cluster runs is marked."""
    from scaled.cluster.rollout_group import RolloutGroup
    from scaled.cluster.saving import Checkpoints
    from scaled.cluster.training_group import TrainingGroup

    stages: tuple[tuple[type, str, str], ...] = (
        (RolloutGroup, "generate", "sampling"), (RolloutGroup, "score", "scoring"), (RolloutGroup, "ask", "scoring"),
        (TrainingGroup, "score", "scoring"), (TrainingGroup, "ask", "scoring"), (TrainingGroup, "update", "update"),
        (RolloutGroup, "load_weights", PUSH), (Checkpoints, "save", SAVE),
    )  # fmt: skip
    for group, method, stage in stages:
        setattr(group, method, mark.around(stage, getattr(group, method)))


if __name__ == "__main__":
    from firstorder.cli import main

    install(Mark(Path(os.environ[MARK_FILE])))
    sys.exit(main(sys.argv[1:]))
