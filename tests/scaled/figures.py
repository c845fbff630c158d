"""The figures that the cluster world began with, and those of now: `python -m tests.scaled.figures [--print]`.

One command measures or computes each of them by the benches and the plan, and writes one table into docs/speed.md; with
`--print` it only prints it. Each bench is a process of its own. "before" is what was measured or computed when the work
on these figures began.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lab.manifest import _cpu_model
from lab.markdown import markdown_table
from lab.strict import ConfigError
from scaled.cluster.push_bench import BOUND
from scaled.cluster.ray_cluster import by_node, places_of
from scaled.cluster_config import ClusterBlock
from scaled.config import ScaledRun, TrainingBlock
from scaled.megatron_engine.micro_batches import arrange
from scaled.plan import memory
from scaled.plan.conditions import check_object_store
from scaled.plan.hardware import gpu_named
from scaled.plan.search import search
from scaled.plan.summary import make_plan
from tests.pages.study import Part
from tests.scaled.cluster_run_world import CONFIG, save_model
from tests.scaled.driver_bench import EXPERTS, LAYERS, SLOTS
from tests.scaled.plan_world import QWEN, loaded
from theory.routing.measures import route_counts
from theory.routing.payloads import pack_record
from theory.streams import stream

PART = Part(Path(__file__).parents[2] / "docs/speed.md", "figures")
PADDED = ("--training.max_tokens_per_micro_batch", "null", "--training.micro_batch_size", "1")
ROOM = ("--cluster.object_store_gib", "512")
ONE_MACHINE = ("--cluster.num_nodes", "1", "--algorithm.batch.num_prompts", "8")
SHORT = ("--rollout.max_model_len", "4096", "--task.max_response_tokens", "2048",
         "--algorithm.sampling.max_tokens", "2048", "--training.max_tokens_per_micro_batch", "4096")  # fmt: skip
DEALS = 1000
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
    """The search for Qwen3-30B's layouts on 8 GPUs, at 34,816 tokens and at 4,096."""
    rows = []
    for words, tokens, missed in (((), "34k", "29.6"), (SHORT, "4k", "12.6")):
        found = search(loaded("minirl/n2_r2", *ONE_MACHINE, *words), QWEN, gpu_named("H100-80GB"))
        what = f"layouts of Qwen3-30B-A3B that fit 8 H100-80GB at {tokens} tokens"
        before = f"0 of 7,392 (the best misses {missed} GiB)"
        rows.append(Figure(what, before, f"{len(found.found)} of {found.num_tried:,}"))
    return rows


def placement() -> list[Figure]:
    """Groups of n8_r3 that span machines, whichever machines Ray gives to the bundles."""
    config, draws = loaded("minirl/n8_r3"), stream(0, "figures-placement")
    sizes = (config.training.tensor_parallel, config.training.expert_parallel)
    bundles, places = places_of(config, config.cluster.gpus_per_node)
    num_ranks, num_engines = config.training.num_ranks, config.rollout.num_engines
    num_units = 1 + max(places["rank", i].bundle for i in range(num_ranks))
    # Formerly each rank had a bundle of its own, before those of the engines.
    single = [1.0] * num_ranks + [float(config.rollout.tensor_parallel)] * num_engines
    split: dict[str, list[tuple[int, ...]]] = {"now": [], "before": []}
    for _ in range(DEALS):
        nodes = dealt([bundle["GPU"] for bundle in bundles], config, draws)
        stands = by_node(places, nodes, num_units)
        of_ranks = [nodes[stands["rank", i].bundle] for i in range(num_ranks)]
        split["now"].append(tuple(spanning(of_ranks, size) for size in sizes))
        split["before"].append(tuple(spanning(dealt(single, config, draws)[:num_ranks], size) for size in sizes))
    (tp, ep), (tp_before, ep_before) = (tuple(map(max, zip(*split[when], strict=True))) for when in ("now", "before"))
    counts = [num_ranks // size for size in sizes]
    return [
        Figure("TP4 and EP8 groups of `n8_r3` that span machines", "2 of 8 and 2 of 4",
               f"{tp} of {counts[0]} and {ep} of {counts[1]}, wherever the bundles are ({DEALS:,} random deals; with a "
               f"bundle per rank, as formerly, up to {tp_before} and {ep_before})"),
    ]  # fmt: skip


def dealt(gpus: list[float], config: ScaledRun, draws: torch.Generator) -> list[str]:
    """A machine with room for each bundle of so many GPUs, at random; the largest choose first, so that all fit."""
    free = [float(config.cluster.gpus_per_node)] * config.cluster.num_nodes
    found = [""] * len(gpus)
    for b in sorted(torch.randperm(len(gpus), generator=draws).tolist(), key=lambda b: -gpus[b]):
        rooms = [m for m, room in enumerate(free) if room >= gpus[b]]
        m = rooms[int(torch.randint(len(rooms), (1,), generator=draws))]
        free[m] -= gpus[b]
        found[b] = f"machine {m}"
    return found


def spanning(nodes: list[str], size: int) -> int:
    """Groups of `size` consecutive ranks that are on more than one machine."""
    return sum(len(set(nodes[i : i + size])) > 1 for i in range(0, len(nodes), size))


def addresses() -> list[Figure]:
    """Seconds from a command's start to its line, where no cluster answers at the address."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        path, model = Path(folder) / "config.yaml", Path(folder) / "model"
        save_model(model)
        path.write_text(CONFIG.replace("MODEL", str(model)))
        commands = {
            "`train`": ["train", str(path), "--output", folder, "--cluster.address"],
            "`reproduce`": ["reproduce", "9", "--regime", "paper", "--results", folder, "--address"],
        }
        silent = full.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        # This connection fills the queue: the system drops the packets of the next one.
        with socket.create_connection(("127.0.0.1", silent)):
            each = [
                f"{name} {refusal_s([*words, f'127.0.0.1:{port}']):.0f} s at a closed port, "
                f"{refusal_s([*words, f'127.0.0.1:{silent}']):.0f} s where packets are dropped"
                for name, words in commands.items()
            ]
    return [Figure("an address without a cluster, until the error's line", "nothing for ten minutes", "; ".join(each))]


def refusal_s(words: list[str]) -> float:
    """Seconds of a command that must end with the line of an address without a cluster."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "firstorder", *words], capture_output=True, text=True)
    seconds = time.monotonic() - start
    assert done.returncode == 2 and ": no Ray cluster at 127.0.0.1:" in done.stderr.splitlines()[-1], done.stderr
    return seconds


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


def spilled() -> list[Figure]:
    """GB/s of a push that the default object store cannot hold, and of which model a run refuses it."""
    default = ClusterBlock().object_store_gib
    found = rows_of(output_of("scaled.cluster.push_bench", str(2 * default), "1", "--store", str(default)))
    refused = loaded("minirl/n8_r3", "--cluster.object_store_gib", str(default), "--cluster.bucket_mib", "256")
    try:
        check_object_store(refused, QWEN)
    except ConfigError:
        words = "one without room for two buckets, as for Qwen3-30B-A3B, is refused"
    else:
        words = "Qwen3-30B-A3B is not refused"
    return [
        Figure(f"push of {2 * default:g} GiB into a store of the default size, {default:g} GiB",
               "0.14 GB/s, as it spills", f"{found['bf16, from ranks to engines'][0]} GB/s: it still spills; {words}"),
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


PARTS: tuple[Callable[[], list[Figure]], ...] = (
    planned, layouts, placement, addresses, routes, pushes, spilled, driver, saves, seeds,
)  # fmt: skip


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
