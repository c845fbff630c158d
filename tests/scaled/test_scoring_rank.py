"""Laws of a rank that only scores: the bits of a rank in training, and none of its memory."""

from __future__ import annotations

from pathlib import Path

import torch

from scaled.config import ModelBlock
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    batch,
    layers,
    on_host,
    passes,
    training,
    verdicts_on,
    write_model,
)


def the_old_pass_has_the_same_bits(folder: Path) -> None:
    """Log-probs, entropies and routes, natural and replayed, and the weights, in both precisions."""
    from scaled.megatron_engine.parts import assemble_scores
    from scaled.megatron_engine.scoring_rank import ScoringRank

    rollouts = batch()
    for precision in ("fp32", "bf16"):
        trained = OneRank(folder, algorithm("R3"), precision=precision)
        scorer = ScoringRank(ModelBlock(path=str(folder)), training(precision=precision))
        plans = passes(rollouts, layers())
        for name in ("natural", "replay"):
            wanted, found = trained.score(rollouts, plans[name]), assemble_scores([scorer.score(rollouts, plans[name])])
            assert torch.equal(found.logp_BT, wanted.logp_BT) and torch.equal(found.entropy_BT, wanted.entropy_BT)
            assert wanted.experts is not None and found.experts is not None
            assert torch.equal(found.experts.experts, wanted.experts.experts)
        exported = on_host(scorer.export())
        for tensor_name, tensor in trained.named_tensors():
            assert torch.equal(exported[tensor_name], tensor), tensor_name


def it_holds_the_weights_alone(folder: Path) -> None:
    """No parameter wants a gradient or has a buffer for one, as those of a rank in training do."""
    from scaled.megatron_engine.scoring_rank import ScoringRank

    def parameters(rank: ScoringRank) -> list[torch.nn.Parameter]:
        return [p for chunk in rank.policy.chunks for p in chunk.parameters()]

    scorer = parameters(ScoringRank(ModelBlock(path=str(folder)), training()))
    assert scorer and not any(p.requires_grad or hasattr(p, "main_grad") for p in scorer)
    assert all(hasattr(p, "main_grad") for p in parameters(OneRank(folder, algorithm("R3")).rank))


LAWS = (the_old_pass_has_the_same_bits, it_holds_the_weights_alone)


def test_a_rank_that_only_scores(tmp_path: Path) -> None:
    """Both laws, in one process."""
    (broken,) = verdicts_on(__name__, write_model(tmp_path / "model"))
    assert broken == dict.fromkeys((law.__name__ for law in LAWS), None)
