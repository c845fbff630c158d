"""Laws of the benchmark's TRL side that hold without TRL: the work is the others', and the loops take turns."""

from __future__ import annotations

import pytest

from sandbox.bench import reference_trl
from sandbox.bench.reference_trl import StepByStep, as_text, settings, word_tokenizer
from sandbox.bench.reference_work import MODEL, STOP, EvenTokens, Work


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_a_global_step_is_the_whole_work(num_minibatches: int) -> None:
    """Mini-batches of whole groups add up to all responses, one generation each global step."""
    work = Work()
    found = settings(work, num_minibatches, "nowhere")
    assert found["per_device_train_batch_size"] * found["steps_per_generation"] == 16 * 8
    assert found["per_device_train_batch_size"] % found["num_generations"] == 0
    assert found["max_completion_length"] == found["generation_kwargs"]["min_new_tokens"] == work.max_tokens
    assert found["max_steps"] % num_minibatches == 0 and found["learning_rate"] == 0.0


def test_text_comes_back_as_the_same_tokens() -> None:
    """TRL's text prompts tokenize to the very prompts of the other sides; 0 and 1 pad and stop."""
    tokenizer = word_tokenizer()
    for prompt in EvenTokens(Work()).prompts(0, 16):
        assert tokenizer(as_text(prompt))["input_ids"] == list(prompt.tokens)
    words = " ".join(f"t{token}" for token in range(2, MODEL.vocab_size))
    assert tokenizer(words)["input_ids"] == list(range(2, MODEL.vocab_size))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, STOP)


def test_loops_take_turns() -> None:
    """Each `advance` runs exactly the part between two pauses, and nothing runs between two calls."""
    done: list[int] = []

    def loop() -> None:
        for step in range(3):
            steps.pause()
            done.append(step)

    steps = StepByStep(loop)
    assert done == []
    steps.advance()
    assert done == [0]
    steps.advance()
    assert done == [0, 1]
    with pytest.raises(RuntimeError, match="one that has ended"):
        steps.advance()
    assert done == [0, 1, 2]


def test_an_error_of_the_loop_reaches_the_caller() -> None:
    """An error of the other side in a step is raised by the call that asked for that step."""

    def loop() -> None:
        steps.pause()
        steps.pause()
        raise ValueError("batch too large")

    steps = StepByStep(loop)
    steps.advance()
    with pytest.raises(ValueError, match="batch too large"):
        steps.advance()


@pytest.mark.parametrize("missing", ["trl", "accelerate", "datasets"])
def test_trl_without_what_its_trainer_imports_is_not_installed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark leaves TRL out where one of the packages is missing, as accelerate after `make test-peers`."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    assert not reference_trl.is_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert reference_trl.is_installed()
