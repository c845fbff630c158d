"""Laws of sandbox/ledger/branch.py: one state for all arms of a seed, and a row that is that state's and the arm's."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.recording import NonFiniteError
from sandbox.ledger import branch, gradients, queue
from sandbox.ledger.branch import SampleSizes, branch_row, state_of
from sandbox.ledger.cells import Cell, Regime, cell
from sandbox.ledger.claim import Arm
from sandbox.ledger.measures import probe
from sandbox.ledger.queue import run_cell
from sandbox.run import run
from tests.forks import begin, end
from theory.contracts import Prompt
from theory.loop import StepResult, global_step

pytestmark = pytest.mark.unchecked

CONFIG = """# tiny: sums of two figures, from a model that has seen a few.
backend: sandbox
num_steps: 4
task: {kind: arithmetic, min_digits: 1, max_digits: 1, num_held_out: 1}
model: {num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1, num_experts: 4, expert_size: 16}
cold_start: {target_accuracy: 0.2, check_every: 10, num_check: 64, learning_rate: 1e-2, cache: CACHE}
algorithm:
  objective: {preset: grpo}
  replay: {predictor: {num_positions: 4}}
  batch: {num_prompts: 2, num_responses: 4, num_minibatches: 1}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-2, warmup_steps: 8}
evaluation: {every: 4, num_samples: 64, max_prompts: 1}
checkpoint: {every: 1, keep: 99}
traces: {every: 4}
logging: {loggers: []}
"""
RUN = Arm("run", (), 4, own_cold_start=True)
NOISE = ("engine.defects", "[{kind: router_noise, std: 0.5}]")
BUDGET = SampleSizes(num_minibatches=4, rounds=2, reference=64, late_reference=64, kl=16)
FIRST, LATER = 0, 1
"""Seeds whose states are before any update, and after eight."""


def arm(name: str, *changes: tuple[str, str], n: int = 2) -> Arm:
    """A branch of RUN with these changes."""
    return Arm(name, changes, n, "branch", own_cold_start=True, start=RUN)


EXACT, NOISY = arm("exact"), arm("noisy", NOISE)
R3 = arm("R3", NOISE, ("algorithm.replay.mode", "R3"))


Step = tuple[dict[str, Tensor], StepResult]
"""The training engine's state before a global step, and what the step produced."""
UPDATES = (0, 8, 12, 16, 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the cold starts and of the regime's file."""
    path = tmp_path_factory.mktemp("branch")
    (path / "tiny.yaml").write_text(CONFIG.replace("CACHE", str(path / "cold_start")))
    return path


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "PIECE", 32)
    monkeypatch.setattr(branch, "NUM_UPDATES", UPDATES)


def cell_of(folder: Path, one: Arm, seed: int) -> Cell:
    return cell(Regime.open(folder / "tiny.yaml"), one, seed)


def row_of(folder: Path, one: Arm, seed: int, root: Path | None = None) -> dict[str, Any]:
    """The cell's row; states are shared below the folder unless a root of their own is given."""
    return branch_row(cell_of(folder, one, seed), str(root or folder), compiled=False, budget=BUDGET)


@functools.cache
def kept_row(folder: Path, one: Arm, seed: int) -> dict[str, Any]:
    """The same, made once for all tests."""
    return row_of(folder, one, seed)


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("seconds")}


@pytest.mark.parametrize("seed", [FIRST, LATER])
def test_a_state_is_where_its_run_stands(folder: Path, tmp_path: Path, seed: int) -> None:
    """Weights, moments and update count are the bits of the arm's own run after as many updates."""
    start = cell_of(folder, EXACT, seed).start
    assert start is not None
    steps = UPDATES[seed] // 4
    state = state_of(start, folder / "states", BUDGET)
    assert int(state.tensors["num_updates"]) == state.num_updates == 4 * steps
    assert any(name.startswith("optimizer.exp_avg") for name in state.tensors) == (steps > 0)
    if steps:
        whole = run(start.model_copy(update={"num_steps": steps, "output": str(tmp_path)}), progress="none")
        checkpoint = whole.latest_checkpoint()
        assert checkpoint is not None and checkpoint.step == steps
        same = {name: torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in state.tensors.items()}
        assert all(same.values()), [name for name, is_same in same.items() if not is_same]


