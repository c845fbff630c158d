"""Configs that come with the project are found by name, from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.config import shipped
from lab.config.load import read
from lab.strict import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_config_of_the_project_has_a_name_and_words() -> None:
    files = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}

    assert set(shipped.names()) == files
    assert all(len(shipped.words(name)) > 10 for name in files)
    # The first sentence alone, a question's too: the next line is the command.
    assert shipped.words("audit/claims").endswith(" those that train worst?")


@pytest.mark.parametrize("word", ["demo/r3", "demo/r3.yaml", "configs/demo/r3.yaml", "configs/demo/r3"])
def test_a_name_reads_as_its_file(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert read(word) == read(ROOT / "configs/demo/r3.yaml")


def test_a_file_of_ones_own_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke.yaml").write_text("name: mine\n", encoding="utf-8")

    assert read("smoke.yaml") == {"name": "mine"}
    assert read("smoke")["name"] == "smoke"


def test_neither_file_nor_name_is_one_line_with_the_nearest_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as error:
        read("demo/r33.yaml")

    expected = "demo/r33.yaml: no such file, and no such name in `firstorder configs`; did you mean 'demo/r3'?"
    assert str(error.value) == expected


def test_a_name_cannot_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match="no such file"):
        read("demo/../../pyproject")
