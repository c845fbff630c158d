"""The doctor's rate of naming planted faults: engines with defects, historic bugs in code, and damaged traces.

`python -m tests.pages.doctor` writes docs/doctor.md; test_doctor.py plants a part of it again, on another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.causes import CAUSES, UNKNOWN
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.doctor.importers import FORMATS
from lab.doctor.replay_log import FORMAT as REPLAY_LOG
from lab.doctor.steps.causes import STEPS_CAUSES
from lab.markdown import markdown_table
from lab.traces import Trace
from sandbox.config import TrainingBlock
from sandbox.engines import (
    ActivationPrecision,
    BlockPrecision,
    ExpertLayout,
    KVPrecision,
    LogitNoise,
    PartialWeights,
    ReductionOrder,
    RoutedScaling,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from sandbox.measure.defect_table import Bench
from tests.mutants.catalogue_capture import CAPTURE
from tests.mutants.mutant import edited
from tests.pages import layers
from tests.pages.courses import COURSES, NARROW, TALL, is_step_right, told
from theory.routing.passes import RoutingPlan
from theory.streams import stream

MUTANTS = {mutant.name: mutant for mutant in CAPTURE}


@dataclass(frozen=True)
class Plant:
    """Something wrong: the cause that has to be named, and how it comes about."""

    cause: str
    defect: Defect | None = None
    products: Literal["fp8_e4m3"] | None = None
    """The format of the trainer's products, beside an engine that does without."""
    mutant: str = ""
    damage: Callable[[Trace], Trace] = field(default=lambda trace: trace)
    is_out_of_reach: bool = False
    """Whether one step does not tell it, as the models of the thresholds show: the counts are also given without it."""

    @property
    def is_format(self) -> bool:
        """Whether it is a format of blocks, or of the trainer's products: counted apart."""
        return self.products is not None or isinstance(self.defect, BlockPrecision)


# ---- damaged traces --------------------------------------------------------------------------------------------------


def _parts(trace: Trace) -> list[slice]:
    """The place of each response's part among the A values."""
    stops = (trace.offsets.diff() - trace.num_prompt).cumsum(0).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def _by_response(values_A: Tensor, trace: Trace, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(values_A[part].clone()) for part in _parts(trace)])


def shifted_mu(trace: Trace) -> Trace:
    """log mu stands one token late: the first value twice, the last one lost."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: torch.cat([x[:1], x[:-1]])))


def shifted_old(trace: Trace) -> Trace:
    """log old stands one token early, as where logits [prompt:] are taken for [prompt - 1 : -1]."""
    return replace(trace, logp_old=_by_response(trace.logp_old, trace, lambda x: torch.cat([x[1:], x[-1:]])))


def _zeroed(x: Tensor, start: int) -> Tensor:
    x[start:] = 0.0
    return x


def last_is_zero(trace: Trace) -> Trace:
    """The end token's log mu was not returned, and was padded with 0 (NeMo, vime #70)."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: _zeroed(x, len(x) - 1)))


