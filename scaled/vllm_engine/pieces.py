"""The pieces of a rollout that an engine samples at a time: some prompts' requests each, collected step by step.

Extra letters: F feature rows of all responses together.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from scaled.vllm_engine.requests import Request
from theory.contracts import Sampling
from theory.oversampling import OpenGroups
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of


class OpenPiece:
    """Requests that are answered together; `num_top` of mu's likeliest tokens are kept at every position."""

    def __init__(self, requests: Sequence[Request], sampling: Sampling, num_top: int = 0):
        self.requests, self.sampling, self.num_top = requests, sampling, num_top
        self.unfinished = dict(enumerate(requests))
        self._groups = OpenGroups(sampling)

    @property
    def has_ended(self) -> bool:
        """Whether all requests have, or as many groups as `sampling.enough`."""
        return not self.unfinished or self._groups.are_enough_complete

    def add(self, outputs: Sequence[tuple[int, Any]]) -> None:
        """Adds what one step of the engine sampled, by the number of the request."""
        for b, output in outputs:
            self.requests[b].add(output)
        ended = [b for b, output in outputs if output.finished]
        for b in ended:
            del self.unfinished[b]
        self._groups.end(ended)

    def cut(self, most: int) -> list[Request]:
        """Ends the requests that have so many tokens, unfinished; they are returned for the engine to abort."""
        found = {b: request for b, request in self.unfinished.items() if len(request.tokens) >= most}
        for b in found:
            del self.unfinished[b]
        return list(found.values())

    def features(self, recorded: Any) -> RouterFeatures | None:
        """The features of all responses; None where every one was aborted before its first token."""
        taken = [recorded["features"][request.name] for request in self.requests]
        found = [part for part in taken if part is not None]
        if not found:
            return None
        rows, hidden, logits = zip(*found, strict=True)
        return RouterFeatures(
            rows=torch.cat(rows),
            offsets=offsets_of([0 if part is None else len(part[0]) for part in taken]),
            hidden=torch.cat(hidden),
            logits=torch.cat(logits),
            layer_numbers=recorded["feature_layers"],
        )


class OpenPieces:
    """The pieces in flight in vLLM's `engine`, which batches the requests of all of them."""

    def __init__(self, engine: Any):
        self._engine, self._num_requests = engine, 0
        self._pieces: dict[int, OpenPiece] = {}
        # Unfinished requests by the name that vLLM's outputs carry, with their piece and number there.
        self._places: dict[str, tuple[OpenPiece, int]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the engine is idle."""
        return not self._pieces

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests."""
        return len(self._places)

    def open(self, number: int, piece: OpenPiece, params: Sequence[Any]) -> None:
        """Adds the piece's requests, each with its parameters."""
        assert number not in self._pieces, "an engine has one piece of a number"
        self._pieces[number] = piece
        for b, (request, own) in enumerate(zip(piece.requests, params, strict=True)):
            self._num_requests += 1
            name = str(self._num_requests)
            prompt = {"prompt_token_ids": list(request.prompt.tokens)}
            # vLLM's outputs carry `name`, its workers know request.name.
            request.name = self._engine.add_request(name, prompt, own)
            self._places[name] = piece, b

    def run(
        self, room: int, timeout_s: int | float, most: int | None = None, steps: int | None = None
    ) -> list[tuple[int, OpenPiece]]:
        """Steps until a piece has ended or at most `room` requests are unfinished; takes what has ended out of flight.

        A request ends with its token number `most`, where there is one, and the call after `steps` steps with tokens.
        Gives all up where it raises, as the next call needs an idle engine; TimeoutError if no token comes for
        `timeout_s`.
        """
        last_progress, total, num_steps = time.monotonic(), self.num_unfinished, 0
        try:
            while not (ended := self._ended(most)) and self.num_unfinished > room and num_steps != steps:
                outputs = self._engine.step()
                self._add(outputs)
                if outputs:
                    last_progress, num_steps = time.monotonic(), num_steps + 1
                elif time.monotonic() - last_progress > timeout_s:
                    raise TimeoutError(
                        f"rollout.timeout_s: no token for {timeout_s} s with "
                        f"{self.num_unfinished} of {total} requests unfinished"
                    )
        except BaseException:
            self.give_up()
            raise
        return ended

    def give_up(self) -> None:
        """Aborts all pieces."""
        pieces, self._pieces = self._pieces, {}
        self._abort([request for piece in pieces.values() for request in piece.unfinished.values()])

    def _add(self, outputs: Sequence[Any]) -> None:
        by_piece: dict[OpenPiece, list[tuple[int, Any]]] = {}
        for output in outputs:
            piece, b = self._places[output.request_id]
            by_piece.setdefault(piece, []).append((b, output))
            if output.finished:
                del self._places[output.request_id]
        for piece, own in by_piece.items():
            piece.add(own)

    def _ended(self, most: int | None) -> list[tuple[int, OpenPiece]]:
        if most is not None:
            self._abort([request for piece in self._pieces.values() for request in piece.cut(most)])
        ended = [(number, piece) for number, piece in self._pieces.items() if piece.has_ended]
        for number, _ in ended:
            del self._pieces[number]
        # What `enough` has left of them.
        self._abort([request for _, piece in ended for request in piece.unfinished.values()])
        return ended

    def _abort(self, requests: Collection[Request]) -> None:
        if requests:
            gone = {request.name for request in requests}
            self._places = {
                name: (piece, b) for name, (piece, b) in self._places.items() if piece.requests[b].name not in gone
            }
            self._engine.abort_request([request.name for request in requests], internal=True)


__all__ = ["OpenPieces", "OpenPiece"]
