"""NeMo-RL's log of replayed routes: whether the trainer ran the experts that the engine recorded.

`r3_trace_{host}_pid{P}.jsonl`, a file per process, an event per line (nemo_rl/utils/r3_trace.py at 4677823;
NRL_R3_TRACE=1, and NRL_R3_TRACE_VERIFY_FORWARD=1 for the events of the forward pass). The log has digests of routes,
but neither routes nor log-probabilities: it shows where replay breaks, but not the gap between the engines. Events that
are read:

| event                        | fields                                                              |
|------------------------------|---------------------------------------------------------------------|
| rollout_payload_sample       | key, routed_experts.valid_sha256, input_ids.valid_sha256            |
| tq_fetch_sample              | the same, and stage: the trainer's fetch for that stage             |
| router_replay_forward_verify | stage, layer_number, matches_expected, fallback_rows, actual.shape  |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.doctor.importers.bad_rows import Bad, BadRowCollector
from lab.doctor.importers.format import DumpDescription
from lab.doctor.importers.reading import read_jsonl

NAME = re.compile(r"r3_trace_.*\.jsonl")
DIGESTS = ("input_ids", "routed_experts")
FORMAT = DumpDescription(
    "NeMo-RL, R3 trace", "r3_trace_{host}_pid{P}.jsonl, all files of a run together",
    "digests of routes at the rollout, after the transfer and in the forward pass",
    "Routes, tokens, log-probabilities: it shows whether replay is complete, but not the gap.",
    "NVIDIA-NeMo/RL nemo_rl/utils/r3_trace.py at 4677823",
)  # fmt: skip


@dataclass
class ReplayLog:
    """The events of all files of a run."""

    sampled: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """Digests by key at the rollout."""
    fetched: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    """Key, stage and digests of every fetch by a trainer."""
    forwards: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Verified passes of a layer, by stage and layer."""
    unequal: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Those whose experts are not the recorded ones."""
    missing_rows: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """Rows of verified passes that had no recorded route."""
    num_rows: int = 0
    """All rows of verified passes."""

    def differing(self, name: str) -> list[tuple[str, str]]:
        """Key and stage of every fetch whose digest of `name` differs from the rollout's."""
        return [
            (key, stage)
            for key, stage, digests in self.fetched
            if name in digests and name in self.sampled.get(key, {}) and digests[name] != self.sampled[key][name]
        ]

    @property
    def fault(self) -> tuple[str, str] | None:
        """The fault and the first thing to do; None if the log shows no break in the replay.

        A log with nothing to compare is a fault, too: it does not show that replay is complete.
        """
        # Tokens first: where they differ, other routes follow from them.
        for name, what in zip(DIGESTS, ("tokens", "routes"), strict=True):
            if found := self.differing(name):
                key, stage = found[0]
                return (
                    f"{len(found)} fetched samples have other {what} than the rollout wrote, first {key} for {stage}",
                    "Check the path from rollout to trainer: padding, order of samples, types of the payload.",
                )
        if self.unequal:
            (stage, layer), num = min(self.unequal.items(), key=lambda item: item[0][1] or 0)
            return (
                f"layer {layer} ran other experts than were installed in {num} forward passes of {stage}",
                "Check the order in which layers take their routes: router numbers, pipeline stages, recomputation.",
            )
        unknown = sorted({key for key, _, _ in self.fetched} - set(self.sampled))
        if unknown and self.sampled:
            return (
                f"{len(unknown)} fetched samples belong to no rollout in these files, first {unknown[0]}",
                "Pass the files of all processes of the run together.",
            )
        if missing := sum(self.missing_rows.values()):
            return (
                f"{missing} of {self.num_rows:,} rows had no route and took the trainer's own",
                "Find the tokens without routes from the engine: cached prefixes, preempted requests, tool outputs.",
            )
        if not (self.num_compared or self.forwards):
            lacks = "fetch by a trainer" if self.sampled else "payload of a rollout"
            return (
                f"nothing was compared, as no {lacks} is in these files",
                "Pass the files of all processes of the run together.",
            )
        return None

    @property
    def num_compared(self) -> int:
        """The number of fetches whose sample is in the rollout's part of the log."""
        return sum(key in self.sampled for key, _, _ in self.fetched)

    @property
    def _told(self) -> tuple[str, str]:
        return self.fault or ("replay is complete", "No change is needed.")

    def lines(self) -> list[str]:
        """The verdict, the first thing to do, and the counts of the comparison."""
        verdict, first = self._told
        layers = len({layer for _, layer in self.forwards})
        return [
            f"R3 trace: {verdict}.",
            f"Do first: {first}",
            f"  {self.num_compared} fetched samples compared with {len(self.sampled)} of the rollout; "
            f"{sum(self.forwards.values())} replayed layer passes over {layers} layers verified.",
            "  The trace holds only digests: the gap between the engines needs train_data_step{N}.jsonl.",
        ]

    def as_object(self) -> dict[str, Any]:
        """The verdict and the counts for a program."""
        verdict, first = self._told
        return {
            "verdict": verdict, "do_first": first, "is_whole": self.fault is None, "num_sampled": len(self.sampled),
            "num_fetched": len(self.fetched), "num_verified": sum(self.forwards.values()),
            "missing_rows": sum(self.missing_rows.values()),
        }  # fmt: skip


def read(paths: Sequence[Path]) -> ReplayLog:
    """The log of these files.

    Raises BadRows, with a line per event, where a file's events lack NeMo-RL's fields, and ValueError where no file has
    an event that is read.
    """
    log = ReplayLog()
    for path in paths:
        found = BadRowCollector()
        for row, place in read_jsonl(path):
            if isinstance(row, Bad):
                found.add(f"{path}: {row.reason}")
                continue
            try:
                _take(log, row)
            except (LookupError, TypeError, ValueError, OverflowError) as error:
                reason = f"{error.args[0]}: missing" if isinstance(error, KeyError) else str(error)
                found.add(f"{path}: {place}: {reason}, in an event {row.get('event')!r}")
        found.refuse()
    if not (log.fetched or log.forwards or log.sampled):
        raise ValueError(f"{paths[0]}: expected events of NeMo-RL's R3 trace, got none")
    return log


def _take(log: ReplayLog, row: Mapping[str, Any]) -> None:
    event = row.get("event")
    if event in ("rollout_payload_sample", "tq_fetch_sample"):
        # A missing routed_experts raises KeyError, which `read` reports; input_ids are optional.
        digests = {name: str(row[name]["valid_sha256"]) for name in DIGESTS if name == "routed_experts" or name in row}
        if event == "tq_fetch_sample":
            log.fetched.append((str(row["key"]), str(row["stage"]), digests))
        else:
            log.sampled[str(row["key"])] = digests
    elif event == "router_replay_forward_verify":
        place = str(row["stage"]), None if row["layer_number"] is None else int(row["layer_number"])
        log.forwards[place] += 1
        log.num_rows += int(row["actual"]["shape"][0])
        # `is not True`, since a truthy value such as the string "false" is no match.
        if row["matches_expected"] is not True:
            log.unequal[place] += 1
        if rows := int(row["fallback_rows"]):
            log.missing_rows[place] += rows


def is_log(path: Path) -> bool:
    """Whether the file's name is that of an R3 trace."""
    return NAME.fullmatch(path.name) is not None
