"""The figures that the cluster world began with, and those of now: `python -m tests.scaled.figures [--print]`.

One command measures or computes each of them by the benches and the plan, and writes one table into docs/speed.md; with
`--print` it only prints it. Each bench is a process of its own. "before" is what was measured or computed when the work
on these figures began.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.manifest import _cpu_model
from lab.markdown import markdown_table
from scaled.cluster.push_bench import BOUND
from scaled.config import TrainingBlock
from scaled.megatron_engine.micro_batches import arrange
from scaled.plan import memory
from scaled.plan.hardware import gpu_named
from scaled.plan.search import search
from scaled.plan.summary import make_plan
from tests.pages.study import Part
from tests.scaled.driver_bench import EXPERTS, LAYERS, SLOTS
from tests.scaled.plan_world import QWEN, loaded
from theory.routing.measures import route_counts
from theory.routing.payloads import pack_record
from theory.streams import stream

PART = Part(Path(__file__).parents[2] / "docs/speed.md", "figures")
PADDED = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
ROOM = ("--cluster.object_store_gib", "512")
ONE_MACHINE = ("--cluster.num_nodes", "1", "--algorithm.batch.num_prompts", "8")
ROUNDS = {"push": 7, "save": 1, "seeds": 6}
PUSHED_GIB = 0.5


@dataclass(frozen=True)
class Figure:
    """A row: what, its value before, and its value now."""

    what: str
    before: str
    now: str


def output_of(module: str, *words: str) -> str:
    """The output of a bench, run in a process of its own."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=True)
    return done.stdout


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of a printed table by each row's first one."""
    lines = re.findall(r"^\| (.*) \|$", table, re.MULTILINE)
    return {first: rest for first, *rest in (line.split(" | ") for line in lines)}


def planned() -> list[Figure]:
    """Seconds of n8_r3, micro-batches, logits: the plan's own count."""
    padded, packed = (make_plan(loaded("minirl/n8_r3", *words)).compute for words in (PADDED, ()))
    # Prompts of five tokens before responses of 20 and 200.
    blocks = TrainingBlock(micro_batch_size=1), TrainingBlock(max_tokens_per_micro_batch=205)
    widths = [sum(slot.num_positions for slot in arrange([25] * 7 + [205], block)) for block in blocks]
    whole = make_plan(loaded("minirl/n8_r3", "--rollout.precision.weights", "same", *ROOM)).compute
    logits = memory.logit_bytes(QWEN, TrainingBlock(micro_batch_size=1), 32 * 1024, 34_816) / memory.GIB
    return [
        Figure("training of a step of `n8_r3`, planned", "689 s (mean lengths; 4,450 s as the code then was)",
               f"{packed.training_s:,.0f} s; {padded.training_s:,.0f} s padded one at a time"),
        Figure("positions computed for seven sequences of 25 tokens and one of 205", "1,640, for 380 tokens",
               f"{widths[1]:,} by a token budget; {widths[0]:,} without"),
        Figure("push of Qwen3-30B-A3B, planned", "5 s (the code's own path took one to seven minutes)",
               f"{whole.push_s:.0f} s in BF16 (61 GB), {packed.push_s:.0f} s in FP8 (`n8_r3`)"),
        Figure("head and log-probs of one response of 32k, TP1", "65 GiB (logits of the whole response)",
               f"{logits:.1f} GiB"),
    ]  # fmt: skip


def layouts() -> list[Figure]:
    """The search for Qwen3-30B's layouts on 8 GPUs at 34,816 tokens."""
    found = search(loaded("minirl/n2_r2", *ONE_MACHINE), QWEN, gpu_named("H100-80GB"))
    return [
        Figure("layouts of Qwen3-30B-A3B that fit 8 H100-80GB at 34k tokens", "0 of 7,392 (the best misses 29.6 GiB)",
               f"{len(found.found)} of {found.num_tried:,}"),
    ]  # fmt: skip


