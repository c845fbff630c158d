"""The contract suite of rollout engines (tests/contracts) over real vLLM: the same laws, not one of them restated.

Left out are the two laws that name the sandbox's own engines: equality with the trainer bit for bit (vLLM's sums have
another order: `test_vllm_engine` bounds the difference) and invariance under every batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaled.config import PrecisionBlock
from scaled.vllm_engine.quantize import quantised
from tests.contracts import worlds
from tests.contracts.test_rollout_engine import (  # noqa: F401 - collected here as tests of this engine
    rollouts,
    test_features_are_drawn_evenly_over_the_response,
    test_greedy_limit_takes_the_most_likely_token,
    test_load_weights_replaces_the_policy,
    test_record_has_one_row_an_input_token,
    test_responses_are_grouped_and_well_formed,
    test_the_seed_names_the_draw,
)
from tests.scaled import vllm_world

pytestmark = [pytest.mark.filterwarnings(warning) for warning in vllm_world.WARNINGS]

PRECISIONS = {
    "fp32": PrecisionBlock(compute="fp32"),
    "bf16": PrecisionBlock(),
    "fp8-weights": PrecisionBlock(weights="fp8_block"),
    "int8": PrecisionBlock(weights="int8"),
}


@pytest.fixture(scope="module", autouse=True)
def _vllm_sizes():
    """The suite's model in widths that vLLM's kernels take; its vocabulary and stop tokens stay the suite's."""
    with pytest.MonkeyPatch.context() as patch:
        config = vllm_world.model_config(dense_layers=())
        patch.setattr(worlds, "model_config", lambda **_: replace(config, vocab_size=worlds.VOCABULARY))
        yield


@pytest.fixture(scope="module")
def weights(_vllm_sizes):
    return worlds.model()


@pytest.fixture(scope="module", params=PRECISIONS)
def engine(request, weights, tmp_path_factory):
    precision = PRECISIONS[request.param]
    made = vllm_world.engine(weights, tmp_path_factory.mktemp("shape"), precision, worlds.STOPS)
    load = made.load_weights
    # The contract's weights are the trainer's; a RolloutGroup has the ranks quantise them before an engine sees them.
    made.load_weights = lambda named, version: load(quantised(named, precision), version)
    yield made
    made.close()
