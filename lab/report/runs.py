"""A run folder as the report reads it, and its line of the summary table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from lab.config.load import NOT_HASHED, read_mapping
from lab.events import events
from lab.levels import Series, series, trailing_mean
from lab.records import RunFolder
from lab.report.style import listed, number
from lab.run_files import StoredConfig, StoredEvent
from lab.strict import validate
from lab.traces import Trace
from lab.verdict import ENTROPY, KL

ACCURACY = "eval/accuracy"
EXTREME = "rollout_corr/extreme_frac_tau2"


@dataclass(frozen=True)
class ReportRun:
    """One run as the report sees it; `label` is its name without the shared prefix.

    `index` decides its colour. Where a page has several treatments, the runs of one have one colour and the name
    `treatment` in common, and `replicate` counts them.
    """

    folder: RunFolder
    config: dict[str, Any] = field(repr=False, compare=False)
    index: int
    name: str
    label: str
    treatment: str
    replicate: int = 0

    @cached_property
    def config_text(self) -> str:
        """The text of config.yaml."""
        return (self.folder.path / "config.yaml").read_text(encoding="utf-8")

    @property
    def fingerprint(self) -> str:
        """Everything in the config but the seed that may change the numbers; the folder where it cannot be read."""
        kept: dict[str, Any] = {key: value for key, value in self.config.items() if key not in ("seed", *NOT_HASHED)}
        return json.dumps(kept, sort_keys=True) if kept else str(self.folder.path)

    def setting(self, *keys: str) -> Any:
        """The value under these keys of the config, or None."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, with the times of their steps where timing.jsonl has them."""
        timing = self.folder.timing()
        # A cluster run has no timing.jsonl: its rows hold their times themselves.
        return [timing.get(row["step"], {}) | row for row in self.folder.metrics()]

    @cached_property
    def events(self) -> list[StoredEvent]:
        """The lines of events.jsonl: interruptions of the run."""
        return events(self.folder.path)

    def series(self, name: str) -> Series:
        """The steps and finite values of one metric."""
        return series(self.metrics, name)

    @cached_property
    def verdict(self) -> dict[str, Any] | None:
        """verdict.json, or None for a run that has not ended."""
        return self.folder.verdict()

    @property
    def verdict_word(self) -> str:
        """stable, collapsed, undecided, or unfinished."""
        return "unfinished" if self.verdict is None else str(self.verdict.get("verdict", "undecided"))

    @property
    def remarks(self) -> list[str]:
        """The reasons of the verdict in sentences, the rules that could not be judged, and remarks if stable."""
        if self.verdict is None:
            return ["The run has no verdict yet."]
        reasons = [str(reason["sentence"]) for reason in self.verdict.get("reasons", ())]
        undecided = [f"Undecided: {text}." for text in self.verdict.get("undecided", ())]
        return [*reasons, *undecided, *map(str, self.verdict.get("remarks", ()))]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """manifest.json; empty without one."""
        return self.folder.manifest()

    @cached_property
    def newest_trace(self) -> Trace | None:
        """The trace of the latest step that left one whose log-probs are finite.

        A step that ended the run by a NaN leaves its trace too; nothing can be drawn of that one.
        """
        for path in reversed(self.folder.traces()):
            trace = Trace.load(path)
            if trace.logp_mu.isfinite().all() and trace.logp_old.isfinite().all():
                return trace
        return None

    @property
    def engine(self) -> str:
        """The inference engine in words: vLLM's precision, or the sandbox engine's own words in the manifest."""
        words, *parts = filter(None, self.engine_parts.values())
        if isinstance(self.setting("rollout", "precision"), dict):
            if self.manifest.get("engine_kernels") == "rounded":
                parts.append("rounded")  # values on the precision's grid, computed in a wider type
            return ", ".join([words, *parts])
        parts += self.training_alone
        return f"{words} ({', '.join(parts)})" if parts else words

    @property
    def engine_parts(self) -> dict[str, str]:
        """The words of `engine` by the field of the config that they state; empty for what goes without saying."""
        precision = self.setting("rollout", "precision")
        if isinstance(precision, dict):
            parts = {"rollout.precision.compute": f"vLLM {precision.get('compute')}"}
            for key, word in {"weights": "weights", "kv_cache": "cache"}.items():
                value = precision.get(key, "same")
                parts[f"rollout.precision.{key}"] = "" if value == "same" else f"{value} {word}"
            return parts
        trained = self.setting("training", "precision")
        return {
            "engine.defects": str(self.manifest.get("engine") or "–"),
            "training.precision": "" if trained in (None, "fp32") else f"training in {trained}",
        }

    @property
    def training_alone(self) -> list[str]:
        """The arithmetic of the training engine that no engine shares, not even the exact one."""
        products, units = self.setting("training", "products"), self.setting("training", "reduction_order", "units")
        found = [f"training products in {products}"] if products else []
        return [*found, f"training sums in up to {units} parts"] if isinstance(units, int) and units > 1 else found

    def row(self) -> dict[str, str]:
        """The run's line of the summary table, as text by column."""
        accuracy = [value for _, value in self.series(ACCURACY)]
        entropy = trailing_mean(self.series(ENTROPY), 5)
        minibatches = self.setting("algorithm", "batch", "num_minibatches")
        return {
            "engine": self.engine,
            "objective": str(self.setting("algorithm", "objective", "preset") or "–"),
            "replay": str(self.setting("algorithm", "replay", "mode") or "–"),
            "minibatches": str(minibatches or "–"),
            "steps": str(self.metrics[-1]["step"] if self.metrics else 0),
            "accuracy_first": number(accuracy[0] if accuracy else None, decimals=3),
            "accuracy_final": number(accuracy[-1] if accuracy else None, decimals=3),
            "accuracy_peak": number(max(accuracy, default=None), decimals=3),
            "kl": number(self.mean(KL)),
            "extreme": number(self.mean(EXTREME)),
            "entropy": number(entropy[-1][1] if entropy else None),
        }

    def mean(self, name: str) -> float | None:
        """The mean of a metric over the recorded steps; None without any."""
        values = [value for _, value in self.series(name)]
        return fmean(values) if values else None


