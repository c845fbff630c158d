"""One cluster run from config to verdict: Ray, Megatron-core ranks, vLLM engines, record, report.

A lost engine is replaced within a step (`cluster.rollout_group`); a lost rank ends the group of ranks, and the run
continues from its last checkpoint, as it does after a kill of the whole run.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.beginning import input_hashes, record_process, require_same_inputs
from lab.config.load import config_hash, to_yaml
from lab.ending import finish
from lab.progress import ProgressKind
from lab.records import RunFolder, manifest
from scaled.checks import ready
from scaled.config import ScaledRun
from scaled.plan.summary import metric_payloads
from scaled.vllm_engine.quantize import choose_kernels


def run(config: ScaledRun, *, folder: RunFolder | None = None, progress: ProgressKind = "bar") -> RunFolder:
    """Runs, or continues, `folder`; returns it with verdict and report written.

    Raises ValueError where the config does not fit its files, its packages or the cluster; EngineLost and RankDied
    (OSErrors) where engines or ranks died too often; ArithmeticError where a gradient is not finite (after writing
    verdict and report) or an engine disagrees with the trainer (ProbeError; the run can be resumed).
    """
    versions, shape, task = ready(config)
    # Imported late: both need Ray, for which `ready` has just checked.
    from scaled.cluster.ray_cluster import cluster
    from scaled.session import Session

    is_fresh = folder is None
    if folder is None:
        folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
        folder.write_config(to_yaml(config))
    folder = RunFolder(folder.path.resolve())  # ranks and engines may have another working folder
    with folder.hold():
        inputs = input_hashes(config.model.path, config.task)
        require_same_inputs(folder, inputs)
        found = manifest(seed=config.seed)
        found["versions"] |= versions
        try:
            with cluster(config, folder.path) as places:
                # Only the cluster knows whether engines get GPUs: this process may have none.
                kernels = choose_kernels(config.rollout.precision, not places.has_gpus)
                found |= {"layout": _layout(config), "engine_kernels": kernels}
                record_process(folder, found | {"planned_bytes": metric_payloads(config, shape)}, inputs)
                session = Session(config, folder, task, places)
                try:
                    session.train(progress)
                finally:
                    session.close()
        except (ValueError, OSError):
            # The manifest is the first record, so without one no cluster was reached and nothing was started.
            if is_fresh and not folder.manifest():
                folder.discard()
            raise
        # After the cluster has ended, so that no GPU is held while the page is written.
        finish(config, folder)
    return folder


def _layout(config: ScaledRun) -> dict[str, Any]:
    """The run's layout, for the manifest."""
    training = config.training.model_dump(include={"num_ranks", *_PARALLEL}) | {
        "data_parallel": config.training.data_parallel
    }
    return {"training": training, "engines": config.rollout.num_engines, "placement": config.cluster.placement}


_PARALLEL = (
    "tensor_parallel", "context_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel",
    "expert_tensor_parallel", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
)  # fmt: skip


__all__ = ["run"]
