"""Laws of sandbox/ledger/cells.py: what a cell's key depends on, what an arm does to its regime, what a row keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.strict import ConfigError
from sandbox.claims import REGIMES
from sandbox.ledger.cells import NUM_WINDOWS, Cells, Regime, cell, key, windows
from sandbox.ledger.claim import Arm

REGIME = REGIMES[0]
R3 = Arm("R3", (("algorithm.replay.mode", "R3"),))


def test_a_key_depends_on_what_is_run_and_on_nothing_else() -> None:
    """Arms that state the same have the same key, whatever their names; every change of config or seed has another."""
    assert key(REGIME, Arm("a"), 0) == key(REGIME, Arm("b"), 0)
    keys = [key(REGIME, Arm("a"), 0), key(REGIME, Arm("a"), 1), key(REGIME, R3, 0), key(REGIMES[1], R3, 0)]
    keys += [key(REGIME, Arm("a", (), 2), 0), key(REGIME, Arm("a"), 0, (("num_steps", "8"),))]
    assert len(set(keys)) == len(keys)
    assert cell(REGIME, R3, 0).key == key(REGIME, R3, 0)


def test_an_arm_may_start_each_seed_from_a_model_of_its_own() -> None:
    """The cold start's seed, and with it the first weights, is then the cell's; else that of the regime."""
    own = replace(R3, own_cold_start=True)
    starts = {arm: [cell(REGIME, arm, s).config.cold_start for s in range(3)] for arm in (R3, own)}
    assert [block.seed for block in starts[own] if block] == [0, 1, 2]
    assert [block.seed for block in starts[R3] if block] == [0, 0, 0]
    # Seed 0 is the run that there was before.
    assert key(REGIME, own, 0) == key(REGIME, R3, 0) and key(REGIME, own, 1) != key(REGIME, R3, 1)


def test_a_branch_has_the_key_of_its_start_as_well() -> None:
    """It is another cell than the run of its own config, and than a branch from elsewhere; its start has the seed."""
    one, two = (replace(R3, made_by="branch", start=start) for start in (Arm("a", (), 4), Arm("b", (), 2)))
    keys = [key(REGIME, arm, 3) for arm in (R3, one, two)] + [key(REGIME, one, 4)]
    assert len(set(keys)) == len(keys)
    made = cell(REGIME, one, 3)
    assert made.key == keys[1] and made.start is not None and cell(REGIME, R3, 3).start is None
    assert (made.start.seed, made.start.algorithm.batch.num_minibatches) == (3, 4)
    assert (made.start.algorithm.replay.mode, made.config.algorithm.replay.mode) == ("none", "R3")


@pytest.mark.parametrize(("made_by", "start"), [("branch", None), ("training", R3)])
def test_a_branch_and_nothing_else_has_a_start(made_by: Literal["training", "branch"], start: Arm | None) -> None:
    """A branch without an arm to start from, or a run with one, is one line."""
    with pytest.raises(ValueError, match=r"start: expected an arm for a branch and none for others, got (none|R3)"):
        Arm("x", made_by=made_by, start=start)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_arms_of_all_n_take_the_same_updates_on_the_same_mini_batches(n: int) -> None:
    """Updates, responses per mini-batch, and updates between evaluations do not depend on N."""
    base, config = cell(REGIME, Arm("a"), 0).config, cell(REGIME, Arm("a", (), n), 0).config
    batch, one = config.algorithm.batch, base.algorithm.batch
    assert batch.num_minibatches == n
    assert config.num_steps * n == base.num_steps
    assert batch.num_prompts // n == one.num_prompts
    assert config.evaluation.every * n == base.evaluation.every
    assert config.verdict.window * n == base.verdict.window
    assert config.verdict.patience * n == base.verdict.patience


def test_numbers_of_steps_are_rounded_down() -> None:
    """At N = 16 a rule's 40 updates are 2 steps, 32 updates; so are evaluations. Rows have been made like that."""
    config = cell(REGIME, Arm("a", (), 16), 0).config
    assert (config.verdict.window, config.verdict.patience, config.evaluation.every) == (2, 2, 2)
    assert config.num_steps * 16 == cell(REGIME, Arm("a"), 0).config.num_steps


def test_an_arm_that_does_not_divide_the_updates_is_refused() -> None:
    """N that does not divide the number of steps is one line that names regime, arm and field."""
    with pytest.raises(ConfigError, match="regime paper, arm odd: num_steps: expected a multiple of N = 7"):
        cell(REGIME, Arm("odd", (), 7), 0)


def test_a_change_that_does_not_fit_names_the_arm() -> None:
    """A misspelt key in an arm is one line with the arm's name."""
    with pytest.raises(ConfigError, match=r"arm typo: algorithm\.replay\.mod: unknown key"):
        cell(REGIME, Arm("typo", (("algorithm.replay.mod", "R3"),)), 0)


@given(st.integers(1, 90), st.integers(0, 90))
def test_windows_are_means_of_their_steps(num_steps: int, last: int) -> None:
    """Each window is the mean over the steps s with floor((s - 1) W / steps) = w, null where there is none."""
    metrics = [{"step": s, "x": float(s * s)} for s in range(1, min(last, num_steps) + 1)]
    found = windows(metrics, "x", num_steps)
    assert len(found) == NUM_WINDOWS
    for w, value in enumerate(found):
        inside = [m["x"] for m in metrics if (m["step"] - 1) * NUM_WINDOWS // num_steps == w]
        if inside:
            assert value == pytest.approx(sum(inside) / len(inside), rel=1e-3)  # kept to 4 digits
        else:
            assert value is None


def test_windows_leave_out_what_is_no_number() -> None:
    """null, missing and non-finite values count as none; step 0 belongs to the first window."""
    metrics = [{"step": 0, "x": 4.0}, {"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": float("inf")}]
    assert windows(metrics, "x", 20)[:4] == [4.0, None, None, None]


def test_a_torn_row_is_left_out_and_a_damaged_one_named(tmp_path: Path) -> None:
    """The half-written line of a killed process is no row; damage inside is one line with its number."""
    store = Cells(tmp_path / "cells.jsonl")
    assert store.rows() == {}
    store.add({"cell": "a", "x": 1})
    store.add({"cell": "b", "x": 2})
    store.add({"cell": "a", "x": 3})
    with open(store.path, "a", encoding="utf-8") as file:
        file.write('{"cell": "c"')
    assert {name: found["x"] for name, found in store.rows().items()} == {"a": 1, "b": 2}
    store.add({"cell": "d", "x": 4})
    assert list(store.rows()) == ["a", "b", "d"]
    store.path.write_bytes(b"nonsense\n")
    with pytest.raises(ValueError, match=r"cells.jsonl:1: expected the row of a cell, got b'nonsense'"):
        store.rows()


def test_a_regime_is_its_files_words_and_config(tmp_path: Path) -> None:
    """The comment at the top of the file is the regime's sentence, the rest its config over `base`."""
    (tmp_path / "base.yaml").write_text("num_steps: 4\nseed: 3\n")
    (tmp_path / "own.yaml").write_text("# own: first line,\n# second line.\nbase: base.yaml\nseed: 5\n# not this\n")
    regime = Regime.open(tmp_path / "own.yaml")
    assert (regime.name, regime.words) == ("own", "own: first line, second line.")
    assert json.loads(regime.stated) == {"num_steps": 4, "seed": 5}