def zeros_after_a_half(trace: Trace) -> Trace:
    """log mu of the second half of each response was lost and padded with 0 (vime #70)."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: _zeroed(x, len(x) // 2)))


def zeros_here_and_there(trace: Trace) -> Trace:
    """Every tenth log old is 0."""
    logp_old = trace.logp_old.clone()
    logp_old[torch.rand(len(logp_old), generator=stream(0, "doctor page", "zeros")) < 0.1] = 0.0
    return replace(trace, logp_old=logp_old)


def unrelated(trace: Trace) -> Trace:
    """log mu is that of other responses: the order was lost between engine and trainer."""
    order = torch.randperm(len(trace.logp_mu), generator=stream(0, "doctor page", "order"))
    return replace(trace, logp_mu=trace.logp_mu[order])


def without_end(trace: Trace) -> Trace:
    """Every response that stopped has lost its end token, on both sides."""
    end = torch.mode(trace.tokens[trace.offsets[1:] - 1]).values
    is_kept_N = torch.ones(len(trace.tokens), dtype=torch.bool)
    is_kept_N[trace.offsets[1:] - 1] = trace.tokens[trace.offsets[1:] - 1] != end
    is_part_N = torch.zeros_like(is_kept_N)
    for b, start in enumerate(trace.offsets[:-1].tolist()):
        is_part_N[start + int(trace.num_prompt[b]) : int(trace.offsets[b + 1])] = True
    is_kept_A = is_kept_N[is_part_N]
    names = ("logp_mu", "logp_old", "is_response", "entropy_old")
    changes = {name: getattr(trace, name)[is_kept_A] for name in names}
    sizes = [int(is_kept_N[a:b].sum()) for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)]
    nothing = {"experts_mu": None, "experts_old": None, "layer_numbers": (), "num_experts": 0}
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return replace(trace, tokens=trace.tokens[is_kept_N], offsets=offsets, **changes, **nothing)


# ---- what is planted -------------------------------------------------------------------------------------------------

PLANTS: dict[str, Plant] = {
    "exact engine": Plant("nothing"),
    "weights bf16": Plant("precision", WeightPrecision(format="bf16")),
    "weights int8": Plant("precision", WeightPrecision(format="int8")),
    "weights fp8": Plant("precision", WeightPrecision()),
    "weights fp8, blocks": Plant("precision", WeightPrecision(scale="block", block_size=32)),
    "activations bf16": Plant("precision", ActivationPrecision(format="bf16")),
    "activations fp8": Plant("precision", ActivationPrecision()),
    "fp8 blocks, ue8m0 scales": Plant("precision", BlockPrecision(format="fp8_ue8m0")),
    "mxfp8": Plant("precision", BlockPrecision()),
    "nvfp4": Plant("precision", BlockPrecision(format="nvfp4"), is_out_of_reach=True),
    "trainer fp8": Plant("precision", products="fp8_e4m3"),
    "cache bf16": Plant("precision", KVPrecision(format="bf16")),
    "cache fp8": Plant("precision", KVPrecision()),
    "8 units, partial sums in bf16": Plant("precision", ReductionOrder(units=8, partials="bf16")),
    "logit noise 0.1": Plant("precision", LogitNoise(std=0.1)),
    "router noise 0.03": Plant("routing", RouterNoise(std=0.03)),
    "router noise 0.1": Plant("routing", RouterNoise(std=0.1)),
    "router noise 0.3": Plant("routing", RouterNoise(std=0.3)),
    "1 version behind": Plant("stale", StaleWeights(versions=1)),
    "2 versions behind": Plant("stale", StaleWeights(versions=2)),
    "4 versions behind": Plant("stale", StaleWeights(versions=4)),
    "4 behind, half new, cache recomputed": Plant(
        "switched", StaleWeights(versions=4, switch_at=0.5, cache="recomputed")
    ),
    "4 behind, half new, cache kept": Plant("switched", StaleWeights(versions=4, switch_at=0.5)),
    "nothing arrives": Plant("stale", PartialWeights()),
    "experts never arrive": Plant("stale", PartialWeights(missing="experts")),
    "attention never arrives": Plant("stale", PartialWeights(missing="attention")),
    "routers never arrive": Plant("stale", PartialWeights(missing="routers"), is_out_of_reach=True),
    "experts one place on": Plant("wrong_weights", ExpertLayout()),
    "gate and up swapped": Plant("wrong_weights", ExpertLayout(moved="halves")),
    "routed sum times 0.4": Plant("wrong_weights", RoutedScaling()),
    "routed sum times 0.8": Plant("wrong_weights", RoutedScaling(factor=0.8), is_out_of_reach=True),
    "top-p 0.9, scored": Plant("mask", SamplingMismatch(top_p=0.9, score="processed")),
    "top-k 2, scored": Plant("mask", SamplingMismatch(top_k=2, score="processed")),
    "temperature 0.7, scored": Plant("temperature", SamplingMismatch(temperature=0.7, score="processed")),
    "temperature 1.3, scored": Plant("temperature", SamplingMismatch(temperature=1.3, score="processed")),
    "top-p 0.9": Plant("sampler_mask", SamplingMismatch(top_p=0.9)),
    "min-p 0.1": Plant("sampler_mask", SamplingMismatch(min_p=0.1)),
    "temperature 0.7": Plant("sampler_temperature", SamplingMismatch(temperature=0.7)),
    "log mu a token late": Plant("shifted", damage=shifted_mu),
    "log old a token early, fp8": Plant("shifted", WeightPrecision(), damage=shifted_old),
    "end token's log mu is 0": Plant("last_token", damage=last_is_zero),
    "end token's log mu is 0, bf16": Plant("last_token", WeightPrecision(format="bf16"), damage=last_is_zero),
    "half of log mu is 0, fp8": Plant("zero_padded", WeightPrecision(), damage=zeros_after_a_half),
    "a tenth of log old is 0": Plant("zero_padded", damage=zeros_here_and_there),
    "end tokens cut off": Plant("end_token", damage=without_end),
    "log mu of other responses": Plant("unrelated", damage=unrelated),
} | {
    name: Plant("route_record", mutant=name)
    for name in ("record_is_a_row_late", "decoding_repeats_the_prompts_route", "last_stage_overwrites_the_first")
}  # fmt: skip


class Ward:
    """A trained model of some versions, and the traces of whatever engine was planted."""

    def __init__(self, config: str, overrides: Sequence[str], num_steps: int):
        self.bench = Bench(load(config, overrides, Schemas()), num_steps)

    def trace(self, plant: Plant, draw: int) -> Trace:
        """Samples of the planted engine with the trainer's scores, on the draw's problems."""
        with ExitStack() as stack:
            mutant = MUTANTS[plant.mutant] if plant.mutant else None
            for target in dict.fromkeys(edit.target for edit in mutant.edits) if mutant else ():
                stack.enter_context(edited(target, [edit for edit in mutant.edits if edit.target == target]))
            rollouts = self.bench.sample(self.bench.engine(plant.defect), draw)
        trainer = self.bench.trainer
        if plant.products is not None:
            trainer = self.bench.build_trainer(trainer.model, TrainingBlock(products=plant.products))
        scores = trainer.score(rollouts, RoutingPlan("natural"))
        rewards = [self.bench.task.reward(response.prompt, response) for response in rollouts.responses]
        return plant.damage(Trace.of(rollouts, scores, torch.tensor(rewards), step=draw))

    def named(self, plant: Plant, draw: int) -> Diagnosis:
        """The doctor's word on it."""
        return diagnose(self.trace(plant, draw))


