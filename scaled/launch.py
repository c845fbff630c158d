"""Scripts that start a run on a cluster, from the config alone: an sbatch file, or a `ray job submit`.

They name no machine: nodes and GPUs come from `cluster:`, the rest from the caller or from Slurm itself.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab.strict import ConfigError
from scaled.config import ScaledRun

TEMPLATES = Path(__file__).parent / "launch_templates"

RAY_PORT = 6379
"""Ray's own default for the head."""

LEFT_BEHIND = ("runs", ".git", ".venv")
"""Folders that a Ray job does not take along: they are large, and none of them is needed to start a run."""

_NAME = re.compile(r"[\w.@,:+-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d{1,2}){0,2}")
_IMAGE = re.compile(r"[\w./@:#+~-]+")


@dataclass(frozen=True)
class Options:
    """Facts outside the config: where on the cluster, for how long, in which container."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    container: str | None = None

    def __post_init__(self) -> None:
        # Slurm parses #SBATCH lines by its own rules and cannot quote a line break: only plain values pass.
        rules = (("partition", _NAME), ("account", _NAME), ("time", _TIME), ("container", _IMAGE))
        for name, pattern in rules:
            value = getattr(self, name)
            if value is not None and not pattern.fullmatch(value):
                raise ConfigError(f"--{name}: expected a value of the form {pattern.pattern}, got {value!r}")


def _yaml(text: str) -> str:
    """The text as a double-quoted string of YAML, in ASCII."""
    # Not JSON's escapes, which write a character beyond U+FFFF as two halves: PyYAML does not join them.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(
        c if " " <= c <= "~" else f"\\u{ord(c):04x}" if c <= "\uffff" else f"\\U{ord(c):08x}" for c in quoted
    )


def script(
    config: ScaledRun, path: str, overrides: Sequence[str], kind: Literal["slurm", "ray"], options: Options
) -> str:  # fmt: skip
    """The script; `path` and `overrides` are the words of `firstorder train`, quoted for the shell.

    Raises ConfigError for an option that a Ray job does not use, a file that it does not take along, and an output that
    ends with it.
    """
    if kind == "ray":
        unused = [name for name in ("partition", "account", "time", "container") if getattr(options, name) is not None]
        if unused:
            raise ConfigError(f"--{unused[0]}: expected only with --kind slurm, got it with --kind ray")
        _require_portable(config, path)
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        comment_start_string="{##",  # bash counts an array by ${#name[@]}
    )
    environment.filters |= {"quote": shlex.quote, "yaml": _yaml}
    cluster = config.cluster
    # A file name may start with a dash; `./` keeps it from being read as an option.
    path = f"./{path}" if path.startswith("-") else path
    # After the overrides, of which the last one wins: the run joins the Ray that the script starts.
    address = ["--cluster.address", "auto"]
    train = ["firstorder", "train", path, *overrides, *address, "--progress", "lines"]
    template = environment.get_template("slurm.sh.jinja" if kind == "slurm" else "ray_job.sh.jinja")
    return template.render(
        name=config.name,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node,
        num_gpus=cluster.num_nodes * cluster.gpus_per_node,
        left_behind=[f"/{name}/" for name in LEFT_BEHIND],
        port=RAY_PORT,
        object_store_bytes=int(cluster.object_store_gib * 2**30),
        options=options,
        train=shlex.join(train),
    )


def _require_portable(config: ScaledRun, path: str) -> None:
    """ConfigError for what a Ray job would not find in its copy of the folder, or would lose with it."""
    named = [("CONFIG", path), ("model.path", config.model.path)]
    named += [("task", name) for name in config.task.named_files]
    for field, name in named:
        # An absolute path is one on the nodes: only they know whether it exists.
        if Path(name).parts[:1] and Path(name).parts[0] in (*LEFT_BEHIND, ".."):
            raise ConfigError(
                f"{field}: expected a path in this folder, outside {', '.join(LEFT_BEHIND)}, which a Ray job leaves "
                f"behind, or an absolute one on every node; got {name}"
            )
    if not Path(config.output).is_absolute():
        raise ConfigError(
            "output: expected an absolute path in a folder that all nodes share, since a Ray job's own folder is "
            f"deleted with it; got {config.output}"
        )
