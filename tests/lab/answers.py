"""Responses of given tokens, as a task's reward takes them."""

from __future__ import annotations

import torch

from lab.tasks import TextTask
from theory.contracts import Prompt, Response


def respond(prompt: Prompt, tokens: tuple[int, ...]) -> Response:
    """The response of these tokens, all sampled and all likely."""
    T = len(tokens)
    ids = torch.tensor(tokens, dtype=torch.int64)
    return Response(prompt, ids, torch.zeros(T), torch.ones(T, dtype=torch.bool), "stop", 0)


def answer_with(task: TextTask, prompt: Prompt, text: str) -> float:
    """The reward of that text, properly ended."""
    return task.reward(prompt, respond(prompt, (*task.tokenizer.encode(text), task.tokenizer.eos_id)))
