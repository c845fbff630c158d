"""The constant texts of docs/doctor.md."""

from __future__ import annotations

INTRO = """# The doctor

The engine that samples and the engine that trains should give a token the same log-probability. If they do not,
`firstorder doctor` names the cause from dumps of the rollouts; it never sees the config that made them. This page says
how it decides, how often it is right on planted faults, and which dumps it reads.
[Diagnose a dump](how-to/diagnose-a-dump.md) shows how to use it, and
[Remedies by framework](how-to/remedies-by-framework.md) which option of verl, slime, TRL and others is the remedy.

- `firstorder doctor TRACE...` reads one step: the sampled tokens with their log-probabilities under mu (the engine that
  sampled) and under old (the trainer at the same weights), and the experts of both if the dump has them.
- `firstorder doctor FOLDER` reads a run [step by step](#over-the-steps-of-a-run), and also names faults that one step
  cannot show.

The output has the verdict, the first thing to do, and the evidence. `--out FILE.html` adds a page with figures, `--json`
prints an object. The exit code is 0 if nothing is wrong, 3 if a fault is named or the doctor is undecided, and 2 if a
file cannot be read. Rounding below a k3 KL of 1e-6 is nothing wrong. `--fail-on` limits the 3 to some causes by name, or
to none.
`firstorder calibrate TRACE CONFIG` then sets the sandbox's dials so that its engine is as far off. This page is written
by `python -m tests.pages.doctor > docs/doctor.md`.

## The causes

| name | the verdict says that it looks like |
|---|---|
{causes}
The last five need the steps of a run.

## How it decides

Each clue (`lab/doctor/evidence.py`) is one number with a formula; each cause (`lab/doctor/causes.py`) is one rule that
weighs clues. Rules run in order, and a later cause cannot explain what an earlier one has explained. A second cause of
strength 0.25 or more is named beside the first. Faults of the tokens (unscored sampling, missing end tokens)
explain no gap: they leave it to the other causes, and are named first from a strength of 0.7 on. So do rows that the
routing record lacks.

A diagnosis can be *undecided* (`lab/doctor/undecided.py`). With the experts of both sides it is if the strongest cause
is below 0.7, or if old or wrong weights lead while a logit is off by 0.7 to 1.2. Without them it is wherever rounding,
old or wrong weights or no cause leads, as routers can look like each of these. The report then names the candidates,
with a test of each. `--fail-on undecided` selects it by name, and `--json` lists `candidates`. Given the weights that
old scored with, `--model FOLDER` tries replay on them, and the outcome decides between the routers and other weights
([how often](how-to/diagnose-a-dump.md#try-the-cause)); if the dump lacks old's experts, the model's own stand for them.
The folder of a dense model rules routers out.

The rules rest on these facts:

- The mean ratio old/mu is 1 for any two policies over the same tokens; a sampling mask makes it the kept mass.
- A temperature multiplies all logits by one factor.
- Noise does not repeat in the same context.
- Routers that err on their own differ more often than the deviation of the logits explains. Where they err by chance,
  the part of the deviation that does not repeat jumps: it is heavy-tailed, and that of noise on all logits is normal.
- A policy gradient moves logits least where the policy is sure; rounding moves all alike.
- Matrices in the wrong place move logits by whole units, by the same amount in the same context.
- Draws from one context repeat as often as their probabilities say, if tokens are drawn from the distribution that
  scores them.
- An end token stands only at ends. A response of the largest length, alone or with its prompt, may have been cut by a
  bound, and is not asked for one.

The tail of all deviations, repeated ones included, does not tell routers from rounding: rounding flips routers, too.

The thresholds on sizes were set on sandbox models of width 64, 128 and 48 (two layers of 8, 8 and 12 experts). On other
kinds of models they are a guess, and the report gives the numbers behind it.

In deep models nearly all tokens have a differing router, and the share of the KL on such tokens proves nothing; the
report says so. At half of Qwen3-30B-A3B the doctor names the routers of an FP8 engine, but replay removes only 46% of
that KL ([on a GPU](on-gpu.md)).

## How often it is right

Faults are planted in engines by the sandbox's dials ([engine defects](engine-defects.md)), in code as bugs that the
field has had ([mutants](mutants.md)), and in traces. Each is diagnosed on {draws} draws of some 2,500 to 4,000 tokens, on
four models that set no threshold. *Unknown* counts as wrong. The test is not quite blind: on the first model the clues
of eight plants were seen on one draw before the rule for weights in the wrong place was written. The first two models
had also been examined when the threshold between rounding and old weights was moved from 0.4 to 0.7, and when rules that
should separate coarse formats from old weights failed. Nothing was run on the last two models before the rule for
*undecided*, with its predictions, was in LOG.md. The bounds of *undecided* are from five other models (widths 64, 48,
128, 40 and 80), where 422 of 460 named are right and 85 of 545 are undecided. The bounds of the jumps by which routers
show that err by chance are from four more (widths 64, 40, 48 and 80); the first two models here had been looked at when
that clue was chosen.

One step cannot show three of the plants. Routers whose weights never arrive look like rounding. A routed sum that is off
by a fifth looks like old weights. NVFP4 moves logits by a whole unit in models this small, and looks like old or wrong
weights.

Five plants are formats: FP8 with UE8M0 scales, MXFP8, NVFP4 of weights and activations, a trainer in FP8, and an engine
that quantises a bf16 export beside a trainer that quantises float32 weights, as in xtuner#2044. They are counted
separately in the counts of the strongest cause. One step does not show which format rounds: all are *precision*. In
xtuner#2044 the k3 KL of the second step is 23 times that after the fix; here it is 0 after the fix, and with the other
source of the weights it is about that of FP8 on one side alone.

No framework's own dump has the experts of both sides. The same traces are therefore counted a second time without old's
experts, and a third time without the entropies either. A routing record that is not the one that ran cannot be seen
there.

For each model, the first table counts traces by planted cause (rows) and named cause (columns, numbered like the rows);
the second table has the causes named for each plant.
"""  # noqa: E501

