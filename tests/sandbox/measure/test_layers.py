"""A fault of one layer is named in its own place, a sound engine is in the band, and dumps are what a pass computes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.doctor.layers.modules import inspect
from lab.doctor.layers.routers import over_margin, trace_routes
from lab.doctor.layers.states import States
from lab.traces import Trace
from sandbox.engines import RouterNoise
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.measure.layers import DecoderReference
from sandbox.model import MoE
from sandbox.model.checkpoint import to_hf
from sandbox.training.engine import SandboxTrainingEngine
from tests.pages.layers import MODELS, PLANTS, Patient, V, hidden_states
from theory.algorithm import OptimizerSettings
from theory.contracts import Prompt, Sampling
from theory.routing.gates import select
from theory.routing.passes import RoutingPlan
from theory.streams import stream

SEED = 7
"""Of models that docs/doctor.md does not count."""


@pytest.fixture(scope="module")
def patient() -> Patient:
    """DeepSeek's experts: sigmoid gate, a bias of the choice, a shared expert."""
    return Patient(MODELS["dots1's"], SEED)


@pytest.mark.parametrize("name", PLANTS)
def test_a_fault_of_one_layer_is_named_in_its_own_place(name: str, patient: Patient) -> None:
    """In any layer the module is named, by the model and by two dumps: wrong experts, FP8 in one layer, a factor."""
    plant = PLANTS[name]
    for layer in (1, 3):
        engine = patient.engine(plant, layer)
        wanted = f"model.layers.{layer}.{plant.module}"
        assert (patient.by_model(engine), patient.by_pair(engine)) == (wanted, wanted)


@pytest.mark.parametrize("name", ["experts one place on", "keys of other heads", "router's rows one place on"])
def test_a_trace_puts_a_coarse_fault_between_two_routers(name: str, patient: Patient) -> None:
    """Without hidden states the routers before the fault are right and the first one after it is not."""
    assert patient.by_trace(patient.engine(PLANTS[name], 2)) == patient.expected_by_trace(PLANTS[name], 2)


def test_a_sound_engine_in_bf16_is_within_the_band(patient: Patient) -> None:
    """Rounded as it says, no module, no pair and no router of it is outside."""
    engine = patient.engine(None, 0)
    assert (patient.by_model(engine), patient.by_pair(engine), patient.by_trace(engine)) == ("", "", ("", ""))


def test_an_engine_in_fp8_is_outside_the_band_of_bf16_and_within_its_own() -> None:
    """The band is that of the precision that is asked for: an FP8 engine has every matrix product out of bf16's."""
    patient = Patient(MODELS["Qwen3-MoE's"], SEED, num_prompts=1)
    fp8 = patient.reference.rounded("fp8")
    states = hidden_states(fp8.model, patient.sequences, fp8.numerics)
    out = {check.module for check in inspect(states, patient.reference, "bf16") if check.is_out}
    assert {f"model.layers.{n}.{part}" for n in range(4) for part in ("self_attn", "mlp")} <= out
    assert not [check for check in inspect(states, patient.reference, "fp8") if check.is_out]


def test_a_dump_of_the_exact_engine_is_the_references_to_rounding_and_survives_its_file(tmp_path: Path) -> None:
    """In float32 every module's output is the reference's to 1e-5, and a file gives the same states back."""
    model = MoE(MODELS["Qwen3-MoE's"], stream(SEED, "exact"))
    tokens = [torch.randint(0, V, (n,), generator=stream(SEED, str(n))) for n in (5, 11)]
    states = hidden_states(model, tokens, dtype=torch.float32)
    checks = inspect(states, DecoderReference(model), "fp32")
    assert len(checks) == 2 + 4 * 4 + 3 and max(check.error for check in checks) < 1e-5
    states.save(tmp_path / "own.safetensors")
    again = States.load(tmp_path / "own.safetensors")
    assert again.values.keys() == states.values.keys() and again.precision == "fp32"
    assert all(torch.equal(value, states.values[name]) for name, value in again.values.items())