def routes() -> list[Figure]:
    """GB of both records per second of one core, a tenth of the rows differing."""
    rows, each = 2**14, EXPERTS // SLOTS
    draws = stream(0, "figures-routes")
    first = torch.randint(each, (rows, LAYERS, 1), generator=draws)
    ids = (first + torch.arange(SLOTS) * each).to(torch.int16)
    other = ids.clone()
    changed = torch.rand(rows, generator=draws) < 0.1
    other[changed] = (ids[changed] // each) * each + (ids[changed] + 1) % each
    a, b = (pack_record([x], [rows + 1], tuple(range(LAYERS)), EXPERTS) for x in (ids, other))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        route_counts(a, b)
        seconds.append(time.process_time() - start)
    rate = (a.nbytes + b.nbytes) / min(seconds) / 1e9
    return [Figure("metrics of two records of routes", "0.05 GB/s a core", f"{rate:.1f} GB/s a core (best of 5)")]


def pushes() -> list[Figure]:
    """GB/s of pushes between processes of this machine."""
    found = rows_of(output_of("scaled.cluster.push_bench", str(PUSHED_GIB), str(ROUNDS["push"])))
    direct, fp8 = found["bf16, from ranks to engines"], found["fp8 blocks, quantised in two ranks"]
    copies = found[BOUND]
    return [
        Figure("push, two ranks to two engines", "0.9 to 1.3 GB/s, through the driver",
               f"{direct[0]} GB/s ({direct[1]} to {direct[2]}); copies alone {copies[0]} ({copies[1]} to {copies[2]})"),
        Figure("push quantised to FP8 in the ranks", "one thread: 61 GB in three minutes, 0.34 GB/s",
               f"{fp8[0]} GB/s ({fp8[1]} to {fp8[2]}), two ranks"),
    ]  # fmt: skip


def driver() -> list[Figure]:
    """The driver's memory at a batch and at eight times as much of it."""
    one, eight = (
        json.loads(output_of("tests.scaled.driver_bench", "--one", factor, "--kind", "R3").splitlines()[-1])
        for factor in ("1", "8")
    )
    return [
        Figure("the driver's own pages, a batch and eight times as much, with routes", "786 to 1,744 MB (with shared)",
               f"{one['own']:.0f} to {eight['own']:.0f} MB ({one['peak']:.0f} to {eight['peak']:.0f} with shared)"),
    ]  # fmt: skip


def saves() -> list[Figure]:
    """Seconds that a run stands still for a checkpoint, optimizer states sharded and whole."""
    found = []
    for words, name in (((), "sharded"), (("--replicated",), "whole in each rank")):
        rows = rows_of(output_of("tests.scaled.save_bench", str(ROUNDS["save"]), *words))
        size = next(iter(rows)).removeprefix("a checkpoint of ")
        waits = [f"{rows[f'{a} {way} save'][0]} s {way}" for a, way in (("a", "synchronous"), ("an", "asynchronous"))]
        found.append(Figure(f"standstill for a checkpoint of {size}, states {name}", "synchronous only",
                            ", ".join(waits)))  # fmt: skip
    return found


def seeds() -> list[Figure]:
    """The cost of seeds in vLLM, and their cost beside log-probabilities of prompts, which runs no longer ask for."""
    found = rows_of(output_of("tests.scaled.seeds_bench", str(ROUNDS["seeds"])))
    names = ("a seed per response", "a seed per token", "a seed per response, log-probabilities of prompts")
    each = [f"{found[name][1]} (rounds {found[name][3]} to {found[name][4]})" for name in names]
    return [
        Figure("vLLM's time with a seed per response, over none", "1.15 to 1.25, with prompts' log-probabilities",
               f"{each[0]}; a seed per token {each[1]}; with prompts' log-probabilities {each[2]}"),
    ]  # fmt: skip


PARTS: tuple[Callable[[], list[Figure]], ...] = (planned, layouts, routes, pushes, driver, saves, seeds)


def load_now() -> float:
    """Processes that want to run, on average over the last minute."""
    return os.getloadavg()[0]


def main(is_printed: bool = False) -> None:
    """Measures all and writes the table, with the machine and its load."""
    start, loads, figures = time.monotonic(), [load_now()], []
    for part in PARTS:
        figures += part()
        loads.append(load_now())
        sys.stderr.write(f"{part.__name__}: {time.monotonic() - start:.0f} s\n")
    table = markdown_table(("figure", "before", "now"), [(f.what, f.before, f.now) for f in figures])
    machine = f"{_cpu_model()}, {os.cpu_count()} cores, load {min(loads):.1f} to {max(loads):.1f}"
    words = f"{machine}; medians, ranges over rounds in brackets; all in {time.monotonic() - start:.0f} s.\n"
    text = f"\n{table}\n{words}"
    if is_printed:
        print(text)
    else:
        PART.write(text)


if __name__ == "__main__":
    main("--print" in sys.argv[1:])
