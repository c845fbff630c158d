"""A number that is not finite ends a run: one line that names its step and where it came from, and a verdict."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab.recording import NonFiniteError, _check_finite
from lab.records import RunFolder
from lab.traces import Trace
from sandbox.engines.engine import SandboxEngine
from sandbox.training.engine import SandboxTrainingEngine
from sandbox.training.learner import step_loader
from tests.contracts import worlds
from tests.sandbox.training.test_failures import CONFIG, check_whole, fails, folders
from theory.algorithm import OptimizerSettings
from theory.contracts import Prompt, Response, Rollouts, TokenScores
from theory.loop import StepResult
from theory.streams import stream


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)


def check_ended(folder: RunFolder) -> None:
    """The verdict has the one reason, and what is there is whole."""
    verdict = json.loads((folder.path / "verdict.json").read_text())
    assert not verdict["stable"] and [reason["rule"] for reason in verdict["reasons"]] == ["non_finite"]
    check_whole(folder.path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_stops_the_run(
    value: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step whose row has a NaN or an infinity is written, then the run ends with exit code 1 and a verdict: the line
    names step, metric and tensors, and no checkpoint holds that step."""
    real = SandboxEngine.generate

    def spoiled(self: SandboxEngine, prompts, sampling):
        rollouts = real(self, prompts, sampling)
        if self.version == 1 and sampling.num_responses == 2:  # the second step's rollout, not an evaluation
            rollouts.responses[3].logp_mu[0] = -value
        return rollouts

    monkeypatch.setattr(SandboxEngine, "generate", spoiled)
    # A corrected-away token leaves the gradients finite, so that the row is what shows it.
    message = fails(capsys, "--algorithm.objective", "{preset: minirl_no_is}", "--traces.every", "3", code=1)
    assert re.match(r"step 2: \S+ is (nan|inf|-inf): logp_mu of this step is not finite\n", message), message
    (folder,) = map(RunFolder, folders())
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2] and message.split()[2] in rows[-1]["non_finite"]
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and checkpoint.step == 1
    # The step's tokens stay, though no trace was due: the value can be found in them.
    (trace,) = folder.path.glob("rollouts/*.safetensors")
    assert int(Trace.load(trace).logp_mu.isfinite().logical_not().sum()) == 1
    check_ended(folder)


def test_finite_gradients_whose_norm_overflows_are_clipped() -> None:
    """Squares of 1e25 are infinite in 32 bits. Clipped, the step is that of gradients 1e20 times smaller."""
    stepped = []
    for scale in (1e25, 1e5):
        engine = SandboxTrainingEngine(worlds.model(), OptimizerSettings(learning_rate=1e-3, max_grad_norm=1.0))
        for place, parameter in enumerate(engine.parameters):
            drawn = torch.randn(parameter.shape, generator=stream(place, "huge gradients"), dtype=parameter.dtype)
            parameter.grad = scale * drawn
        expected = scale * math.sqrt(sum(float((p.grad.double() / scale).square().sum()) for p in engine.parameters))
        assert engine._take_step()["actor/grad_norm"] == pytest.approx(expected, rel=1e-5)
        stepped.append(torch.cat([p.detach().flatten() for p in engine.parameters]))
    assert stepped[0].isfinite().all() and torch.allclose(*stepped, rtol=1e-5, atol=1e-9)


def test_the_longest_run_begins_at_once() -> None:
    """The steps to come take no memory: as a tensor these would take 8 TB."""
    loader = step_loader(3, 10**12)
    assert len(loader) == 10**12 - 3 and next(iter(loader)) == 3


def test_a_gradient_that_is_not_finite_names_its_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight that turns to inf before the second step's first update: step, metric and tensor are in the line, and
    the verdict gives the reason. The step's batch stays, though no trace was due."""
    real = SandboxTrainingEngine.update

    def poisoned(self: SandboxTrainingEngine, *args):
        if self.num_updates == 2:
            self.model.norm.data.fill_(math.inf)
        return real(self, *args)

    monkeypatch.setattr(SandboxTrainingEngine, "update", poisoned)
    message = fails(capsys, "--traces.every", "3", code=1)
    assert re.match(r"step 2: actor/grad_norm is nan: the gradient of \S+.* is not finite\n", message), message
    (folder,) = map(RunFolder, folders())
    assert folder.metrics()[-1] == {"step": 2, "actor/grad_norm": None, "non_finite": ["actor/grad_norm"]}
    (path,) = folder.traces()
    trace = Trace.load(path)
    # The old pass was before the update, with the weights as they were.
    assert (trace.step, len(trace)) == (2, 8) and bool(trace.logp_old.isfinite().all())
    check_ended(folder)


