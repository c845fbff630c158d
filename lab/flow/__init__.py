"""Exact training as a study: problems x engine errors x objectives x (N, B), one run each, without samples or seeds.

`flow(load_config(path))` gives a pandas dataframe, with a row per observed update of each run.
"""

from lab.flow.config import FlowConfig, load_config
from lab.flow.run import flow
from lab.flow.table import COLUMNS, ends

__all__ = ["COLUMNS", "FlowConfig", "ends", "flow", "load_config"]
