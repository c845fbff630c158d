"""A GPU's figures for the training engine at a real width: some of Qwen3-30B-A3B's layers, its whole vocabulary, bf16.

`python -m tests.scaled.on_gpu` prints a table of docs/on-gpu.md: the memory that `firstorder plan` counts beside what
the allocator gave out, how far a repeated pass is off, and what replaying the old pass's routes adds to an update.
With `--write FOLDER` it writes the model of configs/on_gpu/wide_r3.yaml instead, whose vocabulary is that of sums;
`--layers 24` makes that of deep_ladder.yaml.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.hf import ModelShape, parse_shape
from lab.markdown import markdown_table
from lab.tasks.arithmetic import ALPHABET
from lab.tasks.tokenizers import CharTokenizer
from scaled.config import ModelBlock
from scaled.megatron_engine.parts import assemble_scores, assemble_stats
from scaled.plan import memory, parameters
from tests.scaled.megatron_world import free_ports, joined, spawn
from tests.scaled.rank_world import algorithm, training
from theory.contracts import MiniBatch, Prompt, Response, Rollouts
from theory.objectives import preset
from theory.routing.measures import difference_counts
from theory.routing.passes import RoutingPlan
from theory.streams import stream

LAYERS, RESPONSES, PROMPT, SAMPLED, UPDATES = 4, 8, 128, 384, 6
FIELDS: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 4, "distributed_optimizer": True, "timeout_s": 600}
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "deterministic": {"deterministic": True},
    "experts recomputed": {"recompute": "selective"},
    "all recomputed": {"recompute": "full"},
}


def write_model(folder: Path, **changes: Any) -> ModelShape:
    """A Hugging Face folder of Qwen3-30B-A3B's shape with few layers and random weights, logits spread by about 1.

    `changes` are fields of its config.json. A file per layer, so that the host never holds the whole model.
    """
    fields = json.loads(Path("scaled/shapes/qwen3-30b-a3b.json").read_text())
    fields |= {"num_hidden_layers": LAYERS} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    shape = parse_shape(fields)
    draws = torch.Generator("cuda").manual_seed(0)

    def draw(size: tuple[int, ...]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        noise = torch.randn(size, generator=draws, device="cuda", dtype=torch.bfloat16)
        return (noise / size[1] ** 0.5).cpu()

    sizes = shape.weights()
    for number, (_, names) in enumerate(groupby(sizes, key=_layer_of)):
        tensors = {name: draw(sizes[name]) for name in names}
        save_file(tensors, folder / f"model-{number:03d}.safetensors")
    return shape


def _layer_of(name: str) -> str:
    """A weight's layer, "" outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found[1] if found else ""


def batch(vocab_size: int) -> Rollouts:
    """Responses of one length and random tokens: every micro-batch is full, which is what the plan counts."""
    draws = stream(0, "on-gpu")
    sizes = (RESPONSES, PROMPT), (RESPONSES, SAMPLED)
    prompts, tokens = (torch.randint(0, vocab_size, size, generator=draws) for size in sizes)
    return Rollouts(
        tuple(
            Response(Prompt(str(i), tuple(p.tolist()), ""), t, torch.full((SAMPLED,), -12.0), t >= 0, "stop", 0)
            for i, (p, t) in enumerate(zip(prompts, tokens, strict=True))
        )
    )


