"""The module search path that Ray gives to the workers of this process."""

from __future__ import annotations

import os
import sys

from ray.job_config import JobConfig


class OwnPath(JobConfig):
    """A job whose workers search the script's folder and the working folder only if this process searches them.

    Ray puts the working folder first on every worker's path. The command never looks there, where a user's lab.py would
    hide ours (firstorder/__main__.py), and neither may its workers.
    """

    def __init__(self) -> None:
        working, script = os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))
        searched = {path or working for path in sys.path}
        super().__init__(_py_driver_sys_path=[path for path in (script, working) if path in searched])

    def _runtime_env_has_working_dir(self) -> bool:
        # By this alone Ray decides whether it adds folders of its own choice.
        return True


__all__ = ["OwnPath"]
