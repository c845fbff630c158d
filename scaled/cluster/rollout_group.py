"""A `RolloutEngine` over several inference engines in Ray actors, which get the prompts in pieces, as they have room.

An engine that dies or does not answer is replaced, and its replacement gets the same weights. The pieces that it had in
flight are sampled again from the same seeds, by whichever engine has room, so that a death changes no draw; those that
had ended are in the object store. Weights stay there, too, until the next push; Ray spills them to disk if it needs the
room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from torch import Tensor

from scaled.cluster.engine_actor import BuildEngine
from scaled.cluster.engine_calls import EngineCalls, EngineLost, Lines, Lost
from scaled.cluster.features import StoredFeatures
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.routes import StoredRecord
from scaled.cluster.storing import unpack_apart
from scaled.cluster.transfer import Parcel, pack, unpack
from scaled.cluster.weights import Convert, StoredTensors, stored, unchanged
from scaled.pieces import HEARD_AFTER, Cut, Handout, PromptPiece, in_groups, in_pieces, in_shares
from theory.contracts import NamedTensors, Prompt, Response, Rollouts, Sampling


class RolloutGroup(EngineCalls):
    """`RolloutEngine` over `num_engines` actors. Seconds and bytes go to `meter` under their metric names.

    `max_num_seqs` is the number of responses that an engine decodes at a time. `convert` turns training weights into
    the tensors that the engines load.

    Raises EngineLost after `max_restarts` restarts; an error of the engine itself (a prompt that is too long) comes
    through unchanged.
    """

    def __init__(
        self,
        cluster: Cluster,
        build: BuildEngine,
        num_engines: int,
        *,
        max_num_seqs: int,
        bucket_bytes: int,
        convert: Convert = unchanged,
        **calls: Any,  # the other arguments of EngineCalls
    ):
        self.max_num_seqs, self.bucket_bytes, self.convert = max_num_seqs, bucket_bytes, convert
        self._homes: dict[str, int] = {}
        super().__init__(cluster, build, num_engines, **calls)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """As theory's contract; the draw depends neither on the number of engines nor on which of them samples what.

        A later turn goes to the engine that sampled the prompt's first turn: it may still cache the conversation. With
        `sampling.enough` the responses are those of an engine that decodes all side by side until that many groups are
        complete (`Cut`). With features, too, each engine has a share of the groups instead, and ends its call once its
        share of `enough`, rounded up, is complete: the rows that have features depend on where a response ends, so that
        none can be cut afterwards.
        """
        G, num = sampling.num_responses, len(self.actors)
        sampling.limits(len(prompts) * G)  # raises if the draws do not fit the responses
        with self.meter.seconds("timing_s/gen"):
            cut = None
            if not sampling.enough:
                pieces = in_pieces([self._homes.get(p.id) if sampling.draws else None for p in prompts], G, num)
            elif sampling.num_features > 0:
                pieces = in_shares([draw.group for draw in sampling.draws[::G]], G, num)
            else:
                pieces, cut = in_groups([draw.group for draw in sampling.draws[::G]], G), Cut(sampling.enough)
            found = self._sampled(pieces, prompts, sampling, cut)
            if not sampling.draws:
                self._homes = {prompts[p].id: found[piece.number][1] for piece in pieces for p in piece.prompts}
            together = Rollouts.concat([found[piece.number][0] for piece in pieces])
            # Back to the caller's order: place[p] is prompt p's position among the pieces.
            place = {p: k for k, p in enumerate(p for piece in pieces for p in piece.prompts)}
            in_order = together.select([place[p] * G + g for p in range(len(prompts)) for g in range(G)])
            return in_order if cut is None or cut.most is None else cut_short(in_order, cut.most)

    def _sampled(
        self, pieces: Sequence[PromptPiece], prompts: Sequence[Prompt], sampling: Sampling, cut: Cut | None = None
    ) -> dict[int, tuple[Rollouts, int]]:
        """By piece its responses, and the engine that sampled them; with a `cut`, some may be longer than it."""
        found: dict[int, tuple[Rollouts, int]] = {}
        with self._one_at_a_time:
            handout = Handout(pieces, len(self.actors), self.max_num_seqs)
            lines: Lines = {i: deque() for i in range(len(self.actors))}
            try:
                # An engine that is being replaced is waited for, too: the next call needs it.
                while len(found) < len(pieces) or any(lines.values()):
                    self._feed(lines, handout, prompts, sampling, cut)
                    i, call, lost, answer = self._wait(lines)
                    if lost is not None:
                        handout.lost(i)
                        lines[i] = self._replaced(i, lost)
                    elif call.method == "sample":
                        ended, num_unfinished = self._opened(answer, call.references[1:], i)
                        handout.ended(i, [number for number, _ in ended], num_unfinished)
                        found |= {number: (rollouts, i) for number, rollouts in ended}
                        if cut is not None:
                            _note(cut, [rollouts for _, rollouts in ended])
            except BaseException:
                # Actors answer in order, so the next call finds the engines idle; a closed group has no actors.
                for actor, held in zip(self.actors, handout.held, strict=False):
                    if held:
                        actor.give_up.remote()
                raise
        return found

    def _feed(
        self, lines: Lines, handout: Handout, prompts: Sequence[Prompt], sampling: Sampling, cut: Cut | None
    ) -> None:
        """Lets each engine that has answered sample on, with further pieces if it has room for them."""
        most = None if cut is None else cut.most
        # A single engine hears of a cut as it makes it.
        steps = HEARD_AFTER if cut is not None and len(self.actors) > 1 else None
        for i, new in handout.deal([i for i, line in lines.items() if not line]).items():
            if handout.held[i]:
                parcel = pack([self._asked(piece, prompts, sampling) for piece in new])
                # Until a piece has ended, or another one can begin. Engines pause between two calls, for some
                # milliseconds: so what one decodes together depends on its pieces, and not on the driver's pace.
                room = self.max_num_seqs if handout.has_more(i) else 0
                lines[i].append(self._ask(i, "sample", (parcel, room, most, steps)))

    def _asked(self, piece: PromptPiece, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[Any, ...]:
        """The arguments of `ClusterEngine.begin`."""
        G = sampling.num_responses
        draws = tuple(sampling.draws[p * G + g] for p in piece.prompts for g in range(G)) if sampling.draws else ()
        enough = 0
        if sampling.enough:
            num_groups, own = (len({draw.group for draw in each}) for each in (sampling.draws, draws))
            # Shares that were rounded down could add up to fewer groups than the step needs. A piece of one group needs
            # that one.
            enough = -(-sampling.enough * own // num_groups)
        # Responses are numbered on from a piece's first prompt: pieces of a first turn are contiguous, and later turns
        # have draws, which no number changes.
        own_prompts = tuple(prompts[p] for p in piece.prompts)
        return piece.number, own_prompts, replace(sampling, draws=draws, enough=enough), piece.prompts[0] * G

    def _opened(self, parcel: Parcel, stored: Sequence[Any], i: int) -> tuple[list[tuple[int, Rollouts]], int]:
        """Engine i's answer to `sample`, counted."""
        ended, num_unfinished = unpack_apart(parcel, stored, self, i)
        num_bytes = parcel.num_bytes
        for _, answer in ended:
            # These lie in objects of their own, and the parcel has only their places.
            num_bytes += 0 if answer.experts is None else answer.experts.nbytes
            num_bytes += 0 if answer.top is None else answer.top.num_bytes
            num_bytes += answer.features.nbytes if isinstance(answer.features, StoredFeatures) else 0
        self.meter.add("transfer/rollout_bytes", float(num_bytes))
        return ended, num_unfinished

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As theory's contract, for every engine: converted once, and sent in buckets through the object store.

        Weights of a group of ranks are converted in the ranks' processes and go straight to the engines: none of their
        bytes passes through this process.
        """
        with self.meter.seconds("timing_s/push"):
            # Frees the previous version before the next one fills the store. Where a rank dies in between, an engine
            # that is replaced then gets none, and not a part of them: the next push has all.
            self._weights, self.version = [], -1
            sent = []
            for reference, num_bytes in stored(named_tensors, self.bucket_bytes, self.convert):
                self.meter.add("transfer/weights_bytes", float(num_bytes))
                sent.append(reference)
            # Before the call, so that the replacement of an engine lost in it loads these.
            self._weights, self.version = sent, version
            self._call_all("load_weights", self._weights, version)

    def staged(self, named_tensors: NamedTensors) -> NamedTensors:
        """The weights as they are now, converted and in the object store, for `load_weights` to send later."""
        with self.meter.seconds("timing_s/push"):
            kept = list(stored(named_tensors, self.bucket_bytes, self.convert))
        return StoredTensors(lambda convert: iter(kept))

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """Log-probabilities of tokens 1.. of every sequence, by engine: every engine scores them all."""
        found = self._call_all("score", [list(s) for s in sequences])
        return [unpack(found[i]) for i in sorted(found)]

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of work(*arguments, engine), run in every engine's process."""
        parcel = ray.put(pack((work, arguments)))
        found = self._call({i: ("work", (parcel, i)) for i in range(len(self.actors))})
        return [unpack(found[i]) for i in range(len(self.actors))]

    def turn(self, awake: bool) -> None:
        """Wakes the engines, or puts them to sleep while ranks use their GPUs (colocated placement)."""
        self._call_all("turn", awake)


