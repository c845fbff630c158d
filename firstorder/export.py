"""`firstorder export`: a sandbox model as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG_OR_RUN", help="A sandbox config, or the folder of a sandbox run.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where to write the Hugging Face folder.")],
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Write a sandbox model as a Hugging Face folder (config.json, model.safetensors), for cluster runs to start from.

    Of a config it is the model that RL would start from, after the cold start (from its cache where that was done);
    of a run folder, or of a folder of runs (its newest), the model of the newest checkpoint. transformers, vLLM and
    `firstorder filter` open the folder; its tokenizer goes along. A folder that already holds exactly this export is
    left as it is; any other content is refused.

    \b
    Examples:
      firstorder export configs/demo_scaled/model.yaml --to runs/demo-model
      firstorder export runs/demo-r3 --to runs/trained-model
    """
    from firstorder.worlds import Schemas
    from sandbox import export as exports

    config, folder = exports.open_source(_newest(source), Schemas())
    if folder is None:
        model, what = exports.initial(config), "the model that RL starts from"
    else:
        model, step = exports.trained(folder, config)
        what = f"the model after step {step} of {folder.path}"
    written = exports.write(model, exports.tokenizer_of(config), to)
    typer.echo(f"{to}" if written else f"{to} (already there: {what})")


def _newest(path: Path) -> Path:
    """The path itself, or the newest run folder in it where it is a folder of runs."""
    inside = sorted(config.parent for config in path.glob("*/config.yaml"))
    return inside[-1] if inside and not (path / "config.yaml").is_file() else path