def measure(rank: int, folder: Path, fields: dict[str, Any], port: int) -> dict[str, Any]:
    """In a rank's process: bytes held and at the peak of an update, a repeated pass, pi beside old, seconds."""
    from scaled.megatron_engine.rank import MegatronRank

    layout = training(**FIELDS, **fields)
    with joined(layout, rank, port):
        engine = MegatronRank(ModelBlock(path=str(folder)), layout, algorithm("R3", optimizer={"learning_rate": 1e-6}))
        rollouts = batch(engine.shape.vocab_size)
        natural = RoutingPlan("natural")
        old, again = (assemble_scores([engine.score(rollouts, natural)]) for _ in range(2))
        assert old.experts is not None and again.experts is not None
        replayed = RoutingPlan("replay", record=old.experts)
        minibatch = MiniBatch(rollouts, old.logp_BT, torch.linspace(-1, 1, RESPONSES), 0, 1)
        pi = assemble_stats([engine.update(minibatch, preset("minirl"), replayed)]).logp_pi_BT
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        seconds: dict[str, list[float]] = {"natural": [], "replay": []}
        for number in range(2 * UPDATES):
            source, routing = (("natural", natural), ("replay", replayed))[(number + number // 2) % 2]
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.update(minibatch, preset("minirl"), routing)
            torch.cuda.synchronize()
            seconds[source].append(time.perf_counter() - start)
    return {
        "held": held,
        "peak": torch.cuda.max_memory_allocated(),
        "repeated": (again.logp_BT - old.logp_BT).abs().mean().item(),
        "routes": difference_counts(old.experts, again.experts).gt(0).float().mean().item(),
        "pi": (pi - old.logp_BT).abs().max().item(),
        "seconds": seconds,
    }


def planned(shape: ModelShape, fields: dict[str, Any]) -> tuple[int, int]:
    """Bytes that `firstorder plan` counts for this rank: what stays, and what an update adds."""
    layout, S = training(**FIELDS, **fields), PROMPT + SAMPLED
    own = parameters.rank_parameters(shape, layout)
    added = (
        memory.activation_bytes(shape, layout, 0, S, RESPONSES // layout.micro_batch_size),
        memory.logit_bytes(shape, layout, SAMPLED, S),
        memory.replay_bytes(shape, layout, 0, S),
    )
    return 6 * own.total + parameters.optimizer_bytes(own, layout), sum(added)


HEADER = (
    "training", "held, GB", "planned", "an update adds, GB", "planned", "repeated pass, mean nats",
    "routers that differ", "pi - old at most, nats", "update, ms", "replay over natural routes",
)  # fmt: skip


def row(name: str, plan: tuple[int, int], found: dict[str, Any]) -> tuple[str, ...]:
    """The table's row: medians over pairs of updates that took turns, the ratio with its range."""
    seconds = found["seconds"]
    ratios = [b / a for a, b in zip(seconds["natural"], seconds["replay"], strict=True)]
    return (
        name,
        f"{found['held'] / 1e9:.2f}",
        f"{plan[0] / 1e9:.2f}",
        f"{(found['peak'] - found['held']) / 1e9:.2f}",
        f"{plan[1] / 1e9:.2f}",
        f"{found['repeated']:.1e}",
        f"{found['routes']:.1e}",
        f"{found['pi']:.1e}",
        f"{1e3 * statistics.median(seconds['natural']):.0f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
    )


def main() -> None:
    """Writes a model, or measures each case on one in a process of its own and prints the table."""
    parser = argparse.ArgumentParser(prog="on_gpu")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--layers", type=int, default=LAYERS)
    wanted = parser.parse_args()
    if wanted.write is not None:
        wanted.write.mkdir(parents=True)
        size = CharTokenizer(ALPHABET).vocab_size
        changes = {"vocab_size": size, "eos_token_id": None, "max_position_embeddings": 4096}
        write_model(wanted.write, num_hidden_layers=wanted.layers, **changes)
        return
    with tempfile.TemporaryDirectory() as scratch:
        shape = write_model(Path(scratch))
        torch.cuda.empty_cache()
        count = parameters.rank_parameters(shape, training(**FIELDS)).total
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        rows = []
        for name, fields in CASES.items():
            (found,) = spawn(1, measure, Path(scratch), fields, free_ports(1)[0], limit_s=280)
            rows.append(row(name, planned(shape, fields), found))
    head = f"{machine}; {LAYERS} layers, {count / 1e9:.3f}e9 weights"
    sys.stdout.write(f"{head}\n\n{markdown_table(HEADER, rows)}")


if __name__ == "__main__":
    main()