def confusion(ward: Ward, names: Sequence[str], draws: Sequence[int]) -> dict[str, Counter[str]]:
    """For each plant how often each cause was named first."""
    return {name: Counter(ward.named(PLANTS[name], draw).named[0].name for draw in draws) for name in names}


def num_right(found: Mapping[str, Counter[str]]) -> int:
    """The number of times that the planted cause was named first."""
    return sum(counts[PLANTS[name].cause] for name, counts in found.items())


# ---- the page --------------------------------------------------------------------------------------------------------

SMALL = (
    "--algorithm.batch.num_prompts", "16", "--task.max_digits", "2", "--task.num_held_out", "32",
    "--algorithm.sampling.max_tokens", "24", "--model.hidden_size", "32", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--model.expert_size", "32", "--seed", "3",
)  # fmt: skip
"""A model of width 32 on sums of two figures, other problems and another seed than those the thresholds are from."""
DEEP = (
    "--algorithm.batch.num_prompts", "16", "--seed", "5", "--model.num_layers", "3", "--model.num_experts", "16",
    "--model.hidden_size", "48", "--model.num_heads", "3", "--model.num_kv_heads", "3",
)  # fmt: skip
"""Three layers of 16 experts, another seed."""
NEWEST = (PartialWeights, ExpertLayout, RoutedScaling)
COURSE_SEEDS = ("12",)
"""Of the runs over steps: no rule was made on it."""
FIRST_DRAW = 20
NUM_DRAWS = 3