def load_runs(folders: Sequence[RunFolder]) -> list[ReportRun]:
    """The runs in the given order, under distinct names; ValueError for no folder."""
    if not folders:
        raise ValueError("expected at least one run folder, got none")
    configs = [_config(folder) | _other_trainer(folder) for folder in folders]
    names = [str(c.get("name") or f.path.parent.name) for c, f in zip(configs, folders, strict=True)]
    seeds = [c.get("seed") for c in configs]
    # Only equal names are lengthened, by the seed first and the folder's time next.
    if len(set(names)) < len(names):
        names = [f"{n} seed {s}" if names.count(n) > 1 else n for n, s in zip(names, seeds, strict=True)]
    if len(set(names)) < len(names):
        stamps = [folder.path.name for folder in folders]
        names = [f"{n} {t}" if names.count(n) > 1 else n for n, t in zip(names, stamps, strict=True)]
    shared = len(shared_prefix(names))
    each = enumerate(zip(folders, configs, names, strict=True))
    return _coloured([ReportRun(f, c, i, n, n[shared:], n[shared:]) for i, (f, c, n) in each])


def _coloured(runs: list[ReportRun]) -> list[ReportRun]:
    """The runs with one colour per treatment; with one per run where all have the same treatment."""
    members = by_treatment(runs)
    if len(members) == 1:
        return runs
    found = {
        run.name: replace(run, index=index, treatment=shared_label(some, runs), replicate=replicate)
        for index, some in enumerate(members)
        for replicate, run in enumerate(some)
    }
    return [found[run.name] for run in runs]


def by_treatment(runs: Sequence[ReportRun]) -> list[tuple[ReportRun, ...]]:
    """The runs grouped by config without the seed, in the order of their first runs."""
    found: dict[str, list[ReportRun]] = {}
    for run in runs:
        found.setdefault(run.fingerprint, []).append(run)
    return [tuple(some) for some in found.values()]


def shared_label(some: Sequence[ReportRun], runs: Sequence[ReportRun]) -> str:
    """A name for some of the runs that fits none of the others: their one name, their labels' prefix, or all labels."""
    labels = [run.label for run in some]
    if len(some) == 1:
        return labels[0]
    others = [run for run in runs if run not in some]
    elsewhere = [text for run in others for text in (str(run.setting("name")), run.label)]
    names, prefix = {run.setting("name") for run in some}, shared_prefix(labels).rstrip("-_ ")
    if len(names) == 1 and (name := names.pop()) and name not in elsewhere:
        # Without the prefix that the labels lack, too.
        return str(name).removeprefix(some[0].name.removesuffix(some[0].label))
    return prefix if prefix and not any(text.startswith(prefix) for text in elsewhere) else listed(labels)


def shared_prefix(names: Sequence[str]) -> str:
    """The common prefix of all names, up to a hyphen, underscore or space; empty for one name."""
    if len(names) < 2:
        return ""
    # One character short of the shortest name: something of it remains, also where it ends in a mark.
    prefix = names[0][: max(0, min(map(len, names)) - 1)]
    for name in names[1:]:
        prefix = prefix[: next((i for i, (a, b) in enumerate(zip(prefix, name, strict=False)) if a != b), len(name))]
    cut = max(prefix.rfind(mark) for mark in "-_ ") + 1
    return prefix[:cut]


def _other_trainer(folder: RunFolder) -> dict[str, Any]:
    """The trainer and its own settings, beside the config, of a run that this project's trainers did not make."""
    return {key: value for key, value in folder.manifest().items() if key in ("trainer", "trainer_settings") and value}


def _config(folder: RunFolder) -> dict[str, Any]:
    """The run's config, of any version, as nested mappings; ConfigError where the page cannot read it."""
    path = folder.path / "config.yaml"
    return validate(StoredConfig, read_mapping(path), str(path)).model_dump(exclude_unset=True)