def test_a_row_is_its_cells(folder: Path, tmp_path: Path) -> None:
    """Made twice, from states made twice, a row has the same bits; another arm and another seed have others."""
    first, again = kept_row(folder, NOISY, LATER), row_of(folder, NOISY, LATER, tmp_path)
    assert without_times(first) == without_times(again)
    for other in (kept_row(folder, EXACT, LATER), kept_row(folder, NOISY, LATER + 5)):
        assert other["cell"] != first["cell"] and other["probes"]["raw_cosine"] != first["probes"]["raw_cosine"]


def test_a_row_has_what_claims_read(folder: Path) -> None:
    """Identity, series, evaluations and probes, by `measures.probe` too; an exact engine's KL is 0."""
    row, exact = kept_row(folder, NOISY, LATER), kept_row(folder, EXACT, LATER)
    assert (row["arm"], row["seed"], row["num_steps"], row["last_step"]) == ("noisy", LATER, 2, 2)
    assert [step for step, _ in row["evaluations"]] == [0, 2]
    assert [value for _, value in row["evaluations"]] == [
        row["probes"]["accuracy_before"],
        row["probes"]["accuracy_after"],
    ]
    assert (row["verdict"], row["rules"], row["first_step"]) == ("undecided", [], None)
    assert sum(value is not None for value in row["series"]["actor/entropy"]) == 2
    for name in ("raw_cosine", "late_raw_cosine"):
        assert probe(name, "", "1").of(row) == row["probes"][name] != 0.0
    assert row["probes"]["accuracy_before"] == exact["probes"]["accuracy_before"]
    for name in ("kl_before", "kl_after"):
        assert exact["probes"][name] == pytest.approx(0.0, abs=1e-9) and row["probes"][name] > 1e-3


@pytest.mark.parametrize(("mode", "n"), [("R2", 2), ("Pr2", 2), ("Pr3", 2), ("Pr3", 1)])
def test_every_replay_mode_has_a_row(folder: Path, mode: str, n: int) -> None:
    """Modes with a predictor start with a fresh one; with N = 1 there is no later mini-batch to look at."""
    row = row_of(folder, arm(mode, NOISE, ("algorithm.replay.mode", mode), n=n), LATER)
    assert row["last_step"] == 4 // n
    assert ("late_raw_cosine" in row["probes"]) == (n > 1)
    assert all(math.isfinite(value) for name, value in row["probes"].items() if name.endswith("raw_cosine"))