INTRO = """# The doctor

`firstorder doctor TRACE...` says what is wrong with a pair of engines from what one sampled (mu) and both scored (mu,
old), and `firstorder doctor FOLDER` what is wrong with a run from all its steps, in words: first the verdict, then what to do first, then the evidence. `--out FILE.html` adds the page with the pictures,
`--json` prints an object. The exit code is 0 where nothing is wrong (or only rounding below a k3 of 1e-6), 3 where a fault
is named (`--fail-on none`, or some causes by name, for a pipeline), 2 where a file cannot be read. It sees the trace
alone, never the config that made it. `firstorder calibrate TRACE CONFIG` then sets the sandbox's dials so that its engine
is as far off. This page is written by `python -m tests.pages.doctor > docs/doctor.md`.

## How it decides

Each clue (`lab/doctor/evidence.py`) is one number with a formula; each cause (`lab/doctor/causes.py`) one rule that weighs
clues. Causes are asked in order, and what one explains the later ones cannot. A second cause of strength 0.25 or more
is named beside the first: then the trace does not tell them apart for certain.

What its rules rest on: a mask makes the mean ratio its kept mass where it is 1 for any two policies over the same
tokens; a temperature is a slope of logits; noise does not repeat in the same context; routers that err by themselves
differ more often than the logits' deviation explains; a policy gradient moves logits least where the policy is sure,
rounding moves all alike; matrices in the wrong place move logits by whole units, by the same in the same context; draws from one context repeat as often as their probabilities say, if what is scored is what
is drawn from. The thresholds of the comparisons of sizes were set on sandbox models of width 64, 128 and 48 (two layers
of 8, 8 and 12 experts); on a model of another kind they are a guess, and the words give the numbers behind it.

## How often it is right

Planted in engines by the sandbox's dials, in code as bugs that the field has had (`tests/mutants`), and in traces.
Two models and draws that no threshold was set on; {draws} draws of some 2,500 to 4,000 tokens of each. Of the first model the
clues of the eight newest plants were seen on one draw before the rule for weights in the wrong place was made; of the second
nothing was. *Unknown* counts as wrong, and how often it was named is said. Two plants are beyond what one step tells, as the models of the
thresholds show (0 of 12 right): routers whose weights never arrive look like rounding, or like routers that err by themselves; a routed sum
that is off by a fifth looks like old weights. They count as wrong, and the counts without them, a split made after all had been seen,
stand below.

Formats are counted apart, as they fall short of nine in ten: FP8 with UE8M0 scales, MXFP8, NVFP4 (each of weights and activations), and a trainer
in FP8. Rounding of that strength is often taken for old weights. NVFP4 moves logits by a whole unit in models this small, and none of
its traces is named right (0 of 12 on the models of the thresholds as well): it looks like old or wrong weights. Both models had been looked at with these
plants when the threshold between rounding and old weights was moved from 0.4 to 0.7; the new value is from the models of the
thresholds alone, where it misnames 22 traces of 300 in place of 32 (rounding, routing, old and wrong weights, without the plants that have
0 of 12). Which format rounds one step does not tell: all are *precision*. The matrices have all plants but NVFP4 and the two.

The score of old weights grows with the size of the deviation, so that coarse rounding passes its threshold. Where old or wrong weights are named and a logit is off by 0.2 to 2, the doctor says that a format coarser than FP8
can look the same, and what to try. No count is changed by that.
"""  # noqa: E501

