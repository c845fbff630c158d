"""Scripts that start a run on a cluster, from the config alone: an sbatch file, or a `ray job submit`.

They name no machine: nodes and GPUs come from `cluster:`, the rest from the caller or from Slurm itself.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab.config.load import read_mapping
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
# pyxis cuts its list of mounts at commas and colons, and has a shell read each one again.
_UNMOUNTABLE = re.compile(r"""[\s,:"$`\\]""")


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

    Raises ConfigError for an option that a Ray job does not use, a file that it does not take along, an output that
    ends with it, a path that a container cannot have, and an address that the script would not use.
    """
    mounts: list[str] = []
    if config.cluster.address not in (None, "auto"):
        raise ConfigError(
            f"cluster.address: expected null or auto, as the run joins the Ray of its script or job, got "
            f"{config.cluster.address}"
        )
    if kind == "ray":
        unused = [name for name in ("partition", "account", "time", "container") if getattr(options, name) is not None]
        if unused:
            raise ConfigError(f"--{unused[0]}: expected only with --kind slurm, got it with --kind ray")
        _require_portable(config, path)
    elif options.container is not None:
        mounts = _mounts(config, path)
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
        mounts=mounts,
        output=config.output,
        train=shlex.join(train),
    )


def _read(config: ScaledRun, path: str) -> list[tuple[str, str]]:
    """Fields that name what the run reads, each with its path."""
    return [("CONFIG", path), ("model.path", config.model.path)] + [("task", name) for name in config.task.named_files]


def _require_portable(config: ScaledRun, path: str) -> None:
    """ConfigError for what a Ray job would not find in its copy of the folder, or would lose with it."""
    for field, name in _read(config, path):
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


def _mounts(config: ScaledRun, path: str) -> list[str]:
    """The absolute paths, none in another, that a container needs besides this folder; ConfigError for an impossible
    one.
    """
    named = [*_read(config, path), *(("CONFIG", name) for name in _bases(path)), ("output", config.output)]
    for field, name in named:
        is_elsewhere = os.path.normpath(name).split("/")[0] == ".."
        if is_elsewhere or (os.path.isabs(name) and ".." in Path(name).parts):
            raise ConfigError(
                f"{field}: expected a path in this folder, or an absolute one without .., for --container; got {name}"
            )
    # Files themselves, not their folders: a home folder, say, would bring its own Python packages into the container.
    roots = [(field, os.path.normpath(name)) for field, name in named if os.path.isabs(name)]
    roots += _behind_links(named, [name for _, name in roots])
    for field, name in roots:
        if name == "/" or _UNMOUNTABLE.search(name):
            raise ConfigError(
                f"{field}: expected a path that pyxis can mount, not / and without blanks, commas, colons, double "
                f"quotes, $, ` and \\, for --container; got {name}"
            )
    names = {name for _, name in roots}
    return sorted(name for name in names if not any(_is_in(name, other) for other in names - {name}))


def _bases(path: str) -> list[str]:
    """The files that CONFIG starts from by `base:`, one by way of another."""
    found: list[str] = []
    # A config that is no file here is one of those that come with firstorder, which the image has too.
    while Path(path).exists() and (base := read_mapping(Path(path)).get("base")) is not None:
        path = os.path.normpath(Path(path).parent / base)
        found.append(path)
    return found


def _behind_links(named: Sequence[tuple[str, str]], mounted: Sequence[str]) -> list[tuple[str, str]]:
    """Where the symbolic links lead that a container meets on the way to what is named, or in it: it keeps a link's
    text, as in a Hugging Face cache, whose models are links to blobs.
    """
    roots, found = [os.getcwd(), *mounted], []
    waiting = [(field, os.path.normpath(Path(roots[0], name))) for field, name in named]
    seen = set()
    while waiting:
        field, path = waiting.pop()
        if path in seen or not os.path.exists(path):  # not on this machine, or links in a circle
            continue
        seen.add(path)
        # The links above a mounted path are followed when it is mounted, those below it in the container.
        outermost = min((root for root in roots if _is_in(path, root)), key=len)
        for target in _targets(path, outermost):
            waiting.append((field, target))
            if not any(_is_in(target, root) for root in roots):
                roots.append(target)
                found.append((field, target))
    return found


def _targets(path: str, root: str) -> list[str]:
    """Where the first link between the root and the path leads; without one, the folders that links in it need."""
    steps = [path, *map(str, Path(path).parents)]
    for step in reversed(steps[: steps.index(root)]):
        if os.path.islink(step):
            return [os.path.normpath(Path(step).parent / os.readlink(step) / os.path.relpath(path, step))]
    if not os.path.isdir(path):
        return []
    linked = [Path(os.path.normpath(Path(path) / os.readlink(one))) for one in os.scandir(path) if one.is_symlink()]
    return sorted({str(target if target.is_dir() else target.parent) for target in linked if target.exists()})


def _is_in(path: str, folder: str) -> bool:
    """Whether the path is the folder or in it, by their names."""
    return Path(path).is_relative_to(folder)
