"""The cost of reading a million sampled tokens in every format: CPU seconds and peak memory of the whole diagnosis.

`python -m tests.pages.importing [FORMAT...]` prints the table of docs/speed.md. One process
writes a format's file with the writer of lab/doctor/dumps.py. `firstorder doctor` reads it in another, whose CPU time
(startup and imports included) and peak resident memory are read at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.doctor import dumps
from lab.doctor.importers import FORMATS, rows
from lab.markdown import markdown_table
from theory.streams import stream

NUM_RESPONSES, NUM_PROMPT, LENGTH = 500, 50, 2000
"""A million sampled tokens."""
LAYERS, SLOTS, EXPERTS = 2, 2, 64
"""Shape of the routes, in formats that have them."""
AIM_SECONDS, AIM_GIB = 20.0, 2.0
MAP = "tokens=ids,num_prompt=P,logp_mu=gen,logp_old=train"


def million(num_responses: int = NUM_RESPONSES) -> dumps.Rows:
    """Responses of random tokens, whose mu and old differ by rounding; 2,000 tokens each."""
    generator = stream(0, "importing")
    out: dumps.Rows = []
    for b in range(num_responses):
        S = NUM_PROMPT + LENGTH
        old = -torch.rand(LENGTH, generator=generator).exp()
        mu = old + 0.01 * torch.randn(LENGTH, generator=generator)
        experts = torch.randint(EXPERTS, (S - 1, LAYERS, SLOTS), generator=generator)
        # The second slot is never the first one's expert.
        experts[..., 1] = (experts[..., 0] + 1 + experts[..., 1] % (EXPERTS - 1)) % EXPERTS
        row: dict[str, Any] = {"tokens": torch.randint(100_000, (S,), generator=generator).tolist()}
        row |= {"num_prompt": NUM_PROMPT, "reward": float(b % 2), "is_response": [True] * LENGTH}
        row |= {"logp_mu": mu.clamp(max=0).tolist(), "logp_old": old.tolist(), "entropy_old": old.neg().tolist()}
        out.append(row | {"experts_mu": experts.tolist(), "experts_old": experts.tolist()})
    return out


def slime(folder: Path, of: dumps.Rows) -> Path:
    """`train_12_0.pt` of --save-debug-train-data."""
    data = {
        "tokens": [row["tokens"] for row in of],
        "response_lengths": [len(row["logp_mu"]) for row in of],
        "loss_masks": [[int(x) for x in row["is_response"]] for row in of],
        "rewards": [row["reward"] for row in of],
        "rollout_log_probs": [torch.tensor(row["logp_mu"]) for row in of],
        "log_probs": [torch.tensor(row["logp_old"]) for row in of],
        "rollout_routed_experts": [torch.tensor(row["experts_mu"]) for row in of],
    }
    torch.save({"rollout_id": 12, "rank": 0, "rollout_data": data}, path := folder / "train_12_0.pt")
    return path


def ours(folder: Path, of: dumps.Rows) -> Path:
    """A trace as runs write it."""
    rows.trace(of).save(path := folder / "step-000012.safetensors")
    return path


def parquet(folder: Path, of: dumps.Rows) -> Path:
    """Rows in Parquet, routes included."""
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(of), path := folder / "step-12.parquet")
    return path


def mapped(folder: Path, of: dumps.Rows) -> Path:
    """A .jsonl whose columns have other names."""
    theirs = dict(pair.split("=") for pair in MAP.split(","))
    return dumps.lines(folder / "other.jsonl", [{theirs[name]: row[name] for name in theirs} for row in of])


WRITERS: dict[str, tuple[str, Callable[[Path, dumps.Rows], Path]]] = {
    "trace": ("trace", ours),
    "rows, .jsonl": ("rows", lambda folder, of: dumps.lines(folder / "step-12.jsonl", of)),
    "rows, .parquet": ("rows", parquet),
    "miles, dashboard, with --old": ("miles, dashboard", dumps.dashboard),
    "vLLM, with --old": ("vLLM", dumps.vllm),
    "open-instruct, with --old": ("open-instruct", dumps.open_instruct),
    "TRL": ("TRL", dumps.trl),
    "verl": ("verl", dumps.verl_v1),
    "prime-rl": ("prime-rl", dumps.prime_rl),
    "NeMo-RL": ("NeMo-RL", dumps.nemo_rl),
    "miles, policy loss": ("miles, policy loss", dumps.miles),
    "slime": ("slime, miles", slime),
    "SkyRL": ("SkyRL", dumps.skyrl),
    "columns": ("columns", mapped),
}
"""A row of the table: its name, the format as `--list-formats` has it, and the writer."""

READ = """
import os, sys
from firstorder.cli import main
code = main(["doctor", *sys.argv[1:], "--fail-on", "none", "--json"])
assert code == 0, code
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sum(os.times()[:2]), int(peak.split()[1]) / 2**20, file=sys.stderr)
"""


def options(folder: Path, name: str) -> list[str]:
    """The options of the doctor beside the file."""
    if name == "columns":
        return ["--columns", MAP]
    return ["--old", str(folder / "old.jsonl")] if name.endswith("--old") else []


def write(name: str, folder: Path, num_responses: int = NUM_RESPONSES) -> Path:
    """The format's file in the folder, and a file of the trainer's side if the format lacks it."""
    of = million(num_responses)
    if name.endswith("--old"):
        dumps.lines(folder / "old.jsonl", [{"logp_old": row["logp_old"]} for row in of])
    return WRITERS[name][1](folder, of)


def cost(path: Path, extra: Sequence[str]) -> tuple[float, float, int]:
    """CPU seconds and peak GiB of a diagnosis of the file, and the number of its sampled tokens."""
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path), *extra], capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{path}: {done.stderr[-400:]}")
    seconds, gib = map(float, done.stderr.split()[-2:])
    (told,) = json.loads(done.stdout)["traces"]
    return seconds, gib, int(told["clues"]["num_tokens"])


def row_of(name: str) -> tuple[str, str, str, str, str]:
    """The table's row: the format, MB of its file, sampled tokens, CPU seconds, peak GiB."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        code = f"from tests.pages.importing import *; print(write({name!r}, Path({text!r})))"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        path = Path(out.strip())
        seconds, gib, num = cost(path, options(folder, name))
        return name, f"{path.stat().st_size / 1e6:.0f}", f"{num:,}", f"{seconds:.1f}", f"{gib:.2f}"


def main(names: Sequence[str]) -> None:
    """Prints the table of these formats, all by default."""
    assert {of for of, _ in WRITERS.values()} == {about.name for about in FORMATS}
    heads = ("format", "MB", "sampled tokens", "CPU seconds", "peak GiB")
    print(markdown_table(heads, [row_of(name) for name in names or WRITERS]), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