OVER_STEPS = """## Over the steps of a run

`firstorder doctor FOLDER` reads the dumps of a run step by step, and keeps a few numbers of each step and a table of draws of
bounded size: its memory does not grow with the number of steps. The folder is a run of ours, or one with another framework's files of
steps (`train_data_step{N}.jsonl`, `step_{N}/rank_{R}.jsonl`, `{N}.engines.jsonl`, `{N}_{R}.pt`, `rank_{R}_call_{N}.pt`,
`step-{N}.jsonl`; with `--columns` any name that ends in the step). Files of several ranks of one step are one step.

- **Growth**: the series of k3 KL, F(2), mean gap and routers that differ, each tested by ranks (`lab/doctor/change_point.py`: exact
  level of 1 %, from 8 steps on) and then placed by least squares: a jump at step s, a slope since step s, a line over the run.
- **The cause since then** is read off the clues of those steps pooled (medians; of standard errors the sum over root n), by the
  same rules as a step's.
- **Weights that do not arrive**: where steps share draws (one token after one context, as when prompts come back), log mu of a step is
  compared with log old of every earlier one on the same draws. If it is nearest to that of step v ever since, the weights of step v
  are the last that arrived; if always to that of k steps before, the engine is k steps behind. The statistic is a ratio of sums over the
  same tokens, 0 for an engine that is exact but for that; no level of noise is assumed, and whichever 1/32 of the prompts is left out,
  it must stay below 1/2. It was chosen over the growth of the KL with the trainer's movement since that also grows for an
  engine whose rounding errors grow.
- **Weights that arrive in part**: on shared draws log mu moves by less than 0.7 of log old's movement (two standard errors, jackknife
  over prompts), the gap grows, and no earlier version fits.
- **One engine (or rank), one place of the batch**: it has the largest KL step after step, by more than chance (exact level of 1 %) and
  twice, or five times, the others'. Positions and lengths that carry ten times the others' KL are said, but are no fault.

What the traces cannot show: without shared draws (fewer than 50) whether weights arrive is not told, and the report says so; a few prompts
that come back every few steps mend it. Parts that hardly move the policy (routers alone) are not seen to be missing. A trace of ours does not
say which of several engines sampled a response: dumps of ranks, and rows with a column `engine`, do. A place of the batch is the place in the
dump; where the framework shuffles before it writes, it says nothing. Rounding that grows and a trainer that moves away are told apart by
shared draws alone.

`--json` has every step, `--fail-on` takes `stopped`, `behind`, `partly`, `one_engine` and `one_slot` besides the causes of a step, and
`--out` writes a page: the KL by step and cause, every step, and the tokens that carry the KL of the worst step.

### How often it is right over steps

Runs of 14 steps of some 1,100 tokens on two models (width 32; width 48 with three layers), with a seed that no rule was made on.
"""  # noqa: E501

