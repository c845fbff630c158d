"""A model trained on the cluster as a Hugging Face folder, from a run's checkpoint; needs neither Megatron nor Ray.

Weights are read and written one tensor at a time, so that a machine without room for the model can export it.
"""

from __future__ import annotations

import json
from pathlib import Path

from lab.checkpoints import read_shards
from lab.exporting import copy_tokenizer, write_folder
from lab.hf import in_full, read_json
from lab.hf.shards import MAX_SHARD_BYTES, write_weights
from lab.records import RunFolder
from lab.tasks.tokenizers import CharTokenizer
from scaled.checks import open_task
from scaled.config import ScaledRun
from scaled.megatron_engine.checkpoint_reader import CheckpointReader
from scaled.model_shape import load_shape

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(
    folder: RunFolder,
    config: ScaledRun,
    to: Path,
    step: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[int, bool]:
    """Writes the model of the run's checkpoint of `step` (default: the newest); returns the step and whether it wrote.

    The weights have the trainer's own bits, in its precision. config.json and tokenizer are those of the folder that
    the run started from. False: the export existed already. Raises ValueError, naming the file, for a checkpoint that
    is incomplete or of another model, and where `to` holds anything else.
    """
    checkpoint = read_shards(folder.checkpoint(step))
    source = Path(config.model.path)
    shape = load_shape(source, config.model.shape)
    reader = CheckpointReader(checkpoint.path, shape)
    # In full: vLLM takes the wrong score for a gate whose fields transformers omits (`in_full`).
    fields = in_full(read_json(source / "config.json"), shape)
    fields["dtype"] = DTYPES[config.training.precision]
    fields.pop("torch_dtype", None)  # its name in older files
    fields.pop("auto_map", None)  # classes in Python files, which are not copied
    if fields.get("model_type") is not None:
        fields["model_type"] = shape.family  # transformers opens no kimi_k2
    if fields.get("num_nextn_predict_layers"):
        fields["num_nextn_predict_layers"] = 0  # layers that are not trained, and not written

    def fill(target: Path) -> None:
        (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        if not copy_tokenizer(source, target) and not config.task.needs_tokenizer:
            tokenizer = open_task(config).tokenizer
            assert isinstance(tokenizer, CharTokenizer), "a task's own tokenizer is a CharTokenizer"
            tokenizer.save(target)
        write_weights(target, reader.stated, reader.read, max_shard_bytes)

    return checkpoint.step, write_folder(to, fill)


__all__ = ["export"]
