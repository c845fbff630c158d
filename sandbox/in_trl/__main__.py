"""Trains a config of the sandbox in TRL: `python -m sandbox.in_trl CONFIG [--dotted.name VALUE ...]`.

`--trl.NAME VALUE` sets an argument of GRPOConfig, over the one that the config is translated to.
"""

from __future__ import annotations

import sys
from typing import Any

from lab.config.load import apply, load, parse_overrides
from lab.ending import last_words
from lab.recording import NonFiniteError
from lab.strict import ConfigError
from sandbox.config import SandboxRun
from sandbox.in_trl.generation import NEEDED, is_installed
from sandbox.in_trl.training import train

OWN = "trl."


def parsed(words: list[str]) -> tuple[SandboxRun, dict[str, Any]]:
    """The config, and the arguments of GRPOConfig that are named beside it. Raises ConfigError."""
    path, pairs = words[0], parse_overrides(words[1:])
    own: dict[str, Any] = {}
    apply(own, [(key.removeprefix(OWN), text) for key, text in pairs if key.startswith(OWN)])
    others = [f"--{key}={text}" for key, text in pairs if not key.startswith(OWN)]
    return load(path, others, {"sandbox": SandboxRun}), own


def main(words: list[str]) -> None:
    """Runs one config, and prints the last words of `firstorder train`."""
    if not words or words[0].startswith("-"):
        sys.exit(str(__doc__))
    if not is_installed():
        sys.exit(f"error: expected {', '.join(NEEDED)}, not all of them are there (pip install 'firstorder[bench]')")
    try:
        folder = train(*parsed(words))
    except (ConfigError, NonFiniteError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(last_words(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