def _note(cut: Cut, pieces: Sequence[Rollouts]) -> None:
    """Tells the cut of the complete groups among these pieces, each of one group."""
    for rollouts in pieces:
        if all(response.finish != "abort" for response in rollouts.responses):
            cut.complete(max(len(response.tokens) for response in rollouts.responses))


def cut_short(rollouts: Rollouts, most: int) -> Rollouts:
    """The first `most` tokens of each response, of one call and without features; a longer one finishes "abort"."""
    assert rollouts.features is None, "which rows have features depends on where a response ends"
    lengths = [len(response.tokens) for response in rollouts.responses]
    if max(lengths) <= most:
        return rollouts
    kept = [min(length, most) for length in lengths]
    responses = tuple(
        response if length <= most else _beginning(response, most)
        for response, length in zip(rollouts.responses, lengths, strict=True)
    )
    experts, top = rollouts.experts, rollouts.top
    if experts is not None:
        assert isinstance(experts, StoredRecord), "engines send their routes apart"
        # The last token was never an input: it has no row.
        experts = experts.beginnings([response.num_tokens - 1 for response in responses])
    top = None if top is None else top.beginnings(kept)
    return Rollouts(responses, experts, None, rollouts.temperature, top)


def _beginning(response: Response, num: int) -> Response:
    tokens, logp_mu, is_response = (x[:num] for x in (response.tokens, response.logp_mu, response.is_response))
    return replace(response, tokens=tokens, logp_mu=logp_mu, is_response=is_response, finish="abort")


__all__ = ["EngineLost", "Lost", "RolloutGroup", "cut_short"]
