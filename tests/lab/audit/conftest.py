"""A small audit and its rows, computed once a session."""

from __future__ import annotations

import pandas as pd
import pytest

from lab.audit import AuditConfig, audit, load_config

CONFIG = """
name: tiny
backend: exact
policies:
  - {kind: tabular, num_tokens: 2, lengths: [2, 3], seeds: 6}
  - {kind: linear, features: bigram, num_tokens: 3, has_end: true, lengths: [2], seeds: 2, objectives: [none, token]}
discrepancy: {kind: logits, token_kl: [1e-3, 1e-2]}
staleness: {direction: random, token_kl: [0.0, 3e-3]}
rewards: [sparse, last]
groups: [{size: 2}, {size: infinite, baseline: mean}, {size: infinite, baseline: none}]
objectives:
  - {preset: reinforce, label: none}
  - {preset: reinforce, label: token, correction: {name: token_is, numerator: pi}}
  - {preset: reinforce, label: sequence, correction: {name: seq_tis, numerator: pi, cap: .inf}}
  - {preset: grpo}
num_responses: [64, 1024]
compare: {first: token, second: none}
"""


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> AuditConfig:
    """A small audit of both kinds of policies."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return load_config(path)


@pytest.fixture(scope="session")
def frame(config: AuditConfig) -> pd.DataFrame:
    """Its rows."""
    return audit(config)
