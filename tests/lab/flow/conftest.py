"""The study that each file of tests states in its CONFIG, run once."""

from __future__ import annotations

import pandas as pd
import pytest

from lab.flow import FlowConfig, flow, load_config


@pytest.fixture(scope="module")
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FlowConfig:
    """The file's CONFIG."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(request.module.CONFIG)
    return load_config(path)


@pytest.fixture(scope="module")
def frame(config: FlowConfig) -> pd.DataFrame:
    """Its rows."""
    return flow(config)
