"""Laws of `firstorder doctor`: the words and the page say what the library finds, and an error is one line."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from firstorder.findings import has_no_experts
from lab.doctor import dumps
from lab.doctor.causes import CAUSES
from lab.doctor.importers import FORMATS
from tests.lab.browser import probed
from tests.lab.doctor.patients import draw_rows, trace_of
from tests.lab.doctor.test_importers import ROWS, write_slime
from tests.lab.doctor.test_steps import drawn, drift
from theory.streams import stream

CONFIGS = Path(__file__).parents[2] / "configs"

GOOD = trace_of(draw_rows(), lambda logp, b: logp)
LATE = trace_of(draw_rows(), lambda logp, b: [logp[0], *logp[:-1]])


def test_words_and_page_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two traces each is named with its own cause, on the terminal and on a page that loads no address."""
    good, late, page = (tmp_path / name for name in ("good.safetensors", "late.safetensors", "page.html"))
    GOOD.save(good)
    LATE.save(late)
    assert main(["doctor", str(good), str(late), "--out", str(page)]) == 3
    told, text = capsys.readouterr().out, page.read_text()
    assert told.index("good.safetensors:") < told.index("nothing wrong") < told.index("late.safetensors:")
    assert told.index("late.safetensors:") < told.index("shifted by one token")
    body = text[text.index("<body>") : text.index('<script type="application/json"')]
    few = "tokens are few: the rules were tested on 2,500 or more"
    assert told.count(few) == body.count(few) == 2
    assert "nothing wrong" in body and "shifted by one token" in body and "http" not in body


def test_the_verdict_is_first_and_then_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the verdict in one sentence, the second the fix of the cause that is named first; the page
    begins with the same two.
    """
    LATE.save(tmp_path / "late.safetensors")
    main(["doctor", str(tmp_path / "late.safetensors"), "--out", str(tmp_path / "page.html")])
    first, second, *_ = capsys.readouterr().out.splitlines()
    shifted = next(cause for cause in CAUSES if cause.name == "shifted")
    assert first.startswith(f"late.safetensors: it looks like {shifted.title} (strength ") and first.endswith(").")
    assert second == f"Do first: {shifted.fix}"
    page = (tmp_path / "page.html").read_text()
    assert page.index(f">I{first.partition(': i')[2]}<") < page.index(f">{html.escape(second, quote=False)}<")


SIZES = """
const size = (one) => parseFloat(getComputedStyle(document.querySelector(one)).fontSize);
parent.postMessage({verdict: size("h1"), first: size(".lead"), heading: size("h2")}, "*");
"""


@pytest.mark.parametrize("width", [400, 1280])
def test_the_verdict_is_the_largest_text(tmp_path: Path, width: int) -> None:
    """On a phone, too: larger than the headings below it, which are larger than what to do first."""
    LATE.save(tmp_path / "late.safetensors")
    main(["doctor", str(tmp_path / "late.safetensors"), "--out", str(tmp_path / "doctor.html")])
    found = probed((tmp_path / "doctor.html").read_text(), SIZES, tmp_path, width, is_dark=False)
    assert found["verdict"] > found["heading"] > found["first"], found


@pytest.mark.parametrize(
    ("fail_on", "codes"),
    [(None, (0, 3, 3)), ("any", (0, 3, 3)), ("none", (0, 0, 0)), ("stale, shifted", (0, 3, 3)), ("stale", (0, 0, 0))],
)
def test_the_exit_code_is_3_where_a_fault_is_named(fail_on: str | None, codes: tuple[int, ...], tmp_path: Path) -> None:
    """0 for nothing wrong, 3 for a fault (of those asked for), also where one of two traces has it."""
    good, late = tmp_path / "good.safetensors", tmp_path / "late.safetensors"
    GOOD.save(good)
    LATE.save(late)
    option = [] if fail_on is None else ["--fail-on", fail_on]
    assert tuple(main(["doctor", *map(str, paths), *option]) for paths in ([good], [late], [good, late])) == codes


def test_a_cause_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--fail-on names causes that exist, or any or none."""
    assert main(["doctor", str(tmp_path / "t.safetensors"), "--fail-on", "stail"]) == 2
    assert "--fail-on: 'stail' is no cause; did you mean 'stale'?" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "t.safetensors"), "--fail-on", "routing,any"]) == 2
    assert "--fail-on: expected any alone, got 'routing,any'" in capsys.readouterr().err


