"""A process of its own: vLLM's official return of routes on a CPU, over Triton's numpy interpreter; writes an .npz.

vLLM returns routes in its second model runner alone, which needs Triton; Triton has no CPU backend, but an interpreter,
and vLLM only asks whether a backend is there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import numpy as np
import triton.backends

from tests.scaled import vllm_world as world
from theory.contracts import Rollouts, Sampling

SAMPLING = Sampling(max_tokens=4, num_responses=2, seed=5, num_features=2)
LENGTHS = (3, 70)


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver, compiler = _Driver, None


def main(folder: Path) -> None:
    """Generates twice, the second time over a warm prefix cache, and writes what came back."""
    triton.backends.backends["cpu"] = _Backend()  # type: ignore[assignment]
    engine = world.engine(world.model(), folder, routes="official", prefix_caching=True)
    arrays: dict[str, np.ndarray] = {"routes": np.array(engine.routes)}
    for name in ("cold", "warm"):
        rollouts = engine.generate(world.prompts(LENGTHS), SAMPLING)
        arrays |= {f"{name}/{key}": value for key, value in flat(rollouts).items()}
    engine.close()
    np.savez(folder / "official.npz", **arrays)  # type: ignore[arg-type]


def flat(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Tokens, log-probs, routes and features of all responses, one array each."""
    assert rollouts.experts is not None and rollouts.features is not None
    return {
        "lengths": np.array([len(r.tokens) for r in rollouts.responses]),
        "tokens": np.concatenate([r.tokens.numpy() for r in rollouts.responses]),
        "logp": np.concatenate([r.logp_mu.numpy() for r in rollouts.responses]),
        "experts": rollouts.experts.experts.numpy(),
        "num_rows": np.array(rollouts.experts.num_rows_B),
        "rows": rollouts.features.rows.numpy(),
        "logits": rollouts.features.logits.numpy(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
