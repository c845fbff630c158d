"""Laws of sandbox/ledger/engine_fit.py, with an engine of ours where claim 31 has vLLM (tests/scaled has that)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firstorder.worlds import Schemas
from lab.config.load import load
from sandbox.config import SandboxRun
from sandbox.engines import RouterNoise
from sandbox.ledger import engine_fit
from sandbox.ledger.cells import Cell
from sandbox.ledger.engine_fit import Sampled, fitted_row
from sandbox.measure.defect_table import Bench
from tests.sandbox.measure.test_calibrate import OVERRIDES, trace_of

pytestmark = pytest.mark.unchecked

SEED = 3


@pytest.fixture(scope="module")
def config() -> SandboxRun:
    found = load("configs/smoke.yaml", OVERRIDES, Schemas())
    assert isinstance(found, SandboxRun)
    return found


@pytest.fixture(scope="module")
def asked() -> list[int]:
    return []


@pytest.fixture(scope="module")
def row(config: SandboxRun, asked: list[int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A row whose real engine has router noise of 0.1 on the model that is fitted to, and of 0.2 on the other."""

    def planted(config: SandboxRun, number: int, folder: Path) -> Sampled:
        asked.append(number)
        own = config.model_copy(update={"seed": number})
        bench = Bench(own, num_steps=0)
        noise = RouterNoise(std=0.2 if number % 2 else 0.1)
        return Sampled(own, tuple(trace_of(bench, (noise,), draw) for draw in (7, 8)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_fit, "sampled", planted)
        patch.setattr(engine_fit, "NUM_DRAWS", 2)
        patch.setattr(engine_fit, "NUM_TRIALS", 6)
        cell = Cell("vllm", "fitted", SEED, config, "0123456789ab", "engine_fit")
        return fitted_row(cell, str(tmp_path_factory.mktemp("fits")))


def test_a_planted_engine_is_held_against_another_model(row: Any, asked: list[int]) -> None:
    """Fitted to one model's traces, router noise comes back; where the real engine has twice the noise, it falls short.

    Two batches of some 1,000 tokens on either side; a quarter is three of the standard errors that the share of
    differing routers shows from batch to batch. Routers differ about as much as the noise, while it is small.
    """
    assert asked == [2 * SEED, 2 * SEED + 1]
    assert "router_noise" in row["engine"]
    assert row["seen"]["routers that differ"] == pytest.approx(1.0, rel=0.25)
    assert row["probes"]["routers that differ"] == pytest.approx(0.5, rel=0.35)


def test_the_target_is_the_mean_over_traces(config: SandboxRun) -> None:
    """The target is the mean of the traces' figures, and the floors know all of their tokens."""
    bench = Bench(config, num_steps=0)
    traces = tuple(trace_of(bench, (RouterNoise(std=0.1),), draw) for draw in (7, 8, 9))
    shares = []
    for trace in traces:
        assert trace.experts_mu is not None and trace.experts_old is not None
        shares.append((trace.experts_mu != trace.experts_old).any(-1).double().mean().item())
    calibration = Sampled(config, traces).calibration()
    assert calibration.target["routers that differ"] == pytest.approx(sum(shares) / 3)
    one = Sampled(config, traces[:1]).calibration()
    assert calibration.floors["tail"] <= one.floors["tail"]
