"""The benchmark: the pieces of a global step beside transformers' and TRL's, and the cost of replay.

All sides run in one process, in turn in every round, so that a change of the machine's speed affects all of them alike.
Ratios are this row's time over that of the row it is compared with: above 1 means that this row is slower.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from lab.extras import how_to_install
from lab.manifest import manifest
from sandbox.bench import reference_trl
from sandbox.bench.exact_training import LENGTH, NUM_UPDATES, moe_updates, updates
from sandbox.bench.ledger_work import UPDATES, LedgerStep
from sandbox.bench.memory import peak_bytes
from sandbox.bench.reference_work import (
    NUM_TURNS,
    OFF_POLICY,
    SEED,
    Sandbox,
    Transformers,
    Turns,
    Work,
    reference_model,
)
from sandbox.kernels import EAGER, Kernels
from theory.routing.passes import Mode

OURS, THEIRS, TRAINER = "firstorder", "transformers", "TRL"
LEDGER = "the ledger's update"
EXACT_TRAINING = f"exact training, {NUM_UPDATES} updates"
QUIET = 0.12
"""CPUs that other processes may use before the figures are called contended."""
LOGP_TOLERANCE = 1e-4
"""Nats by which the sides' log-probs may differ; float32 sums in another order differ by some 1e-6."""


@dataclass(frozen=True)
class Piece:
    """A piece of work to time; `over` is the side of the same piece with which it is compared.

    `set_threads` sets the number of threads of its side.
    """

    piece: str
    side: str
    call: Callable[[], object]
    over: str | None = None
    set_threads: Callable[[int], None] = torch.set_num_threads


@dataclass(frozen=True)
class BenchRow:
    """The times of one piece on one side, one value per round, in seconds; no ratios if nothing is compared.

    `peak_bytes` is the peak memory of one run of the piece in its own tensors.
    """

    piece: str
    side: str
    seconds: tuple[float, ...]
    min: float
    median: float
    peak_bytes: int
    over: str | None = None
    ratio_by_min: float | None = None
    ratio_by_median: float | None = None


@dataclass(frozen=True)
class BenchmarkResult:
    """All rows and the conditions of their measurement.

    `other_cpus` is the mean number of CPUs that other processes used meanwhile, None if the system does not report it.
    `logp_difference` is the largest difference of log-probs between the sides, in nats; `grad_norm_difference` the
    relative difference of gradient norms.
    """

    rows: tuple[BenchRow, ...]
    work: Work
    kernels: str
    threads: int
    rounds: int
    other_cpus: float | None
    logp_difference: float
    grad_norm_difference: float
    machine: dict[str, Any]

    @property
    def is_contended(self) -> bool:
        """Whether other processes used more than QUIET CPUs."""
        return self.other_cpus is not None and self.other_cpus > QUIET

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return asdict(self) | {"is_contended": self.is_contended}


def benchmark(
    work: Work, threads: int, rounds: int, report: Callable[[str], None] = lambda line: None, kernels: Kernels = EAGER
) -> BenchmarkResult:
    """Times every piece `rounds` times on `threads` threads, ours with these kernels; `report` gets progress lines.

    Raises RuntimeError if the two sides compute different results.
    """
    with _threads(kernels), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)  # transformers samples from the global generator
        kernels.set_threads(threads)
        report("warming up, and comparing both sides' results")
        pieces, logp_difference, grad_norm_difference = _prepare(work, kernels, threads)
        report("measuring memory")
        # In runs of their own, since the profiler slows down all that it watches.
        peaks = [peak_bytes(piece.call) for piece in pieces]
        seconds, other_cpus = _time(pieces, threads, rounds, report)
        return BenchmarkResult(
            rows=_rows(pieces, seconds, peaks),
            work=work,
            kernels=kernels.name,
            threads=threads,
            rounds=rounds,
            other_cpus=other_cpus,
            logp_difference=logp_difference,
            grad_norm_difference=grad_norm_difference,
            machine=manifest(seed=SEED),
        )