READS = """## What it reads

`firstorder doctor --list-formats` prints this table. `as in` is the source that was read for it; the importers are
tested on files written as those sources write them (`lab/doctor/dumps.py`), not on files of a cluster.

"""
HOOKS = """
- Without both sides' experts the doctor cannot tell routing from precision, and says so; without entropies it looks for unscored
  sampling in the repeats of draws alone.
- A dump of the engine alone (open-instruct, vLLM, miles's dashboard) needs the trainer's side: `--old FILE`, a `.jsonl` or `.parquet`
  with a row per response in the same order: `logp_old`, and if there are any `entropy_old`, `experts_old`, `logp_pi`.
- A dump of any other kind: `--columns tokens=ids,is_response=mask,logp_mu=gen_logp,logp_old=train_logp`. Our names are `tokens`,
  `num_prompt`, `logp_mu`, `logp_old`, `is_response`, `entropy_old`, `logp_pi`, `reward`, `experts_mu`, `experts_old`, `engine`, `step`, and
  `prompt_tokens`, `response_tokens`, `length`. Values stand beside the response's tokens, or beside all, prompt included.
- Every row that does not fit is a line: file, row, field, what was expected and what came; of more than ten the number. Columns that
  nothing was read from are named.
- NeMo-RL's `r3_trace_*.jsonl` (name the files of all processes, or their folder) holds digests of routes: the doctor says whether what the
  engine recorded is what the trainer fetched and ran, at which layer it is not, and how many rows had no route.
- Files are read row by row, and kept as tensors: the 61 MB of a NeMo-RL dump of 1,000,000 sampled tokens take 17 s of one core and
  0.7 GB at the most, words included. Routes as JSON are far larger: write them as Parquet or safetensors.
- Torch files are read without running code from them. A pickle is not opened.

### What to write from vLLM

With `logprobs=0` in `SamplingParams`, and `enable_return_routed_experts=True` in `LLM` for the routes; `outputs` is what `llm.generate` returned:

```python
import json


def line(output):
    completions = [
        {
            "token_ids": list(one.token_ids),
            "logprobs": [{token: {"logprob": found.logprob} for token, found in at.items()} for at in one.logprobs],
            "routed_experts": None if one.routed_experts is None else one.routed_experts.tolist(),
        }
        for one in output.outputs
    ]
    return json.dumps({"prompt_token_ids": list(output.prompt_token_ids), "outputs": completions})


with open("engine.jsonl", "w") as file:
    file.writelines(line(output) + "\\n" for output in outputs)
```

At another temperature than 1 the engine needs `logprobs_mode="processed_logprobs"`. The trainer's side comes from `--old`.

### What to add to TRL

Train with `Dumped` in place of `GRPOTrainer`, with vLLM and `vllm_importance_sampling_correction`:

```python
import json

from trl import GRPOTrainer


class Dumped(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask"]
        names += ["sampling_per_token_logps", "old_per_token_logps"] + ["tool_mask"] * ("tool_mask" in batch)
        if all(name in batch for name in names):
            with open(f"{self.args.output_dir}/trl_engines_{self.state.global_step}.jsonl", "a") as file:
                for values in zip(*(batch[name].tolist() for name in names), strict=True):
                    file.write(json.dumps(dict(zip(names, values, strict=True))) + "\\n")
        return batch
```

With several processes each writes a part of the step: name the process in the file (`_{self.accelerator.process_index}`) and give the doctor all of them.

### What to add to verl

As dumped, verl's file has texts and scores. With `use_v1: true`, today's default, at the end of `verl/trainer/ppo/v1/trainer_base.py`:

```python
_log_rollout_data = PPOTrainer._log_rollout_data


def _log_engines(self, batch, timing_raw, rollout_data_dir):
    _log_rollout_data(self, batch, timing_raw, rollout_data_dir)
    names = ["prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    os.makedirs(rollout_data_dir, exist_ok=True)
    with open(f"{rollout_data_dir}/{self.global_steps}.engines.jsonl", "w") as file:
        for values in zip(*(data[name].unbind() for name in names), strict=True):
            row = {name: value.tolist() for name, value in zip(names, values, strict=True)}
            file.write(json.dumps({"step": self.global_steps, **row}) + "\\n")


PPOTrainer._log_rollout_data = _log_engines
```

With the old trainer, in `RayPPOTrainer._log_rollout_data`, before `_dump_generations`:

```python
for name in ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs"):
    reward_extra_infos_to_dump[name] = batch.batch[name].tolist()
```

Both with `actor_rollout_ref.rollout.calculate_log_probs=True`; add `"entropy"` (old trainer: `"entropys"`) where the old pass computed
it, and `"routed_experts"` where R3 is on. To log the doctor's clues while a run trains: [Watch the mismatch](how-to/watch-the-mismatch.md).
"""  # noqa: E501


def formats() -> str:
    """The formats that can be read, as a table, and how to add the fields that a dump lacks."""
    rows = [
        (
            about.name,
            f"`{about.files}`" if " " not in about.files else about.files,
            about.has,
            about.lacks,
            about.source,
        )
        for about in (*FORMATS, REPLAY_LOG)
    ]
    return READS + markdown_table(("whose", "files", "has", "lacks", "as in"), rows) + HOOKS


def page(wards: Mapping[str, Callable[[], Ward]], num_draws: int) -> str:
    """docs/doctor.md."""
    draws = range(FIRST_DRAW, FIRST_DRAW + num_draws)
    parts = [section(title, confusion(make(), list(PLANTS), draws)) for title, make in wards.items()]
    runs = over_steps(run_courses(COURSE_SEEDS))
    return "\n".join([INTRO.format(draws=num_draws), *parts, runs, layers.whole(), formats()])