def test_an_input_before_the_norm_is_told_from_one_after_it() -> None:
    """Engines that fuse the norm hand the bare residual to a module: the same modules are in the band, none is out."""
    patient = Patient(MODELS["Qwen3-MoE's"], SEED, num_prompts=1)
    x, values = patient.old.values["model.embed_tokens.out"].float(), dict(patient.old.values)
    for layer in range(4):
        for part in ("self_attn", "mlp"):
            values[f"model.layers.{layer}.{part}.in"] = x.bfloat16()
            x = x + values[f"model.layers.{layer}.{part}.out"].float()
    bare = States(patient.old.tokens, patient.old.lengths, values)
    checks = inspect(bare, patient.reference, "bf16")
    assert not [check.module for check in checks if check.is_out]
    assert not [check for check in checks if "layernorm" in check.module] and len(checks) == 2 + 4 * 2 + 3


def test_the_choice_of_the_scores_themselves_is_within_its_margin() -> None:
    """Over the margin: at most 0 for the top-k itself, and the gap of the two scores where one pair is exchanged."""
    scores = torch.randn(50, 8, generator=stream(0, "margin"))
    chosen = select(scores, 2, MODELS["Qwen3-MoE's"].gate)
    assert bool((over_margin(scores, chosen) <= 0).all())
    order = scores.argsort(1, descending=True)
    other = torch.stack([order[:, 0], order[:, 3]], 1)
    assert torch.equal(
        over_margin(scores, other), scores.gather(1, order[:, 1:2])[:, 0] - scores.gather(1, other[:, 1:])[:, 0]
    )


def traced(temperature: float, *defects: Defect, replays: bool = False) -> tuple[Trace, MoE]:
    """A trace of this model under an engine with these defects, and the model; the old pass replays mu's experts or
    routes by itself."""
    config = MODELS["Qwen3-MoE's"]
    model = MoE(config, stream(SEED, "trace"))
    engine = SandboxEngine(config, defects)
    engine.load_weights(to_hf(model), 0)
    prompts = [Prompt(str(i), (1 + i, 2, 3), "") for i in range(4)]
    rollouts = engine.generate(prompts, Sampling(max_tokens=8, num_responses=2, temperature=temperature, seed=0))
    plan = RoutingPlan("replay", rollouts.experts) if replays else RoutingPlan("natural")
    scores = SandboxTrainingEngine(model, OptimizerSettings(learning_rate=1e-3)).score(rollouts, plan)
    return Trace.of(rollouts, scores, torch.zeros(8), 0), model


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_trace_of_the_model_itself_has_nothing_out_and_its_log_probabilities_to_the_bit(temperature: float) -> None:
    """The exact engine's trace against the same weights in float32: no router differs, log-probs agree to 1e-5."""
    trace, model = traced(temperature)
    for side in ("mu", "old"):
        found = trace_routes(trace, side, DecoderReference(model), "fp32")
        assert not found.is_out and all(one.share_differs == 0 for one in found.routers) and len(found.routers) == 3
        assert found.tokens.error < 1e-5


@pytest.mark.parametrize("replays", [False, True])
def test_a_trainer_that_replays_is_not_at_fault(replays: bool) -> None:
    """Under R3 old's log-probs come from mu's experts, and its recorded choices from the live logits there: the side of
    the trainer matches the model either way, while mu's noisy router is out."""
    trace, model = traced(1.0, RouterNoise(std=0.5), replays=replays)
    old, mu = (trace_routes(trace, side, DecoderReference(model), "fp32") for side in ("old", "mu"))
    assert not old.is_out and all(one.share_differs == 0 for one in old.routers) and old.tokens.error < 1e-5
    assert mu.is_out and mu.first is not None and mu.first.layer == old.routers[0].layer


def test_an_expert_that_is_never_chosen_is_still_the_models() -> None:
    """A dump tells the number of experts by the largest id alone: a record that has fewer is the model's, too."""
    trace, model = traced(1.0)
    record = trace.record_mu
    assert record is not None and record.num_experts == model.config.num_experts
    first = torch.arange(record.num_slots, dtype=record.experts.dtype).expand_as(record.experts).contiguous()
    few = replace(record, experts=first, num_experts=record.num_slots)
    sequences = [trace.tokens[a:b].long() for a, b in itertools.pairwise(trace.offsets.tolist())]
    wide = replace(few, num_experts=record.num_experts)
    logps = [DecoderReference(model).routed(sequences, one).logp_R for one in (few, wide)]
    assert torch.equal(*logps)
