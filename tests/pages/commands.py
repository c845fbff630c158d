"""docs/reference/commands.md and config.md; `python -m tests.pages.commands` writes both from the commands."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from firstorder.cli import app
from firstorder.worlds import Schemas
from lab.config.load import load, to_yaml

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"


def commands() -> str:
    """The output of `firstorder COMMAND --help`, a section per command."""
    group = typer.main.get_command(app)
    width = {"terminal_width": 100, "max_content_width": 100}
    parts = [
        "# Commands\n\n<!-- Written by `python -m tests.pages.commands`. -->\n\n"
        "The help of every command, as `firstorder COMMAND --help` prints it. In a checkout the command is\n"
        "`.venv/bin/firstorder`.\n"
    ]
    for name in group.commands:  # pyright: ignore[reportAttributeAccessIssue]
        told = CliRunner().invoke(app, [name, "--help"], prog_name="firstorder", **width)
        assert told.exit_code == 0, told.output
        parts.append(f"## firstorder {name}\n\n```text\n{told.output.strip()}\n```\n")
    return "\n".join(parts)


def config() -> str:
    """The complete configs of one run of each world, every field with its meaning."""
    parts = [
        "# Config schema\n\n<!-- Written by `python -m tests.pages.commands`. -->\n\n"
        "Every field of a run's config, with its meaning above it. The values are those of one config: other kinds\n"
        "of task, defect or correction have other fields. `--print-config` prints this for any config, and an unknown\n"
        "field gives a one-line error with the nearest name.\n"
    ]
    for title, path in (("Sandbox", "configs/demo/none.yaml"), ("Cluster", "configs/scaled/minirl/n8_r3.yaml")):
        text = to_yaml(load(ROOT / path, [], Schemas()))
        parts.append(f"## {title}: `{path}`\n\n```yaml\n{text.strip()}\n```\n")
    return "\n".join(parts)


PAGES = {"commands.md": commands, "config.md": config}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
