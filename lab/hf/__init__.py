"""Hugging Face models, read and named once for both worlds: config.json, weight names and shapes, refusals.

`families.py` has a row per architecture; a new one needs a row there and its models in the tests. `ModelShape` is
the model that a config.json states, with the table of its weights.
"""

from lab.hf.fit import misfits, misshapen, some
from lab.hf.reader import parse_shape, read_json
from lab.hf.shape import LatentAttention, ModelShape, Shape
from lab.hf.writer import config_fields, family_of, in_full, with_special_ids

__all__ = [
    "LatentAttention",
    "ModelShape",
    "Shape",
    "config_fields",
    "family_of",
    "in_full",
    "misfits",
    "misshapen",
    "parse_shape",
    "read_json",
    "some",
    "with_special_ids",
]