STRENGTHS = """### What a strength means

A strength is in [0, 1]. The table has the share of named causes that are right, by their strength. The stated share is
`share_right` in `--json`: it was counted on the 987 of 1,145 traces of nine models that name a cause
(`lab/doctor/reliability.py`). The share seen was counted later on three other models, by
`python -m tests.pages.strengths`. If the stated shares hold, all three counts of right causes are within the range of
the last column in 95 of 100 repeats. Every plant counts equally in these shares.
"""

OVER_STEPS = """## Over the steps of a run

`firstorder doctor FOLDER` reads the dumps of a run step by step. It keeps a few numbers per step and a table of draws of
bounded size, so that it needs hardly more memory for a long run. The folder is a run of ours, or has another framework's
files (`train_data_step{N}.jsonl`, `step_{N}/rank_{R}.jsonl`, `trl_engines_{N}.jsonl`, `{N}.engines.jsonl`, `{N}.jsonl`,
`{N}_{R}.pt`, `{N}.pt`, `rank_{R}_call_{N}.pt`, `step-{N}.jsonl`; with `--columns` any name that ends in the step). Files
of several ranks are joined to one step. A file that repeats another's rows (tensor-parallel ranks), or has no
log-probabilities of old while another has (ranks before the last pipeline stage), is left out, and a caveat says so.

- **Growth**: the series of k3 KL, F(2), mean gap and routers that differ. Each is tested by ranks
  (`lab/doctor/change_point.py`: exact level of 1 %, from 8 steps on) and then located by least squares: a jump at step s,
  a slope since step s, or a line over the run.
- **The cause since then** comes from the pooled clues of those steps (medians; for standard errors the sum over root n),
  by the same rules as for one step, *undecided* included. Where shared draws fit no earlier version and their
  gap does not grow, old weights are ruled out.
- **Weights that do not arrive**: if steps share draws (one token after one context, as when prompts are repeated), log mu
  of a step is compared with log old of every earlier step on the same draws. If it is closest to that of step v ever
  since, the weights of step v are the last that arrived; if always to that of k recorded steps before, the engine is
  that far behind. The statistic is a ratio of sums over the same tokens, 0 for an otherwise exact engine. It assumes
  no noise level, and must stay below 1/2 whichever 1/32 of the prompts is left out. The growth of the KL with the
  trainer's movement was rejected as a statistic, since it also grows for an engine whose rounding errors grow.
- **Weights that arrive in part**: on shared draws log mu moves by less than 0.7 of log old's movement (two standard
  errors, jackknife over prompts), the gap grows, no earlier version fits, and more than half of the steps alone look like
  other weights.
- **One engine (or rank), one place in the batch**: it has the largest KL step after step, by more than chance (exact
  level of 1 %), and at least twice (an engine) or five times (a place) the KL of the others. Positions and lengths with
  ten times the KL of the others are reported, but are not called a fault.

The traces have limits. With fewer than 50 shared draws they cannot show whether weights arrive, and the report says so;
repeating a few prompts every few steps is enough. Missing parts that hardly move the policy (routers alone) go unseen. A
trace of ours does not record which of several engines sampled a response: dumps of ranks, and rows with a column
`engine`, do. A place in the batch is the place in the dump; if the framework shuffles before writing, it means nothing.
Only shared draws separate growing rounding from a trainer that moves away.

`--json` has every step, `--fail-on` takes `stopped`, `behind`, `partly`, `one_engine` and `one_slot` besides the causes
of a step, and `--out` writes a page: the KL by step and cause, every step, and the tokens that carry the KL of the worst
step.

### How often it is right over steps

Runs of 14 steps of some 1,100 tokens on two models (width 32; width 48 with three layers), with a seed that set no rule.
"""  # noqa: E501

