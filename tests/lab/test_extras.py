"""The advice to install an extra is one that can be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import extras


def test_the_advice_is_of_the_kind_of_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout the checkout is installed; where there is none, the wheel."""
    assert extras.how_to_install("data") == "pip install -e '.[data]' in the checkout"
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path / "pyproject.toml")
    assert extras.how_to_install("data").startswith("pip install 'FILE.whl[data]'")
