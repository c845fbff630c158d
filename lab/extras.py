"""The command that installs what only a part of the commands needs."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml, from the checkout or the wheel: no package index has it."""
    if CHECKOUT.is_file():
        return f"pip install -e '.[{extra}]' in the checkout"
    return f"pip install 'FILE.whl[{extra}]', with the wheel that firstorder is from"


__all__ = ["how_to_install"]
