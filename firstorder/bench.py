"""`firstorder bench`: the sandbox's speed beside transformers and TRL, and with routing replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from firstorder.options import Debug, require_folder_of


def bench(
    threads: Annotated[int, typer.Option(min=1, help="Threads that either side may use.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=10_000, help="Repetitions of every timing.")] = 5,
    num_prompts: Annotated[int, typer.Option(min=4, help="Prompts of a batch, a multiple of 4.")] = 16,
    num_responses: Annotated[int, typer.Option(min=2, help="Responses per prompt.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per response, at most 52.")] = 32,
    compile: Annotated[bool, typer.Option("--compile", help="Our side with compiled kernels (compile: true).")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Also write every measured time there.")] = None,
    debug: Debug = False,
) -> None:
    """Time the pieces of a global step, side by side with transformers, and the cost of routing replay.

    The work is that of a Qwen3-MoE of 1.8 million parameters and 16 prompts x 8 responses of 32 tokens: generation,
    scoring, forward and backward of the MiniRL loss, and whole global steps. Both sides have the same weights and take
    turns in one process; a ratio is the time of its line over that of its reference line. Where TRL is
    installed (the extra `bench`), global steps of its GRPOTrainer are timed too. Peak memory is that of one run.

    \b
    Examples:
      firstorder bench
      firstorder bench --compile
      firstorder bench --threads 2 --rounds 9 --out bench.json
    """

    require_folder_of("--out", out)
    from rich.console import Console

    from lab.files import atomic_write
    from sandbox.bench.benchmark import benchmark, memory_table, remarks, table
    from sandbox.bench.reference_work import Work
    from sandbox.kernels import choose

    work = Work(num_prompts, num_responses, max_tokens=max_tokens)
    result = benchmark(work, threads, rounds, lambda line: typer.echo(line, err=True), choose(compile))
    console = Console(highlight=False, markup=False)
    console.print(table(result))
    console.print(memory_table(result))
    for line in remarks(result):
        console.print(line)
    if out is not None:
        atomic_write(out, json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n")