def test_rounding_too_small_to_matter_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sides that differ by 1e-4 have a k3 below 1e-6: named as precision, with exit code 0."""
    tiny = trace_of(draw_rows(), lambda logp, b: [x * (1 + 1e-4 * (-1) ** t) for t, x in enumerate(logp)])
    tiny.save(tmp_path / "tiny.safetensors")
    assert main(["doctor", str(tmp_path / "tiny.safetensors")]) == 0
    assert "nothing to fix; it looks like different arithmetic" in capsys.readouterr().out


def test_json_has_the_verdict_the_clues_and_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout and nothing else: verdict, fault, all strengths, caveat and unused columns."""
    path = dumps.prime_rl(tmp_path, ROWS)
    code = main(["doctor", str(path), "--json", "--out", str(tmp_path / "page.html")])
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert (code == 3) == (told["fault"] is not None)
    assert told["trace"] == "rank_0.jsonl, with pi in place of old" and told["is_pi"]
    assert told["format"] == "prime-rl" and "exports pi" in told["caveat"] and "mismatch_kl" in told["unused"]
    assert told["clues"]["num_tokens"] == sum(sum(row["is_response"]) for row in ROWS)
    assert set(told["strengths"]) == {cause.name for cause in CAUSES} | {"unknown"}


def test_a_clue_that_is_infinite_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no infinity: a filler of -1e4 among mu's log-probabilities leaves an object that any program reads."""
    trace = trace_of(draw_rows(), lambda logp, b: [-1e4, *logp[1:]])
    trace.save(tmp_path / "filler.safetensors")
    main(["doctor", str(tmp_path / "filler.safetensors"), "--json"])

    def refuse(name: str) -> None:
        raise ValueError(name)

    (told,) = json.loads(capsys.readouterr().out, parse_constant=refuse)["traces"]
    assert None in told["clues"].values()


def test_what_is_read_is_listed_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """--list-formats needs no file: each format with its files, what it has and lacks, and its source."""
    assert main(["doctor", "--list-formats"]) == 0
    told = capsys.readouterr().out
    assert all(
        f"{about.name}: {about.files}\n  has    {about.has}\n  lacks  {about.lacks}" in told for about in FORMATS
    )


def test_columns_and_the_other_side_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--columns reads columns of any name, --old brings the trainer's side; unused columns are named."""
    renamed = [{"ids": r["tokens"], "n": r["num_prompt"], "a": r["logp_mu"], "b": r["logp_old"], "x": 1} for r in ROWS]
    path = dumps.lines(tmp_path / "dump.jsonl", renamed)
    main(["doctor", str(path), "--columns", "tokens=ids,num_prompt=n,logp_mu=a,logp_old=b"])
    assert "Not used: x." in capsys.readouterr().out
    whole = [row | {"is_response": [True] * len(row["logp_mu"])} for row in ROWS]
    main(["doctor", str(dumps.vllm(tmp_path, whole)), "--old", str(dumps.old_side(tmp_path, whole))])
    assert "read as vLLM." in capsys.readouterr().out


@pytest.mark.parametrize("place", ["firstorder/doctor.py", "docs/doctor.md", "docs/how-to/diagnose-a-dump.md"])
def test_the_exit_codes_are_said_alike(place: str) -> None:
    """In the help, on the doctor's page and in the how-to, with *undecided* as the code has it."""
    text = " ".join((Path(__file__).parents[2] / place).read_text().split())
    wanted = "0 if nothing is wrong, 3 if a fault is named or the doctor is undecided, and 2 if a file cannot be read"
    assert f"The exit code is {wanted}." in text


