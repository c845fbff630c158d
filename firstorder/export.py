"""`firstorder export`: a model of either world as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug

if TYPE_CHECKING:
    from lab.config.run import RunConfig
    from lab.records import RunFolder


def export(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="The folder of a run, or a config of the sandbox.")
    ],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to write the Hugging Face folder.")],
    step: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The step whose checkpoint to export; the newest by default."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a model as a Hugging Face folder (config.json, safetensors) that transformers and vLLM open.

    Given a run folder, or a folder of runs (its newest run), it exports the newest checkpoint, or that of --step. A
    sharded checkpoint of the cluster is read tensor by tensor, without Megatron-core. Given a config of the sandbox, it
    exports the model that RL would start from, after the cold start (from the cache where there is one). The tokenizer
    is exported too. A folder that already holds exactly this export is left unchanged; any other content is refused.

    \b
    Examples:
      firstorder export configs/demo_scaled/model.yaml --to runs/demo-model
      firstorder export runs/demo-r3 --to runs/trained-model
      firstorder export runs/scaled-demo-bf16-r3 --step 4 --to runs/trained-on-the-cluster
    """
    from lab.config.naming import naming
    from lab.records import run_folders

    # Of a config's file, `run_folders` returns the path itself.
    path, config, folder = _opened(run_folders(source)[-1])
    with naming(path, config):
        if config.backend == "scaled":
            what, written = _of_the_cluster(source, config, folder, step, to)
        else:
            what, written = _of_the_sandbox(config, folder, step, to)
    # The path alone on stdout, for scripts.
    typer.echo(f"exported {what}" if written else f"already there: {what}", err=True)
    typer.echo(to)


def _of_the_sandbox(config: RunConfig, folder: RunFolder | None, step: int | None, to: Path) -> tuple[str, bool]:
    from lab.strict import ConfigError
    from sandbox import export as exports
    from sandbox.config import SandboxRun

    assert isinstance(config, SandboxRun)
    if folder is not None:
        model, found = exports.trained(folder, config, step)
        return f"the model after step {found} of {folder.path}", exports.write(model, exports.tokenizer_of(config), to)
    if step is not None:
        raise ConfigError(f"--step: expected the folder of a run for it, got a config and step {step}")
    written = exports.write(exports.initial(config), exports.tokenizer_of(config), to)
    return "the model that RL starts from", written


def _of_the_cluster(
    source: Path, config: RunConfig, folder: RunFolder | None, step: int | None, to: Path
) -> tuple[str, bool]:
    from lab.strict import ConfigError
    from scaled.config import ScaledRun
    from scaled.export import export as export_run

    assert isinstance(config, ScaledRun)
    if folder is None:
        raise ConfigError(
            f"{source}: expected the folder of a run on the cluster, got a config; its model.path "
            f"({config.model.path}) is where training starts"
        )
    found, written = export_run(folder, config, to, step)
    return f"the model after step {found} of {folder.path}", written


def _opened(path: Path) -> tuple[Path, RunConfig, RunFolder | None]:
    """A config with its YAML file; of a run folder, its own, together with the folder."""
    from firstorder.worlds import Schemas
    from lab.config.load import load
    from lab.records import RunFolder

    folder = RunFolder.open(path) if path.is_dir() else None
    file = path if folder is None else folder.path / "config.yaml"
    return file, load(file, [], Schemas()), folder
