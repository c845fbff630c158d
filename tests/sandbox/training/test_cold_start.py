"""The cold start stops at its target, is done once for equal inputs, and says so when the target is out of reach."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from lab.config.load import load
from lab.strict import ConfigError
from lab.tasks import build
from lab.tasks.arithmetic import ArithmeticConfig
from lab.tasks.calculator import CalculatorConfig
from sandbox.config import ColdStartBlock, ModelBlock, SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.run import file_hashes
from sandbox.training.cold_start import cold_start, demonstration_loss
from theory.contracts import Prompt, Sampling
from theory.streams import stream
from theory.turns import sampled_tokens

TASK = ArithmeticConfig(min_digits=2, max_digits=2, num_held_out=8)
ONE_DIGIT = ArithmeticConfig(min_digits=1, max_digits=1, num_held_out=1)
SMALL = ModelBlock(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, num_experts=4, expert_size=32)


def fresh(seed: int = 0) -> MoE:
    return MoE(SMALL.build(build(TASK).tokenizer.vocab_size), stream(seed, "model"))


def stage(tmp_path, **changes) -> ColdStartBlock:
    block = {"target_accuracy": 0.02, "max_updates": 400, "check_every": 20, "num_check": 64} | changes
    return ColdStartBlock(cache=str(tmp_path / "cache"), **block)


def test_it_stops_at_the_target_and_is_cached(tmp_path):
    """The first call trains to the target; the second finds the same bits without an update."""
    reports = []

    def started(model: MoE, report):
        options = {"description": {"test": 1}, "max_tokens": 16, "report": report}
        return cold_start(model, build(ONE_DIGIT), stage(tmp_path), **options)

    first, summary = started(fresh(), lambda *r: reports.append(r))
    assert summary["accuracy"] >= 0.02
    assert reports[-1][0] == summary["num_updates"] <= 400
    assert reports[-1][1] < reports[0][1]
    again, same = started(fresh(1), lambda *_: pytest.fail("ran"))
    assert same == summary
    for (name, a), (_, b) in zip(first.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_an_unreachable_target_is_an_error_and_leaves_no_cache(tmp_path):
    """A target that is not met within max_updates is one line with both accuracies; nothing half-done is kept."""
    block = stage(tmp_path, target_accuracy=1.0, max_updates=20)
    with pytest.raises(ValueError, match=r"expected to reach 1.0 within 20 updates, got 0\.\d+"):
        cold_start(fresh(), build(TASK), block, description={}, max_tokens=24)
    # The last update is checked, too, whatever `check_every`.
    seen, block = [], stage(tmp_path, target_accuracy=1.0, max_updates=5, check_every=3)
    with pytest.raises(ValueError, match="within 5 updates"):
        cold_start(fresh(), build(TASK), block, description={}, max_tokens=24, report=lambda n, *_: seen.append(n))
    assert seen == [3, 5]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_model_writes_like_its_teacher(tmp_path):
    """Two teachers leave two entries in the cache and models that mostly write in that teacher's form and never in
    the other's; no teacher named is the first one, from its cache."""
    forms = {"columns": r"\d\+\d\+0=\d\d#\d+", "running": r"\d\+\d=\d+#\d+"}
    task = build(ONE_DIGIT)

    def taught(report=None, **named) -> MoE:
        model = MoE(SMALL.build(task.tokenizer.vocab_size), stream(0, "model"))
        block = stage(tmp_path, target_accuracy=0.25, batch_size=32, **named)
        return cold_start(model, task, block, description={}, max_tokens=16, report=report)[0]

    prompts = task.prompts(9, 64)
    for teacher in forms:
        model = taught(teacher=teacher)
        engine = SandboxEngine(model.config, (), task.tokenizer.end_ids)
        engine.load_model(model, version=0)
        texts = [task.tokenizer.decode(r.tokens.tolist()) for r in engine.generate(prompts, Sampling(16)).responses]
        shares = {name: sum(bool(re.fullmatch(form, text)) for text in texts) / 64 for name, form in forms.items()}
        assert shares[teacher] > 0.5 and sum(shares.values()) == shares[teacher]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2
    default, first = taught(report=lambda *_: pytest.fail("ran")).state_dict(), taught(teacher="columns").state_dict()
    assert all(torch.equal(first[name], tensor) for name, tensor in default.items())


def test_a_teacher_that_cannot_be_followed_is_an_error(tmp_path):
    """Responses that are all longer than max_tokens are one line with both lengths; nothing is trained."""
    with pytest.raises(ValueError, match=r"^algorithm.sampling.max_tokens: .*teacher place_values, at least \d\d tok"):
        cold_start(fresh(), build(TASK), stage(tmp_path, teacher="place_values"), description={}, max_tokens=24)