def test_the_folder_of_a_dense_model_rules_routers_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its config.json alone is read, for a file and for a run's folder; a model with experts, also nested, is none."""
    (tmp_path / "run").mkdir()
    draws = iter((1 + 0.02 * torch.randn(10_000, generator=stream(0, "dense"))).tolist())
    noisy = trace_of(draw_rows(), lambda logp, b: [x * next(draws) for x in logp])
    noisy.save(path := tmp_path / "run" / "step-000001.safetensors")
    (model := tmp_path / "model").mkdir()
    for config, is_dense in (
        ({"hidden_size": 8}, True),
        ({"hidden_size": 8, "num_local_experts": 4}, False),
        ({"text_config": {"num_experts": 4}}, False),
        ({"num_experts": None, "text_config": {"hidden_size": 8}}, True),
    ):
        (model / "config.json").write_text(json.dumps(config))
        assert has_no_experts(model) == is_dense
    for words in ([str(path)], [str(tmp_path / "run")]):
        main(["doctor", *words])
        assert "undecided: it looks like" in capsys.readouterr().out
        assert main(["doctor", *words, "--model", str(model)]) == 3
        assert "undecided" not in (told := capsys.readouterr().out) and "it looks like different arithmetic" in told


# ---- the steps of a run ----------------------------------------------------------------------------------------------