def steps_of(one: Arm, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> list[Step]:
    """Every global step of the arm's branch."""
    found: list[Step] = []

    def spied(*arguments: Any) -> StepResult:
        before = arguments[3].state_tensors()
        found.append((before, global_step(*arguments)))
        return found[-1][1]

    patch.setattr(branch, "global_step", spied)
    row_of(folder, one, seed)
    return found


def test_arms_start_from_one_state_and_see_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms of N have the state's bits first, and the same prompts; with one engine the first responses, too."""
    exact, noisy, r3 = (steps_of(one, LATER, folder, monkeypatch) for one in (EXACT, NOISY, R3))
    start = cell_of(folder, EXACT, LATER).start
    assert start is not None
    state = state_of(start, folder / "states", BUDGET).tensors
    for other in (exact, noisy, r3):
        assert state.keys() == other[0][0].keys()
        assert all(torch.equal(tensor, other[0][0][name]) for name, tensor in state.items())
        assert [prompts_of(step) for step in exact] == [prompts_of(step) for step in other]
    tokens = [[r.tokens.tolist() for r in steps[0][1].rollouts.responses] for steps in (exact, noisy, r3)]
    assert tokens[0] != tokens[1] == tokens[2]
    another = steps_of(EXACT, LATER + 5, folder, monkeypatch)
    assert prompts_of(another[0]) != prompts_of(exact[0]) != prompts_of(exact[1])


def prompts_of(step: Step) -> list[Prompt]:
    return [response.prompt for response in step[1].rollouts.responses]


def test_a_branch_draws_problems_of_its_own(folder: Path) -> None:
    """The steps of training, gradients, references and the rest lie far from the run's own and from each other's."""
    start = cell_of(folder, EXACT, LATER).start
    assert start is not None
    purposes = ("training", "gradient", "reference", "late reference", "evaluation", "kl")
    firsts = sorted(branch._first_step(start, purpose) for purpose in purposes)
    assert firsts[0] > 1000 and all(b - a > 1000 for a, b in itertools.pairwise(firsts)) and firsts[-1] < 2**40


def test_a_killed_state_is_made_again(folder: Path, tmp_path: Path) -> None:
    """After kill -9 in the middle nothing is at the state's place; the next process makes it whole, and once."""
    expected = kept_row(folder, NOISY, FIRST)

    def act() -> int:
        branch.reference = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        row_of(folder, NOISY, FIRST, tmp_path)
        return 0

    assert end(begin(act, Path(os.devnull))) == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "states").iterdir()]
    assert [name for name in left if name.startswith(".tmp-")] and [name for name in left if name.endswith(".lock")]
    assert not [name for name in left if not name.startswith(".tmp-") and not name.endswith(".lock")]
    assert without_times(row_of(folder, NOISY, FIRST, tmp_path)) == without_times(expected)


def test_a_state_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second arm of the seed finds it, and asks for no run; a state of another budget is another."""
    start = cell_of(folder, EXACT, FIRST).start
    assert start is not None
    state_of(start, folder / "states", BUDGET)

    def refuse(*_: object) -> Iterator[None]:
        raise AssertionError("the state was made again")

    monkeypatch.setattr(branch, "_make", refuse)
    same = cell_of(folder, R3, FIRST).start
    assert same is not None
    state_of(same, folder / "states", BUDGET)
    with pytest.raises(AssertionError, match="made again"):
        state_of(same, folder / "states", SampleSizes(reference=256))


def test_a_gradient_that_is_not_finite_ends_the_branch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says in which step, and has the accuracy of the weights that were there."""
    calls: list[int] = []

    def breaking(*arguments: Any) -> StepResult:
        calls.append(1)
        if len(calls) == 2:
            raise NonFiniteError("actor/grad_norm is nan")
        return global_step(*arguments)

    monkeypatch.setattr(branch, "global_step", breaking)
    row = row_of(folder, EXACT, FIRST)
    assert (row["verdict"], row["rules"], row["first_step"], row["last_step"]) == ("collapsed", ["non_finite"], 2, 2)
    assert math.isfinite(row["probes"]["accuracy_after"])


def test_an_n_that_does_not_divide_the_states_updates_is_refused(folder: Path) -> None:
    """A run of N = 3 has no state after 8 updates, and says so in one line."""
    changes = (("algorithm.batch.num_prompts", "3"), ("algorithm.batch.num_minibatches", "3"))
    start = cell(Regime.open(folder / "tiny.yaml"), RUN, LATER, changes).config
    with pytest.raises(ValueError, match="num_minibatches: expected N that divides 8 updates, got 3"):
        state_of(start, folder / "states", BUDGET)


def test_the_queue_makes_a_branch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of a branch is not trained as a run: its row has the branch's probes and says which kernels it had."""
    monkeypatch.setattr(queue, "branch_row", functools.partial(branch_row, budget=BUDGET))
    row = run_cell(cell_of(folder, NOISY, LATER), str(folder), compiled=False)
    assert without_times(row) == without_times(kept_row(folder, NOISY, LATER))
    assert row["compiled"] is False and "accuracy_after" in row["probes"]