def _prepare(work: Work, kernels: Kernels, threads: int) -> tuple[list[Piece], float, float]:
    """The pieces, each warmed up once, and the differences between the sides in log-probs and gradient norm."""
    model = reference_model(kernels)
    ours, theirs = Sandbox(work, model), Transformers(work, model)
    rollouts = ours.ragged()
    batch, minibatch = rollouts.padded(), ours.minibatch(rollouts)
    theirs_BT = theirs.score(batch)
    ours_BT = batch.logp_mu_BT, minibatch.logp_old_BT
    logp_difference = max((theirs_BT - x_BT)[batch.is_response_BT].abs().max().item() for x_BT in ours_BT)
    if not logp_difference <= LOGP_TOLERANCE:
        raise RuntimeError(
            f"the two sides must compute the same log-probs: expected a difference of at most {LOGP_TOLERANCE}, "
            f"got {logp_difference:.2g}"
        )
    steps = [(f"global step, N = {n}", n) for n in (1, OFF_POLICY)]
    pieces = [
        Piece("generate", OURS, ours.generate),
        Piece("generate", THEIRS, lambda: theirs.generate(ours.prompts), over=OURS),
        Piece(f"generate, {NUM_TURNS} turns", OURS, Turns(work, True, kernels).roll_out),
        Piece(f"generate, {NUM_TURNS} turns", "no prefix cache", Turns(work, False, kernels).roll_out, over=OURS),
        Piece("score", OURS, lambda: ours.score(rollouts)),
        Piece("score", THEIRS, lambda: theirs.score(batch), over=OURS),
        Piece("forward + backward", OURS, lambda: ours.gradient(minibatch)),
        Piece("forward + backward", THEIRS, lambda: theirs.gradient(batch, minibatch), over=OURS),
        *(piece for name, n in steps for piece in _step_pieces(name, n, ours, theirs)),
        *_replay_pieces(steps[-1][0], ours),
        *_ledger_pieces(kernels),
        Piece(EXACT_TRAINING, OURS, updates()),
        Piece(EXACT_TRAINING, "3 times the responses", updates(LENGTH + 1), over=OURS),
        Piece(EXACT_TRAINING, "an MoE", moe_updates(), over=OURS),
    ]
    for i, piece in enumerate(pieces):
        if piece.side not in (THEIRS, TRAINER):
            pieces[i] = piece = replace(piece, set_threads=kernels.set_threads)
        piece.set_threads(threads)
        piece.call()
    norm, their_norm = ours.gradient(minibatch).metrics["actor/grad_norm"], theirs.gradient(batch, minibatch)
    return pieces, logp_difference, abs(their_norm / norm - 1)


def _step_pieces(name: str, num_minibatches: int, ours: Sandbox, theirs: Transformers) -> Iterator[Piece]:
    yield Piece(name, OURS, ours.step("none", num_minibatches))
    if reference_trl.is_installed():
        trainer = reference_trl.TRL(ours.work, theirs, num_minibatches)
        yield Piece(name, TRAINER, trainer.step, over=OURS)


def _replay_pieces(name: str, ours: Sandbox) -> Iterator[Piece]:
    """Steps that show the cost of replay, and of prediction over replay, with features on all rows or on T_c."""
    over: dict[Mode, Mode | None] = {"R2": None, "R3": None, "Pr2": "R2", "Pr3": "R3"}
    for num, suffix in ((None, ""), (ours.work.few_positions, f", T_c = {ours.work.few_positions}")):
        for mode, plain in over.items():
            other = OURS if plain is None else f"{plain}{suffix}"
            yield Piece(name, f"{mode}{suffix}", ours.step(mode, OFF_POLICY, num), over=other)


def _ledger_pieces(kernels: Kernels) -> Iterator[Piece]:
    """A global step of 64 responses, the unit of the claims ledger, and one of 8 times as many."""
    one, many = LedgerStep(1, kernels), LedgerStep(UPDATES, kernels)
    yield Piece(LEDGER, OURS, one.step)
    yield Piece(LEDGER, "without sampling", one.training(), over=OURS)
    yield Piece(LEDGER, f"{UPDATES} of them in a step", many.step, over=OURS)


def _time(
    pieces: Sequence[Piece], threads: int, rounds: int, report: Callable[[str], None]
) -> tuple[list[list[float]], float | None]:
    """Seconds by piece and round, and the CPUs that other processes used meanwhile."""
    seconds: list[list[float]] = [[] for _ in pieces]
    busy, own, started = _busy_cpu_seconds(), time.process_time(), time.perf_counter()
    for done in range(rounds):
        report(f"round {done + 1} of {rounds}")
        order = range(len(pieces))
        # Alternate the direction, so that no side always runs right after the same other one.
        for i in order if done % 2 == 0 else reversed(order):
            # Before every call: sides that use other kernels leave another number of torch's threads.
            pieces[i].set_threads(threads)
            start = time.perf_counter()
            pieces[i].call()
            seconds[i].append(time.perf_counter() - start)
    if busy is None or (busy_now := _busy_cpu_seconds()) is None:
        return seconds, None
    elapsed = time.perf_counter() - started
    # The kernel counts in ticks of 10 ms, so the difference can be negative on a quiet machine.
    return seconds, max(0.0, (busy_now - busy - (time.process_time() - own)) / elapsed)