def section(title: str, found: Mapping[str, Counter[str]]) -> str:
    """The counts and tables of one model."""
    main = {name: counts for name, counts in found.items() if not PLANTS[name].is_format}
    formats = {name: counts for name, counts in found.items() if PLANTS[name].is_format}
    told = {name: counts for name, counts in main.items() if not PLANTS[name].is_out_of_reach}
    older = {name: counts for name, counts in main.items() if not isinstance(PLANTS[name].defect, NEWEST)}
    in_reach = {name: counts for name, counts in found.items() if not PLANTS[name].is_out_of_reach}
    unknown = sum(counts[UNKNOWN.name] for counts in found.values())
    return (
        f"### {title}\n\n{_counted(main)} right.\n\n{_counted(told)} without the two that one step does not tell; "
        f"{_counted(older)} without the eight newest plants. Of the four plants of formats {_counted(formats)}, "
        f"which makes {_counted(found)} in all. *Unknown* was named {unknown} times.\n\n"
        f"{matrix(in_reach)}\n{details(found)}"
    )


def _counted(found: Mapping[str, Counter[str]]) -> str:
    """The number right, out of how many."""
    return f"{num_right(found)} of {sum(counts.total() for counts in found.values())}"


def run_courses(seeds: Sequence[str]) -> dict[str, list[tuple[str, bool]]]:
    """For each course, by model and seed: the cause that was named, and whether it and its step are right."""
    out: dict[str, list[tuple[str, bool]]] = {}
    for name, plant in COURSES.items():
        found = [told(plant, [*model, "--seed", seed]) for model in (NARROW, TALL) for seed in seeds]
        out[name] = [
            (course.named.name, course.named.name == plant.cause and is_step_right(plant, course)) for course in found
        ]
    return out


def over_steps(found: Mapping[str, Sequence[tuple[str, bool]]]) -> str:
    """The diagnoses of runs with planted faults, and how often they are right."""
    rows, num, num_causes, num_steps = [], 0, 0, 0
    for name, results in found.items():
        plant = COURSES[name]
        num, num_steps = num + len(results), num_steps + sum(is_right for _, is_right in results)
        num_causes += sum(cause == plant.cause for cause, _ in results)
        said = ", ".join(f"{cause} {n}" for cause, n in Counter(cause for cause, _ in results).most_common())
        steps = "–" if plant.since is None else f"{sum(is_right for _, is_right in results)} of {len(results)}"
        rows.append((name, plant.cause, said, steps))
    spanning = {cause.name for cause in STEPS_CAUSES}
    others = [cause for name, results in found.items() if COURSES[name].cause not in spanning for cause, _ in results]
    counts = (
        f"The cause is right in {num_causes} of {num} runs, the cause and its step in {num_steps}. Of {len(others)} "
        f"runs without a fault that spans steps {sum(cause in spanning for cause in others)} were said to have one. "
        "What is left is mostly weights that never arrive and hardly move the policy."
    )
    return f"{OVER_STEPS}\n{counts}\n\n{markdown_table(('planted', 'cause', 'named', 'at the right step'), rows)}"


def matrix(found: Mapping[str, Counter[str]]) -> str:
    """Planted causes down, named ones across: how many of each."""
    planted: dict[str, Counter[str]] = {}
    for name, counts in found.items():
        planted.setdefault(PLANTS[name].cause, Counter()).update(counts)
    order = [cause.name for cause in CAUSES if any(counts[cause.name] for counts in planted.values())]
    heads = [f"{i + 1}" for i in range(len(order))]
    rows = [
        (f"{order.index(cause) + 1 if cause in order else '–'} {cause}", *(counts[name] or "" for name in order))
        for cause, counts in sorted(planted.items(), key=lambda item: order.index(item[0]) if item[0] in order else 99)
    ]
    return markdown_table(("planted \\ named", *heads), rows)


def details(found: Mapping[str, Counter[str]]) -> str:
    """Planted against named causes, in one table."""
    rows = [
        (name, PLANTS[name].cause, ", ".join(f"{cause} {n}" for cause, n in counts.most_common()))
        for name, counts in found.items()
    ]
    return markdown_table(("planted", "cause", "named"), rows)


WARDS: Mapping[str, Callable[[], Ward]] = {
    "Two layers of 8 experts, width 32": lambda: Ward("configs/arithmetic.yaml", SMALL, 4),
    "Three layers of 16 experts, width 48": lambda: Ward("configs/arithmetic.yaml", DEEP, 6),
}

if __name__ == "__main__":
    print(page(WARDS, NUM_DRAWS), end="")
