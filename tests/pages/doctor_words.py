"""The words of docs/doctor.md that no number changes."""

from __future__ import annotations

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
is named beside the first. Where both sides' experts are there, and the strongest has a strength below 0.7, or old or
wrong weights lead where a logit is off by 0.7 to 1.2, the diagnosis is *undecided* between two causes
(`lab/doctor/undecided.py`): both are named, with what tells them apart. `--fail-on undecided` asks for it by name,
`--json` lists both as `candidates`.

What its rules rest on: a mask makes the mean ratio its kept mass where it is 1 for any two policies over the same
tokens; a temperature is a slope of logits; noise does not repeat in the same context; routers that err by themselves
differ more often than the logits' deviation explains; a policy gradient moves logits least where the policy is sure,
rounding moves all alike; matrices in the wrong place move logits by whole units, by the same in the same context; draws from one context repeat as often as their probabilities say, if what is scored is what
is drawn from. The thresholds of the comparisons of sizes were set on sandbox models of width 64, 128 and 48 (two layers
of 8, 8 and 12 experts); on a model of another kind they are a guess, and the words give the numbers behind it.

## How often it is right

Planted in engines by the sandbox's dials, in code as bugs that the field has had (`tests/mutants`), and in traces;
{draws} draws of some 2,500 to 4,000 tokens of each, on four models that no threshold was set on. Of the first the
clues of eight plants were seen on one draw before the rule for weights in the wrong place was made, and the first two had
been looked at when the threshold between rounding and old weights was moved from 0.4 to 0.7, and when the rules that
part coarse formats from old weights failed. On the last two nothing was run before the rule for *undecided* stood in LOG.md with
its predictions. *Unknown* counts as wrong. The bounds of *undecided* are from five other models (widths 64, 48, 128, 40
and 80), where 422 of 460 named are right and 85 of 545 are undecided.

Three plants are beyond what one step tells: routers whose weights never arrive look like rounding; a routed sum that is off by a fifth
looks like old weights; NVFP4 moves logits by a whole unit in models this small, and looks like old or wrong weights.
Formats (FP8 with UE8M0 scales, MXFP8, NVFP4 of weights and activations, a trainer in FP8, and an engine that quantises a bf16
export beside a trainer that quantises float32 weights, as in xtuner#2044) are counted apart where the strongest cause is
counted. Which format rounds one step does not tell: all are *precision*. In xtuner#2044 the k3 KL is 25 times the mended one's; here the mended one is 0, and
that of another source about what FP8 on one side alone costs.
"""  # noqa: E501

STRENGTHS = """### What a strength means

The share of named causes that are right, by their strength (`share_right` in `--json`): as said, counted on 1,145
traces of nine models (`lab/doctor/reliability.py`), and as seen on three other models after that
(`python -m tests.pages.strengths`). The share is of these plants, each as frequent as any other.
"""

OVER_STEPS = """## Over the steps of a run

`firstorder doctor FOLDER` reads the dumps of a run step by step, and keeps a few numbers of each step and a table of draws of
bounded size: its memory does not grow with the number of steps. The folder is a run of ours, or one with another framework's files of
steps (`train_data_step{N}.jsonl`, `step_{N}/rank_{R}.jsonl`, `{N}.engines.jsonl`, `{N}_{R}.pt`, `{N}.pt`, `rank_{R}_call_{N}.pt`,
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
- Files are read row by row, and kept as tensors: a dump of 1,000,000 sampled tokens takes less than 20 s of one core and 0.8 GB in
  [every format](speed.md#importing-dumps), words included. Routes as JSON are far larger: write them as Parquet or safetensors.
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

### What to add to SkyRL

With `trainer.dump_data_batch` SkyRL writes pickles, which can run any code when they are opened. At the end of `dump_data` in `skyrl/train/trainer.py`:

```python
tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
torch.save(tensors, data_save_dir / f"{file_name}.pt")
```

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