@pytest.mark.parametrize("of", ["weight", "activation"])
def test_an_engine_that_overflows_names_its_step(
    of: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that grow beyond fp16 in the second step end the run there, where they are handed over or used. At the
    hand-over the line names them, and their values stay with their places."""
    real = SandboxTrainingEngine.update

    def grown(self: SandboxTrainingEngine, *args):
        stats = real(self, *args)
        if self.num_updates == 4:
            self.model.norm.data.fill_(1e6)
            self.model.layers[0].attention_norm.data.fill_(1e6)
            self.model.embedding.data[1, 2] = -2e6
        return stats

    monkeypatch.setattr(SandboxTrainingEngine, "update", grown)
    defect = f"[{{kind: {of}_precision, format: fp16}}]"
    # Activations are rounded from the third step's rollout on.
    step = {"weight": 2, "activation": 3}[of]
    message = fails(capsys, "--engine.defects", defect, code=1)
    assert message.startswith(f"step {step}: fp16: expected magnitudes of at most 65504, got ")
    (folder,) = map(RunFolder, folders())
    assert folder.metrics()[-1] == {"step": step, "rollout_corr/k3_kl": None, "non_finite": ["rollout_corr/k3_kl"]}
    check_ended(folder)
    path = folder.path / "evidence" / "overflow-000002.safetensors"
    assert path.exists() == (of == "weight") and (str(path) in message) == (of == "weight")
    if of == "weight":
        names = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight")
        assert (
            all(name in message for name in names) and "got 2e+06 (" in message and "1 value of model.embed" in message
        )
        kept = load_file(path)
        assert sorted(kept) == sorted(f"{name}.{part}" for name in names for part in ("places", "values"))
        assert kept["model.embed_tokens.weight.places"].tolist() == [[1, 2]]
        assert kept["model.embed_tokens.weight.values"].tolist() == [-2e6]
        assert kept["model.norm.weight.places"].flatten().tolist() == list(range(32))
        assert bool((kept["model.norm.weight.values"] == 1e6).all())


def test_weights_beyond_fp16_leave_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the first hand-over overflows, there is nothing to resume."""
    real = SandboxEngine.load_weights

    def large(self: SandboxEngine, named_tensors, version: int):
        real(self, [(name, tensor * 1e6) for name, tensor in named_tensors], version)

    monkeypatch.setattr(SandboxEngine, "load_weights", large)
    message = fails(capsys, "--engine.defects", "[{kind: weight_precision, format: fp16}]", code=1)
    assert message.startswith("fp16: expected magnitudes of at most 65504, got ") and folders() == []


def test_the_gradient_that_is_not_finite_is_named_alone() -> None:
    """One NaN in one gradient names that parameter, whichever comes before it in the model."""
    engine = worlds.training_engine(worlds.model())
    for parameter in engine.parameters:
        parameter.grad = torch.zeros_like(parameter)
    engine.parameters[-1].grad.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError, match=rf"^actor/grad_norm is nan: the gradient of {engine.names[-1]} is not"):
        engine._take_step()


def test_a_metric_that_overflows_says_so() -> None:
    """Where all tensors are finite and a metric is not, the line says that it overflowed."""
    response = Response(Prompt("", (1,), ""), torch.tensor([1]), torch.zeros(1), torch.ones(1) > 0, "stop", 0)
    scores = TokenScores(torch.zeros(1, 1), torch.zeros(1, 1))
    result = StepResult({}, Rollouts((response,)), torch.zeros(1), scores)
    _check_finite({"rollout_corr/chi2_token": 1e30}, result)
    with pytest.raises(NonFiniteError, match=r"^rollout_corr/chi2_token is inf: finite logp_mu, .* overflow in it$"):
        _check_finite({"reward/mean": 0.0, "rollout_corr/chi2_token": math.inf}, result)
