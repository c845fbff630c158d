"""NeMo-RL's log of replayed routes: whether the experts that the engine recorded are those that the trainer ran.

`r3_trace_{host}_pid{P}.jsonl`, a file per process, an event per line (nemo_rl/utils/r3_trace.py at 4677823;
NRL_R3_TRACE=1, and NRL_R3_TRACE_VERIFY_FORWARD=1 for the events of the forward). It has digests of routes, not the
routes, and no log-probabilities: it can show where replay breaks, and nothing of the gap. Events that are read:

| event                        | fields                                                              |
|------------------------------|---------------------------------------------------------------------|
| rollout_payload_sample       | key, routed_experts.valid_sha256, input_ids.valid_sha256            |
| tq_fetch_sample              | the same, stage: what the trainer fetched for that stage            |
| router_replay_forward_verify | stage, layer_number, matches_expected, fallback_rows, actual.shape  |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.doctor.importers.bad_rows import Bad, Found
from lab.doctor.importers.format import About
from lab.doctor.importers.reading import read_jsonl

NAME = re.compile(r"r3_trace_.*\.jsonl")
DIGESTS = ("input_ids", "routed_experts")
FORMAT = About(
    "NeMo-RL, R3 trace", "r3_trace_{host}_pid{P}.jsonl, all of a run together",
    "digests of routes at the rollout, after the transfer and in the forward",
    "Routes, tokens, log-probabilities: it shows whether replay is whole, nothing of the gap.",
    "NVIDIA-NeMo/RL nemo_rl/utils/r3_trace.py at 4677823",
)  # fmt: skip


@dataclass
class ReplayLog:
    """The findings of a run's files, taken together."""

    sampled: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests by key at the rollout."""
    fetched: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    """Key, stage and digests of what a trainer fetched."""
    forwards: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Replayed layers that were verified, by stage and layer."""
    unequal: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    missing_rows: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    num_rows: int = 0

    def differing(self, name: str) -> list[tuple[str, str]]:
        """Keys and stages whose digest is not that of the rollout."""
        return [
            (key, stage)
            for key, stage, digests in self.fetched
            if name in digests and name in self.sampled.get(key, {}) and digests[name] != self.sampled[key][name]
        ]

    @property
    def fault(self) -> tuple[str, str] | None:
        """The fault and the first thing to do; None where replay is whole as far as the log goes."""
        for name, what in zip(DIGESTS, ("tokens", "routes"), strict=True):
            if found := self.differing(name):
                key, stage = found[0]
                return (
                    f"{len(found)} fetched samples have other {what} than the rollout wrote, first {key} for {stage}",
                    "Look at what stands between rollout and trainer: padding, order of samples, types of the payload.",
                )
        if self.unequal:
            (stage, layer), num = min(self.unequal.items(), key=lambda item: item[0][1] or 0)
            return (
                f"layer {layer} ran other experts than were installed in {num} forward passes of {stage}",
                "Look at the order in which layers take their routes: router numbers, pipeline stages, recomputation.",
            )
        unknown = sorted({key for key, _, _ in self.fetched} - set(self.sampled))
        if unknown and self.sampled:
            return (
                f"{len(unknown)} fetched samples are of no rollout in these files, first {unknown[0]}",
                "Name the files of all processes of the run together.",
            )
        if missing := sum(self.missing_rows.values()):
            return (
                f"{missing} of {self.num_rows:,} rows had no route and took the trainer's own",
                "See which tokens the engine returns no routes for: cached prefixes, preempted requests, tool outputs.",
            )
        return None

    def lines(self) -> list[str]:
        """The verdict, what to do first, and what was compared."""
        verdict, first = self.fault or ("replay is whole", "None is needed.")
        layers = len({layer for _, layer in self.forwards})
        compared = len([1 for key, _, _ in self.fetched if key in self.sampled])
        return [
            f"R3 trace: {verdict}.",
            f"Do first: {first}",
            f"  {compared} fetched samples compared with {len(self.sampled)} of the rollout; "
            f"{sum(self.forwards.values())} replayed passes of {layers} layers verified.",
            "  It holds digests alone: the gap between the engines needs train_data_step{N}.jsonl.",
        ]

    def as_object(self) -> dict[str, Any]:
        """The same for a program."""
        verdict, first = self.fault or ("replay is whole", "None is needed.")
        return {
            "verdict": verdict, "do_first": first, "is_whole": self.fault is None, "num_sampled": len(self.sampled),
            "num_fetched": len(self.fetched), "num_verified": sum(self.forwards.values()),
            "missing_rows": sum(self.missing_rows.values()),
        }  # fmt: skip


def read(paths: Sequence[Path]) -> ReplayLog:
    """The log of these files; BadRows, a line each, for events that are not as NeMo-RL writes them."""
    log = ReplayLog()
    for path in paths:
        found = Found()
        for row, place in read_jsonl(path):
            if isinstance(row, Bad):
                found.add(f"{path}: {row.reason}")
                continue
            try:
                _take(log, row)
            except (KeyError, TypeError, ValueError) as error:
                reason = f"{error.args[0]}: missing" if isinstance(error, KeyError) else str(error)
                found.add(f"{path}: {place}: {reason}, in an event {row.get('event')!r}")
        found.refuse()
    if not (log.fetched or log.forwards or log.sampled):
        raise ValueError(f"{paths[0]}: expected events of NeMo-RL's R3 trace, got none that is known")
    return log


def _take(log: ReplayLog, row: Mapping[str, Any]) -> None:
    event = row.get("event")
    if event in ("rollout_payload_sample", "tq_fetch_sample"):
        digests = {name: str(row[name]["valid_sha256"]) for name in DIGESTS if name == "routed_experts" or name in row}
        if event == "tq_fetch_sample":
            log.fetched.append((str(row["key"]), str(row["stage"]), digests))
        else:
            log.sampled[str(row["key"])] = digests
    elif event == "router_replay_forward_verify":
        place = str(row["stage"]), None if row["layer_number"] is None else int(row["layer_number"])
        log.forwards[place] += 1
        log.num_rows += int(row["actual"]["shape"][0])
        if row["matches_expected"] is not True:
            log.unequal[place] += 1
        if rows := int(row["fallback_rows"]):
            log.missing_rows[place] += rows


def is_log(path: Path) -> bool:
    """Whether a file is one, by its name."""
    return NAME.fullmatch(path.name) is not None