def run_folder(folder: Path, since: int) -> Path:
    """Twelve steps of an engine whose weights stay those of a step; 12 and more: they always arrive."""
    (folder / "rollouts").mkdir(parents=True)
    for step in range(1, 13):
        trace = drawn(step)
        logp_mu = drift(trace, min(step, since))
        own = replace(trace, step=step, logp_old=drift(trace, step), logp_mu=logp_mu)
        own.save(folder / "rollouts" / f"step-{step:06d}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("since", "option", "code"),
    [(5, [], 3), (5, ["--fail-on", "stopped"], 3), (5, ["--fail-on", "stale"], 0), (12, [], 0)],
)
def test_a_folder_is_a_run(
    since: int, option: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line says how the KL went and which fault spans the steps, the second what to do; the code follows."""
    folder = run_folder(tmp_path / "run", since)
    assert main(["doctor", str(folder), *option]) == code
    first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("run: k3 KL(mu, old) ") and second.startswith("Do first: ")
    assert third.endswith("sampled tokens of 12 steps, read as trace.")
    if since == 5:
        assert first.endswith("it looks like weights that no longer arrive, since step 5.")
        assert any("closest to log old of step 5" in line for line in rest)
        assert "grew from 0 to" in first and "  steps 1 to 5: nothing wrong, k3 KL 0" in rest
    else:
        assert first.startswith("run: k3 KL(mu, old) is 0 at all 12 steps, no clear change; nothing to fix; ")


def test_a_run_as_an_object_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json has every step with its figures and strengths, --out a page with picture, table and tokens."""
    folder, page = run_folder(tmp_path / "run", 5), tmp_path / "page.html"
    assert main(["doctor", str(folder), "--json", "--out", str(page)]) == 3
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["fault"] == "stopped" and told["over_steps"]["stopped_since"] == 5 and told["run"] == "run"
    assert [step["step"] for step in told["steps"]] == list(range(1, 13)) and told["num_shared_draws"] >= 50
    assert told["changes"]["k3_kl"]["since"] == 6 and told["changes"]["k3_kl"]["before"] == 0
    html = page.read_text()
    body = html[html.index("<body>") : html.index('<script type="application/json"')]
    assert "weights that no longer arrive, since step 5" in body and body.count('<th scope="row"') == 12
    assert 'id="kl-by-cause"' in body and "Tokens that carry the KL" in body and "http" not in body
    payload = json.loads(html[html.index('id="payload">') + 13 : html.index("</script>", html.index('id="payload">'))])
    bars = payload["figures"][0]
    heights = [sum(bar["y"][i] or 0 for bar in bars["data"]) for i in range(12)]
    assert heights == pytest.approx([step["k3_kl"] for step in told["steps"]])
    assert [shape["x0"] for shape in bars["layout"]["shapes"]] == [5.5]


def test_a_caveat_of_later_steps_is_said_with_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that repeat others from step 2 on: one line with the number of steps and the first one, words and JSON."""
    for step in range(1, 4):
        for rank in range(1 if step == 1 else 2):
            write_slime(tmp_path / f"{step}_{rank}.pt", ROWS)
    main(["doctor", str(tmp_path)])
    caveats = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Caveat: ")]
    repeats = "1 of a step's 2 files repeats the rows of another, as tensor-parallel ranks do, and is left out."
    assert caveats == [f"Caveat: 2 steps, first step 2: {repeats}"]
    main(["doctor", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["runs"][0]["caveat"] == caveats[0].removeprefix("Caveat: ")


def test_one_response_and_one_token_are_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a trace and of a run."""
    row = {"tokens": [1, 2], "num_prompt": 1, "logp_mu": [-1.0], "logp_old": [-1.5]}
    path = dumps.lines(tmp_path / "run/step-1.jsonl", [row])
    main(["doctor", str(path)])
    assert "\n1 sampled token of 1 response, read as rows." in capsys.readouterr().out
    main(["doctor", str(path.parent)])
    assert "\n1 sampled token of 1 step, read as rows." in capsys.readouterr().out


def test_options_that_do_not_fit_a_folder_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--old beside a folder or two dumps, columns of a trace of ours, --out of a folder among others, a folder without
    steps: each is one line, code 2."""
    folder = run_folder(tmp_path / "run", 12)
    (tmp_path / "empty").mkdir()
    GOOD.save(Path(ours := str(tmp_path / "ours.safetensors")))
    for words, wanted in (
        ([str(folder), "--old", "x.jsonl"], "--old: expected one file beside a dump of one step"),
        (["a.jsonl", "b.jsonl", "--old", "x.jsonl"], "--old: expected one dump beside it, got 2"),
        ([ours, "--columns", "tokens=ids"], "--columns: expected none with a trace of ours"),
        ([str(folder), str(tmp_path / "empty"), "--out", str(tmp_path / "p.html")], "--out: expected one folder"),
        ([str(tmp_path / "empty")], "expected files of steps"),
    ):
        assert main(["doctor", *words]) == 2
        error = capsys.readouterr().err
        assert wanted in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [
    ("--localise", "--out", "page.html"), ("--localise", "--old", "x.jsonl"), ("--localise", "--columns", "tokens=ids"),
    ("--precision", "bf16"),
])  # fmt: skip
def test_an_option_that_would_go_unread_is_one_line(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--localise writes no page and reads no dump; without it there is no precision: each is one line, code 2."""
    assert main(["doctor", str(tmp_path / "step.safetensors"), *words]) == 2
    error = capsys.readouterr().err
    assert f"{words[-2]}: expected none with " in error and words[-1] in error and error.count("\n") == 1


def test_causes_of_a_replay_log_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An R3 trace has no causes by name: --fail-on takes any or none there, code 2 for others."""
    path = tmp_path / "r3_trace_a_pid1.jsonl"
    path.write_text("{}\n")
    assert main(["doctor", str(path), "--fail-on", "temprature"]) == 2
    out, error = capsys.readouterr()
    wanted = "--fail-on: expected any or none with NeMo-RL's r3_trace files, got 'temprature'"
    assert (out, error) == ("", f"error: {wanted}\n")


def test_the_figures_of_a_run_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line below the verdict begins with a capital letter and ends in a full stop."""
    main(["doctor", str(run_folder(tmp_path / "run", 12))])
    said = [line.strip() for line in capsys.readouterr().out.splitlines() if "steps" in line and line.startswith("  ")]
    figures = [line for line in said if not line.startswith("step")]
    assert len(figures) == 2 and all(line[0].isupper() and line.endswith(".") for line in figures), figures


def test_steps_that_share_no_draw_say_what_they_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no prompt comes back, whether weights arrive is not told, and the report says how many draws are shared."""
    for step in range(1, 4):
        first = 100 * step  # tokens of their own
        own = [row | {"tokens": [first + token for token in row["tokens"]]} for row in draw_rows()]
        trace = replace(trace_of(own, lambda logp, b: [x - 0.01 for x in logp]), step=step)
        trace.save(tmp_path / f"step-{step:06d}.safetensors")
    main(["doctor", str(tmp_path)])
    told = capsys.readouterr().out
    assert "cannot show whether weights arrive: they share 0 draws" in told
    assert "fewer than the 8 needed to see a change" in told


def test_a_fit_at_another_temperature_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`calibrate` samples at the config's temperature, which must be that of the trace: one line names both."""
    path = dumps.lines(tmp_path / "trace.jsonl", [row | {"temperature": 0.5} for row in draw_rows()])
    assert main(["calibrate", str(path), str(CONFIGS / "arithmetic.yaml")]) == 2
    field = f"{CONFIGS / 'arithmetic.yaml'}: algorithm.sampling.temperature"
    assert capsys.readouterr().err == f"error: {field}: expected the trace's 0.5, got 1\n"