READS = """## What it reads

`firstorder doctor --list-formats` prints this table. *Lacks* names the fields that a dump does not have; below the table
are the few lines to add to a framework whose dump lacks too much. *As in* is the source code that the reader follows:
the importers are tested on files written as that code writes them (`lab/doctor/dumps.py`), not on files of a cluster.

"""  # noqa: E501
HOOKS = """
- Without both sides' experts the doctor finds only routers that err by chance, and where contexts repeat; otherwise it
  is undecided between them and rounding or other weights. Without entropies it detects unscored sampling only by
  repeated draws. For a dense model, add `--model FOLDER`: its `config.json` tells that there are no routers.
- With `algorithm.rollout_correction.bypass_mode` verl copies the engine's log-probabilities and runs no old pass. Such a
  dump (equal bits on every response token) is refused, with exit code 2, unless its entropies show unscored sampling.
- A dump of the engine alone (open-instruct, vLLM, miles's dashboard) needs the trainer's side: `--old FILE`, a `.jsonl`
  or `.parquet` with a row per response in the same order, with `logp_old` and, if available, `entropy_old`,
  `experts_old`, `logp_pi`. In a dump that has both sides they take the place of its own.
- A dump of any other kind: `--columns tokens=ids,is_response=mask,logp_mu=gen_logp,logp_old=train_logp`. Our names are
  `tokens`, `num_prompt`, `logp_mu`, `logp_old`, `is_response`, `entropy_old`, `logp_pi`, `reward`, `experts_mu`,
  `experts_old`, `engine`, `step`, `temperature`, and `prompt_tokens`, `response_tokens`, `length`. A column has a value
  per response token, or per token, prompt included.
- Every row that does not fit gives a line with file, row, field, and the expected and actual values; beyond ten rows the
  message gives only their number. The report names the columns that it did not use.
- NeMo-RL's `r3_trace_*.jsonl` (pass the files of all processes, or their folder) holds digests of routes: the doctor
  says whether the trainer fetched and ran the routes that the engine recorded, at which layer they differ, and how many
  rows had no route.
- Files are read row by row and kept as tensors: a dump of 1,000,000 sampled tokens takes less than 20 s of one core and
  0.8 GiB in [every format](speed.md#importing-dumps), diagnosis included. Routes as JSON are far larger: write them as
  Parquet or safetensors.
- Torch files are read without running their code. A pickle is not opened.

### What to write from vLLM

Use `logprobs=0` in `SamplingParams`, and `enable_return_routed_experts=True` in `LLM` for the routes; `outputs` is the
result of `llm.generate`:

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

At temperatures other than 1 the engine needs `logprobs_mode="processed_logprobs"`. `--old` supplies the trainer's side.

### What to add to SkyRL

With `trainer.dump_data_batch` SkyRL writes pickles, which can run any code when they are opened. Add at the end of
`dump_data` in `skyrl/train/trainer.py`:

```python
tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
torch.save(tensors, data_save_dir / f"{file_name}.pt")
```

### What to add to TRL

Train with `Dumped` instead of `GRPOTrainer`, with vLLM and `vllm_importance_sampling_correction`:

```python
import json

from trl import GRPOTrainer


class Dumped(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask"]
        names += ["sampling_per_token_logps", "old_per_token_logps"] + ["tool_mask"] * ("tool_mask" in batch)
        if self.model.training and all(name in batch for name in names):
            with open(f"{self.args.output_dir}/trl_engines_{self.state.global_step}.jsonl", "a") as file:
                for values in zip(*(batch[name].tolist() for name in names), strict=True):
                    file.write(json.dumps(dict(zip(names, values, strict=True))) + "\\n")
        return batch
```

Before a run is resumed, delete the files of the steps that it will repeat. With several processes each writes a part of the step: add the process to the file's name
(`_{self.accelerator.process_index}`) and pass all files to the doctor.

### What to add to verl

verl's own dump has only texts and scores. With `use_v1: true`, today's default, add at the end of
`verl/trainer/ppo/v1/trainer_base.py`:

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

With the old trainer, add in `RayPPOTrainer._log_rollout_data`, before `_dump_generations`:

```python
for name in ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs"):
    reward_extra_infos_to_dump[name] = batch.batch[name].tolist()
```

Both need `actor_rollout_ref.rollout.calculate_log_probs=True`. Set `algorithm.rollout_correction.rollout_rs=null` for
the step: rejection overwrites `response_mask`, and a rejected token would look like one that was not sampled. Add
`"entropy"` to the names of the first, as its old pass always computes it; the old trainer has dropped it by then. Add
`"routed_experts"` to either if R3 is on. With `router_replay.mode=R2` leave this field out: it then has old's experts,
and the doctor would read them as the engine's. To log the doctor's clues during training, see
[Watch the mismatch](how-to/watch-the-mismatch.md).

### What to add to slime

Two options, and no code. `--dump-details DIR` writes both of slime's dumps: `DIR/rollout_data/{rollout_id}.pt`, which has
mu alone, and `DIR/train_data/{rollout_id}.pt`, which has both sides. To write only the second, pass
`--save-debug-train-data 'DIR/train_data/{rollout_id}.pt'`; slime fills in the number. Then, for either:

```sh
firstorder doctor DIR
```

The second dump has no experts. With `--use-rollout-routing-replay` the trainer takes the engine's out of the batch
before it writes the file; only the first dump keeps them, and the doctor does not join the two. Leave out
`--use-rollout-logprobs`: with it and several updates per rollout there is no old pass, and pi stands in its place.

miles has the same options; its files are one per rank. Its old pass runs unless `--use-rollout-logprobs` or
`--skip-actor-forward-only` is set. With the first of these alone, `--get-mismatch-metrics` makes it run; that option needs
`--custom-tis-function-path`.
"""  # noqa: E501
