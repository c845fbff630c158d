"""TRL's own trainer under the sandbox's engine: the same recipe takes the same steps in both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.config.load import apply, read, validate
from lab.config.shipped import FOLDER
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.tasks.arithmetic import ArithmeticTask
from sandbox.bench.reference_work import even_share
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.in_trl.generation import SandboxGeneration, is_installed
from sandbox.run import open_task
from sandbox.run import run as run_here

needs_trl = pytest.mark.skipif(not is_installed(), reason="TRL and accelerate are not installed")


@pytest.fixture(autouse=True)
def graded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that random weights have."""
    monkeypatch.setattr(ArithmeticTask, "reward", lambda self, prompt, response: even_share(response))


def config(tmp_path: Path, **changes: str) -> SandboxRun:
    """The smoke config on policy, with GRPO's group mean (TRL's division by the deviation adds 1e-4 to it)."""
    raw = read(FOLDER / "smoke.yaml")
    plain = {
        "output": str(tmp_path), "num_steps": "3", "algorithm.objective": "{preset: grpo, advantage: group_mean}",
        "algorithm.batch.num_minibatches": "1", "algorithm.optimizer.weight_decay": "0.0",
    }  # fmt: skip
    apply(raw, list((plain | {key.replace("__", "."): value for key, value in changes.items()}).items()))
    return validate(SandboxRun, raw, "smoke")


def run_there(config: SandboxRun, **own: Any) -> RunFolder:
    """The run in TRL."""
    from sandbox.in_trl.training import train

    return train(config, own, progress="none")


SAME = (
    "reward/mean", "rollout_corr/k3_kl", "rollout_corr/chi2_seq", "actor/entropy", "actor/grad_norm", "eval/accuracy",
)  # fmt: skip


@needs_trl
@pytest.mark.parametrize("correction", ["null", "{name: token_tis, cap: 1.02}"])
def test_a_run_in_trl_takes_the_steps_of_the_sandbox(tmp_path: Path, correction: str) -> None:
    """Three global steps with one update each: rollouts, old pass, gradient and weights agree to rounding.

    The weight is cut for a part of the tokens, and the load-balancing loss that TRL would add is off.
    """
    wanted = config(tmp_path, algorithm__objective__correction=correction)
    here, there = run_here(wanted, progress="none").metrics(), run_there(wanted).metrics()
    assert [row["step"] for row in here] == [row["step"] for row in there] == [0, 1, 2, 3]
    for ours, theirs in zip(here, there, strict=True):
        # Not in every row: the first has the evaluation alone.
        for name in ours.keys() & set(SAME):
            # Rounding of float32 in two model codes; three updates of a rate of 1e-2 enlarge it.
            assert theirs[name] == pytest.approx(ours[name], rel=2e-4, abs=1e-6), (ours["step"], name)


@needs_trl
def test_the_first_rollout_has_the_same_bits_with_several_updates(tmp_path: Path) -> None:
    """With N = 2 the mini-batches differ, since TRL shuffles responses; what precedes them does not."""
    wanted = config(tmp_path, algorithm__batch__num_minibatches="2", num_steps="1", traces__every="1")
    folders = run_here(wanted, progress="none"), run_there(wanted)
    ours, theirs = (next(row for row in folder.metrics() if row["step"] == 1) for folder in folders)
    assert theirs["actor/num_updates"] == ours["actor/num_updates"] == 2
    assert theirs["reward/mean"] == ours["reward/mean"]
    assert theirs["rollout_corr/k3_kl"] == pytest.approx(ours["rollout_corr/k3_kl"], rel=1e-5)
    assert [trace.name for trace in folders[1].traces()] == ["step-000001.safetensors"]


@needs_trl
def test_arguments_of_trl_replace_those_of_the_translation(tmp_path: Path) -> None:
    """They are in the manifest, and the loss has them: a rejecting weight leaves next to no gradient."""
    own = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
           "vllm_importance_sampling_clip_max": 1e-6}  # fmt: skip
    folder = run_there(config(tmp_path, num_steps="1"), **own)
    manifest = json.loads((folder.path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["trainer_settings"] == own and manifest["trainer"].startswith("GRPOTrainer of TRL 1.")
    assert folder.metrics()[1]["actor/grad_norm"] == 0


@needs_trl
@pytest.mark.parametrize(
    ("changes", "own", "words"),
    [
        ({"algorithm__objective": "{preset: minirl}"}, {}, "TRL has no option for aggregation token_sum"),
        ({"training__precision": "bf16"}, {}, "training: expected precision fp32"),
        ({}, {"vllm_importance_sampling_mod": 1}, "unknown argument of GRPOConfig; did you mean 'vllm_importance"),
        ({}, {"steps_per_generation": 0.5}, "GRPOConfig: "),
    ],
)
def test_nothing_is_left_of_a_run_that_trl_refuses(
    tmp_path: Path, changes: dict[str, str], own: dict[str, Any], words: str
) -> None:
    """One line, and no folder."""
    with pytest.raises(ConfigError, match=words):
        run_there(config(tmp_path, **changes), **own)
    assert list(tmp_path.iterdir()) == []


def generation(wanted: SandboxRun) -> SandboxGeneration:
    """The object that stands for vLLM, without weights."""
    task = open_task(wanted)
    return SandboxGeneration(SandboxEngine(wanted.model.build(task.tokenizer.vocab_size), ()), task, seed=0)


def test_a_truncated_policy_is_refused(tmp_path: Path) -> None:
    """The engine's log mu is that of the whole policy."""
    settings = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "temperature": 1.0}
    made = generation(config(tmp_path))
    model = torch.nn.Linear(1, 1)
    assert made._opened(model, **settings, max_completion_length=4) is made
    with pytest.raises(ValueError, match=r"top_p: expected 1\.0, .* got 0\.9"):
        made._opened(model, **settings | {"top_p": 0.9}, max_completion_length=4)


def test_other_prompts_than_the_task_s_are_refused(tmp_path: Path) -> None:
    """A shuffled dataset would be graded against other problems."""
    made = generation(config(tmp_path))
    made.version, made.max_tokens, made.temperature = 0, 4, 1.0
    first, second = made.task.prompts(0, 2)
    with pytest.raises(ValueError, match="expected the task's prompts of global step 1, in order"):
        made.generate([list(second.tokens), list(first.tokens)], None, num_generations=1)
