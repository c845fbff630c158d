"""A translated recipe has the gradient of ours under each framework's own code, and every option is one of theirs."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import TrainingArguments

from lab.translate import FRAMEWORKS, Translation
from tests.peers import slime_code, trl_code, verl_code
from tests.peers.translated import by_slime, by_trl, by_verl, recipes
from tests.theory.objective_batches import Batch, make_batch
from theory.advantages import ADVANTAGES
from theory.algorithm import Algorithm, OptimizerSettings
from theory.objectives import PRESETS, Objective

pytestmark = pytest.mark.usefixtures("wide")


Theirs = Callable[[Batch, Translation, Tensor], Tensor]


@dataclass(frozen=True)
class Pair:
    """Both gradients, and what they are of."""

    theirs: Tensor
    ours: Tensor
    batch: Batch
    objective: Objective

    def require_equal(self, words: str, share: float = 1.0) -> None:
        """Theirs is ours times the share."""
        # verl adds 1e-8 to lengths and to sums of weights.
        close = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-12, msg=lambda m: f"{words}: {m}")
        close(self.theirs, self.ours * share)


def compared(name: str, theirs: Theirs, is_wanted: Callable[[Translation], bool]) -> Iterator[tuple[str, Pair]]:
    """The wanted recipes, on two batches each: words for a message, and the gradients."""
    for words, objective in recipes():
        translation = FRAMEWORKS[name](Algorithm(objective=objective))
        if not is_wanted(translation):
            continue
        for seed in range(2):
            batch = make_batch(seed, staleness=0.5, gap=0.3)
            ref = batch.old - 0.3
            ours = batch.gradient(objective, **({"logp_ref_BT": ref} if objective.kl_coefficient else {}))
            yield words, Pair(theirs(batch, translation, ref), ours, batch, objective)


def require_whole(name: str, theirs: Theirs) -> Counter[str]:
    """Compares every recipe that has options as a whole; the number of comparisons by preset."""
    found: Counter[str] = Counter()
    for words, pair in compared(name, theirs, lambda one: not one.unsaid):
        pair.require_equal(words)
        found[pair.objective.name] += 1
    return found


@verl_code.needs_verl
def test_a_recipe_in_verls_words_has_its_gradient(code: tuple[ModuleType, ModuleType]) -> None:
    """Every preset, correction and change that has options in verl, on two ragged batches with holes."""
    found = require_whole("verl", lambda batch, *rest: by_verl(code, batch, *rest))
    clips = {"grpo", "grpo_dapo", "dr_grpo", "ppo", "minirl_no_is", "minirl", "grpo_dual_clip"}
    assert clips | {"cispo", "gspo", "luspo", "sapo", "gmpo"} <= set(found)
    assert found.total() > 300


@verl_code.needs_verl
def test_verl_leaves_rejected_responses_in_its_denominators(code: tuple[ModuleType, ModuleType]) -> None:
    """The reason that is given for them: its gradient is ours times the share of the denominator that is kept."""
    shares = set()

    def is_rejection(one: Translation) -> bool:
        is_said = any(option.name.endswith("rollout_rs") and option.value for option in one.recipe)
        return is_said and [unsaid.part.split()[0] for unsaid in one.unsaid] == ["rejection"]

    for words, pair in compared("verl", lambda batch, *rest: by_verl(code, batch, *rest), is_rejection):
        kept_BT = pair.objective.kept(pair.batch.old, pair.batch.mu, pair.batch.mask)
        rows, tokens = kept_BT.any(1).double().mean().item(), (kept_BT.sum() / pair.batch.mask.sum()).item()
        pair.require_equal(words, share := tokens if pair.objective.aggregation.counts == "tokens" else rows)
        shares.add(share)
    assert len(shares) > 5 and min(shares) < 0.5


@trl_code.needs_trl
def test_a_recipe_in_trls_words_has_its_gradient() -> None:
    """The same for TRL."""
    found = require_whole("trl", by_trl)
    assert {"grpo", "grpo_dapo", "cispo", "gspo", "luspo", "sapo", "vespo", "deepseek_v32"} <= set(found)
    assert found.total() > 100


@slime_code.needs_slime
def test_a_recipe_in_slimes_words_has_its_gradient() -> None:
    """The same for slime."""
    found = require_whole("slime", by_slime)
    assert {"grpo", "grpo_dapo", "grpo_dual_clip", "minirl_no_is", "ppo", "cispo", "gspo"} <= set(found)
    assert found.total() > 200


@slime_code.needs_slime
def test_slimes_advantages_are_ours() -> None:
    """The rewards that it hands on, with and without its flag; all equal rewards among them."""
    rewards_PG = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.5, 0.25, -1.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    for name, is_scaled in (("group_norm", True), ("group_mean", False)):
        theirs = slime_code.advantages(rewards_PG, is_scaled)
        torch.testing.assert_close(theirs, ADVANTAGES[name](rewards_PG).float().double(), rtol=1e-6, atol=1e-6)


def names_of(framework: str) -> set[str]:
    """The options that any preset and replay mode gets."""
    algorithms = [Algorithm(objective=objective) for _, objective in recipes()]
    settings = OptimizerSettings(warmup_steps=8)
    algorithms += [Algorithm(objective=PRESETS["grpo"], mode=mode, optimizer=settings) for mode in ("R2", "R3")]
    algorithms += [Algorithm(objective=PRESETS["grpo"], num_prompts=4, num_minibatches=2, shuffle="responses")]
    translations = [FRAMEWORKS[framework](algorithm) for algorithm in algorithms]
    return {option.name for one in translations for option in [*one.recipe, *one.sizes]}


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")


@verl_code.needs_verl
def test_every_option_is_in_verls_own_config() -> None:
    """In the tree that verl generates for its Megatron trainer, whose overrides need no `+` therefore."""
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "trainer" / "config" / "_generated_ppo_megatron_trainer.yaml"
    assert names_of("verl") <= set(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))


@slime_code.needs_slime
def test_every_option_is_an_argument_of_slime() -> None:
    """Of its own parser, of Megatron's optimizer, or one that its scheduler reads."""
    assert names_of("slime") <= slime_code.arguments()


@trl_code.needs_trl
def test_every_option_is_a_field_of_trls_config() -> None:
    """Of GRPOConfig or of the transformers class below it."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]) / "trainer" / "grpo_config.py"
    body = next(n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)).body
    own = {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert names_of("trl") <= own | set(TrainingArguments.__dataclass_fields__)