def _rows(pieces: Sequence[Piece], seconds: Sequence[Sequence[float]], peaks: Sequence[int]) -> tuple[BenchRow, ...]:
    rows: dict[tuple[str, str], BenchRow] = {}
    for piece, times, peak in zip(pieces, seconds, peaks, strict=True):
        row = BenchRow(piece.piece, piece.side, tuple(times), min(times), median(times), peak)
        if piece.over is not None:
            other = rows[piece.piece, piece.over]  # an earlier piece
            ratios = {"ratio_by_min": row.min / other.min, "ratio_by_median": row.median / other.median}
            row = replace(row, over=piece.over, **ratios)
        rows[piece.piece, piece.side] = row
    return tuple(rows.values())


@contextlib.contextmanager
def _threads(kernels: Kernels) -> Iterator[None]:
    """A context in which numbers of threads may be set; afterwards the kernels have one, torch its former number."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        kernels.set_threads(1)
        torch.set_num_threads(before)


def _busy_cpu_seconds() -> float | None:
    """CPU seconds that all processes have used since the system started; None without /proc/stat."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    except (OSError, ValueError, IndexError):
        return None
    # user, nice, system; then, after idle and iowait, irq, softirq, steal
    return (sum(ticks[:3]) + sum(ticks[5:8])) / os.sysconf("SC_CLK_TCK")


def table(result: BenchmarkResult) -> Table:
    """The rows as a table, times in milliseconds."""
    work = result.work
    title = (
        f"{work.num_prompts} prompts x {work.num_responses} responses of {work.max_tokens} tokens, "
        f"rounds: {result.rounds}, threads: {result.threads}, {result.kernels} kernels"
    )
    # Narrow enough for a terminal of 80 columns.
    found = Table("piece", "side", title=title, box=box.SIMPLE_HEAD, padding=0)
    for column in ("min ms", "median ms", "ratio\nby min", "ratio\nby median"):
        found.add_column(column, justify="right")
    found.add_column("ratio\nover")
    previous = ""
    for row in result.rows:
        if previous and row.piece != previous:
            found.add_section()
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (row.ratio_by_min, row.ratio_by_median)]
        times = [f"{1000 * value:.1f}" for value in (row.min, row.median)]
        name = "" if row.piece == previous else row.piece
        found.add_row(name, row.side, *times, *ratios, row.over or "")
        previous = row.piece
    return found


def memory_table(result: BenchmarkResult) -> Table:
    """The peak memory of one run of each piece in its own tensors, in megabytes."""
    found = Table("piece", "side", title="peak memory", box=box.SIMPLE_HEAD, padding=0)
    found.add_column("MB", justify="right")
    for row in result.rows:
        found.add_row(row.piece, row.side, f"{row.peak_bytes / 1e6:.1f}")
    return found


def remarks(result: BenchmarkResult) -> list[str]:
    """The conditions of the table: the agreement of both sides, the machine, and whether it was otherwise idle."""
    machine, versions = result.machine, result.machine["versions"]
    lines = [
        f"Both sides agree: log-probs to {result.logp_difference:.1e} nats, "
        f"the gradient's norm to {result.grad_norm_difference:.1e} relative.",
        f"Machine: {machine['cpu']}, {machine['num_cpus']} cores; Python {machine['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}.",
        "Peak memory counts the tensors that a piece allocates and holds, without weights and inputs.",
    ]
    if result.kernels == "compiled":
        lines.append("It leaves out the working space that compiled kernels keep outside tensors.")
    if not reference_trl.is_installed():
        lines.append(f"TRL is not installed, so its GRPOTrainer has no rows: {how_to_install('bench')}.")
    if result.other_cpus is None:
        return [*lines, "The load from other processes is unknown on this system."]
    lines.append(f"Other processes used {result.other_cpus:.2f} CPUs meanwhile.")
    if result.is_contended:
        lines.append(f"That is more than {QUIET}: these figures are contended; measure again on a quiet machine.")
    return lines