@pytest.mark.parametrize(
    ("task", "teacher", "words"),
    [
        ("{kind: arithmetic}", "colums", "one of columns, place_values, running, got colums"),
        ("{kind: countdown}", "columns", "one of forward, backward, attempts, got columns"),
        ("{kind: jsonl, path: x, solution_key: how}", "columns", "one of solutions, got columns"),
        ("{kind: jsonl, path: x}", "solutions", r"null \(no solution_key, no teacher\), got solutions"),
    ],
)
def test_an_unknown_teacher_is_one_line(tmp_path, task, teacher, words):
    """A teacher that the task does not have is refused with the config, and the line names field and choices."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"{{name: t, backend: sandbox, num_steps: 1, task: {task}, cold_start: {{teacher: {teacher}}}, "
        "model: {path: x}, algorithm: {objective: {preset: minirl}}}"
    )
    with pytest.raises(ConfigError, match=rf"config.yaml: cold_start.teacher: expected {words}$"):
        load(path, [], {"sandbox": SandboxRun})


def surprises(model: MoE, prompt: Prompt, tokens: Sequence[int], mask: torch.Tensor) -> list[torch.Tensor]:
    """-log pi of the tokens whose mask is True, without a batch."""
    logp = torch.log_softmax(model(torch.tensor([[*prompt.tokens, *tokens]])), -1)[0]
    return [-logp[len(prompt.tokens) + t - 1, token] for t, token in enumerate(tokens) if mask[t]]


def test_the_loss_is_the_mean_surprise_of_the_demonstration():
    """The loss equals -mean log pi of the demonstrations' tokens, computed token by token without a batch."""
    task, model = build(TASK), fresh()
    prompts = task.prompts(0, 3)
    draws = stream(0, "demonstrations")
    demonstrations = [task.demonstration(p, draws, "columns") for p in prompts]
    masks = [torch.ones(len(d), dtype=torch.bool) for d in demonstrations]
    terms = [term for each in zip(prompts, demonstrations, masks, strict=True) for term in surprises(model, *each)]
    loss = demonstration_loss(model, prompts, demonstrations, masks)
    # float32 means over about 60 terms of size 3, summed in another order.
    assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def test_observations_are_context_and_not_targets():
    """With turns the loss is the mean surprise of what the model is to write; the calculator is only read."""
    task, model = build(CalculatorConfig()), MoE(SMALL.build(23), stream(0, "model"))
    prompt = Prompt("37*6+58", task.tokenizer.encode("37*6+58="), "280", "37*6+58=")
    tokens = task.demonstration(prompt, stream(0, "demonstrations"), "calls")
    mask = sampled_tokens(task, prompt, tokens, task.tokenizer.eos_id)
    assert task.tokenizer.decode([t for t, own in zip(tokens, mask, strict=True) if not own]) == "=222;=280;"
    loss = demonstration_loss(model, [prompt], [tokens], [mask])
    # float32 means over 20 terms of size 3, summed in another order.
    expected = torch.stack(surprises(model, prompt, tokens, mask)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_task_with_turns_is_checked_in_turns(tmp_path):
    """A few updates bring the loss down, and the accuracy check rolls out as many turns as are allowed."""
    task, reports = build(CalculatorConfig(max_operations=1, max_digits=1, num_held_out=4)), []
    block = stage(tmp_path, target_accuracy=0.05, max_updates=400, num_check=32)
    model = MoE(SMALL.build(task.tokenizer.vocab_size), stream(0, "model"))
    options = {"description": {}, "max_tokens": 24, "max_turns": 2}
    _, summary = cold_start(model, task, block, **options, report=lambda *r: reports.append(r))
    assert summary["accuracy"] >= 0.05 and reports[-1][1] < reports[0][1]
    _, same = cold_start(model, task, block, **options, report=lambda *_: pytest.fail("ran"))
    assert same == summary


@pytest.mark.parametrize("changed", ["config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_cold_start_is_of_all_the_files_of_its_model(tmp_path, changed):
    """Another config, shard or index of an opened folder is another cold start; what is no part of the model is not."""
    for name in (
        "config.json",
        "model.safetensors.index.json",
        *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)),
    ):
        (tmp_path / name).write_text(name)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"{{name: t, backend: sandbox, num_steps: 1, task: {{kind: arithmetic}}, model: {{path: '{tmp_path}'}}, "
        "algorithm: {objective: {preset: minirl}}}"
    )
    config = load(path, [], {"sandbox": SandboxRun})
    before = file_hashes(config)
    (tmp_path / "README.md").write_text("a word")
    assert file_hashes(config) == before and len(before) == 4
    (tmp_path / changed).write_text("other")
    assert file_hashes(config) != before
