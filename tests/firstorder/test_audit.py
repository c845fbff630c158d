"""Laws of `firstorder audit`: it prints exact numbers, writes records, and a mistake is one line and exit code 2."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from firstorder.cli import main
from lab.audit import load_config
from lab.audit.records import read
from lab.config.load import config_hash
from lab.report.style import number
from lab.strict import validate
from sandbox.exact.cases import MoePolicies, SandboxAudit, _World, moe_cases
from tests.firstorder.killed_cases import goes_on
from tests.firstorder.test_cli import fails
from tests.sandbox.exact.tree_world import tiny_moe
from theory.streams import stream

CONFIGS = Path(__file__).parents[2] / "configs" / "audit"

# Printed by `firstorder audit configs/audit/small.yaml` (seed 0, float64, torch 2.13 on x86-64): medians over three
# policies at T = 4. That rows are sums over all responses is shown by enumeration in tests/lab/audit/test_rows.py.
GROUPS_OF_8 = "tabular, 3 tokens, noise on logits; reward sparse; groups of 8; T = 4, 3 policies"
INFINITE = "tabular, 3 tokens, noise on logits; reward sparse; infinite group, baseline mean; T = 4, 3 policies"
# Title, objective: bias, direction bias, cosine, step, variance, error at 64 and at 1024, at either distance.
GOLDEN = {
    (GROUPS_OF_8, "minirl"): ["0.19 0.0973 0.995 0.82 51.5 0.925 0.295", "0.256 0.241 0.97 0.86 52 0.965 0.352"],
    (GROUPS_OF_8, "grpo"): ["0.522 0.116 0.993 0.48 18 0.756 0.528", "0.501 0.261 0.965 0.507 18.2 0.764 0.508"],
    (GROUPS_OF_8, "sequence"): ["0.125 0 1 0.875 57.9 0.96 0.269", "0.125 0 1 0.875 63.8 1.01 0.279"],
    (INFINITE, "no weight"): ["0.141 0.123 0.992 0.913 55.6 0.95 0.284", "0.269 0.266 0.964 0.964 56.6 1.02 0.366"],
    (INFINITE, "token"): ["0.0988 0.0973 0.995 0.937 59.5 0.976 0.281", "0.245 0.241 0.97 0.983 60.1 1.02 0.361"],
    (INFINITE, "prefix"): ["0.0672 0.0669 0.998 0.984 61.4 0.985 0.264", "0.155 0.138 0.99 0.982 62.1 1.01 0.314"],
    (INFINITE, "sequence"): ["0 0 1 1 67.8 1.03 0.257", "0 0 1 1 74.9 1.08 0.271"],
}

TINY = """
name: tiny
backend: exact
policies: [{kind: tabular, num_tokens: 2, lengths: [2], seeds: 1}]
objectives: [{preset: minirl}, {preset: reinforce, label: no weight}]
compare: {first: minirl, second: no weight}
"""
MOE = """
name: tiny-moe
backend: sandbox
policies:
  - kind: moe
    num_tokens: 2
    lengths: [2]
    seeds: 1
    modes: [none, R2, R3]
    model: {num_layers: 1}
    engines: {exact: {}, router noise: {defects: [{kind: router_noise, std: 1.0}]}}
staleness: {token_kl: [0.0, 1e-2]}
rewards: [last]
objectives: [{preset: reinforce, correction: {name: seq_tis, numerator: pi, cap: .inf}, label: sequence}]
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smallest audit, in an empty folder that is also the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path / "tiny.yaml"


def printed(text: str) -> list[list[str]]:
    """The table's lines as cells, with the titles as single cells."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_the_small_audit_prints_these_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped small audit, at its tabular policies of length 4, gives the golden rows to every printed digit."""
    monkeypatch.chdir(tmp_path)
    raw = YAML(typ="safe", pure=True).load(CONFIGS / "small.yaml")
    blocks = [block | {"lengths": [4]} for block in raw["policies"] if block["kind"] == "tabular"]
    words = ["audit", str(CONFIGS / "small.yaml"), "--policies", json.dumps(blocks), "--progress", "none"]
    assert main(words) == 0
    rows = printed(capsys.readouterr().out)
    for (title, objective), wanted in GOLDEN.items():
        start = rows.index([title]) + 1
        of_case = rows[start : start + 19]
        assert [" ".join(row[4:]) for row in of_case if row[0] == objective] == wanted


def test_an_audit_leaves_records(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, manifest, audit.json and page are there; the folder alone gives the same page and tables again."""
    assert main(["audit", str(tiny), "--progress", "lines", "--markdown", "study.md"]) == 0
    out = capsys.readouterr().out
    page = Path(out.splitlines()[-1])
    names = {path.name for path in page.parent.iterdir() if path.name != ".lock"}
    assert names == {"config.yaml", "manifest.json", "audit.json", "audit.html"}
    frame, text = read(page.parent / "audit.json"), page.read_text()
    assert frame.attrs["config_hash"] in page.parent.name and set(frame["objective"]) == {"minirl", "no weight"}
    assert Path("study.md").read_text().startswith("# minirl against no weight")
    page.unlink()
    assert main(["audit", "runs/tiny"]) == 0
    assert out.endswith(capsys.readouterr().out) and page.read_text() == text
    line = fails(capsys, "audit", "runs/tiny", "--seed", "1")
    assert line == f"--seed: expected no field beside the folder of finished records, got {page.parent}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("audit.json", "an audit"), ("flow.json", "a flow"), ("cases.jsonl", "an audit or flow")],
)
def test_an_audit_is_no_run_to_report(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`report` refuses the folder of an audit or a flow, finished or not, in one line that names the command for it."""
    (folder := tmp_path / "20260101T000000Z-0123456789ab").mkdir()
    for file in ("config.yaml", name):
        (folder / file).write_text("{}\n")
    words = (
        f"{folder}: expected the folder of a run, got that of {kind} ({name}); use firstorder {kind.split(' ', 1)[1]}"
    )
    assert fails(capsys, "report", str(tmp_path)) == words
    assert not (folder / "report.html").exists()


def test_a_gradient_of_0_has_a_page(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a mask leaves nothing, the bias is 1 and there is no direction: a dash in the table, and a page as ever."""
    nothing = "{preset: reinforce, correction: {name: icepop, lo: 0.1, hi: 0.2}, label: nothing}"
    words = ["audit", str(tiny), "--discrepancy.token_kl", "[1e-4, 1e-3]", "--compare", "null", "--progress", "none"]
    for objectives in (f"[{nothing}]", f"[{nothing}, {{preset: minirl}}]"):
        assert main([*words, "--objectives", objectives]) == 0
        out = capsys.readouterr().out
        rows = [row for row in printed(out) if row[0] == "nothing"]
        assert {tuple(row[4:8]) for row in rows} == {("1", "–", "–", "0")}
        page = Path(out.splitlines()[-1]).read_text()
        assert "with nothing" in page and 'id="bias-kl"' in page
        assert ('id="direction-kl"' in page) == ("minirl" in objectives)


def test_rejected_policies_have_no_drift_metric(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a rejection keeps no response, bias is 1 and `drift_tokens` nan; tables and page are as ever."""
    nothing = "{preset: reinforce, correction: {name: geo_rs, lo: 20.0, hi: 30.0}, label: nothing}"
    alone = [f"[{nothing}]", "--compare", "null"]
    beside = [f"[{nothing}, {{preset: minirl}}]", "--compare.second", "nothing", "--markdown", "study.md"]
    for own in (alone, beside):
        assert main(["audit", str(tiny), "--progress", "none", "--objectives", *own]) == 0
        page = Path(capsys.readouterr().out.splitlines()[-1])
        rows = read(page.parent / "audit.json")
        is_nothing = rows["objective"] == "nothing"
        assert (rows["bias"][is_nothing] == 1).all() and rows["drift_tokens"].isna().equals(is_nothing)
        assert "nothing" in page.read_text()
    assert Path("study.md").read_text().startswith("# minirl against nothing")


def test_a_comparison_without_a_gap_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At distance 0 there is no ratio of biases: a page without maps, and one sentence in place of the study's tables;
    with a gap the sentence is gone."""
    two = "[{kind: tabular, num_tokens: 2, lengths: [1, 2], seeds: 1}]"
    words = ["audit", str(tiny), "--progress", "none", "--markdown", "study.md", "--policies", two]
    none = ["--discrepancy.token_kl", "[0]", "--staleness.token_kl", "[0]", "--name", "none"]
    said = "minirl and no weight are not compared: no policies that both are for have a gap between mu and pi."
    for own, is_empty in (([], False), (none, True)):
        assert main([*words, *own]) == 0
        page, study = Path(capsys.readouterr().out.splitlines()[-1]).read_text(), Path("study.md").read_text()
        assert ('id="map-0"' in page) == (not is_empty) and (said in study) == is_empty
        assert ("## Turning points" in study) == ("## bias(minirl)" in study) == (not is_empty)
        assert "## All objectives at the longest responses" in study


def test_a_killed_audit_goes_on(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with -9 after two cases of four: the same records as without, two cases anew; a damaged case is named."""
    words = ["audit", str(tiny), "--policies.0.seeds", "4", "--progress", "lines"]
    folder = goes_on(words, "audit.json", capsys, monkeypatch)
    (folder / "cases.jsonl").write_text("{}\n")
    (folder / "audit.json").unlink()
    assert "cases.jsonl:1: expected the rows of a case, got b'{}'" in fails(capsys, *words)


def test_mistakes_are_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tree that is too large is refused with its count, a wrong field by its name, and nothing is written."""
    said = fails(capsys, "audit", str(tiny), "--policies.0.lengths", "[30]")
    assert "policies.0: expected at most 4,000,000 responses to enumerate, got 1,073,741,824" in said
    assert "did you mean 'seed'?" in fails(capsys, "audit", str(tiny), "--sed", "1")
    assert "compare.first: expected one of minirl, no weight" in fails(
        capsys, "audit", str(tiny), "--compare.first", "x"
    )
    assert fails(capsys, "audit", str(tiny), "--markdown", "no/where.md").startswith("--markdown: expected a file in")
    bare = fails(capsys, "audit", str(tiny), "--compare", "null", "--markdown", "study.md")
    assert bare == "--markdown: expected a config with compare, got none"
    moe = ["--policies", "[{kind: moe, engines: {exact: {}}}]"]
    assert "policies.0.kind: expected one of 'tabular', 'linear'" in fails(capsys, "audit", str(tiny), *moe)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        ("stale_weights", "none that keeps earlier weights (old weights are staleness.token_kl)"),
        ("partial_weights", "none that keeps earlier weights (old weights are staleness.token_kl)"),
        ("sampling_mismatch, top_p: 0.9", "an engine that scores the distribution of its draws"),
    ],
)
def test_engines_of_one_hand_over(
    defect: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine that needs earlier hand-overs, or does not score its draws, is refused before the first case."""
    monkeypatch.chdir(tmp_path)
    Path("moe.yaml").write_text(MOE.replace("router_noise, std: 1.0", defect))
    said = fails(capsys, "audit", "moe.yaml")
    assert f"policies.0.engines.router noise.defects: expected {expected}, got " in said
    assert not Path("runs").exists()


def test_the_config_explains_itself(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config prints a config that loads to the same audit, overrides included, and starts nothing."""
    assert main(["audit", str(tiny), "--seed", "7", "--print-config"]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed.yaml") == load_config(tiny, ["--seed", "7"]) and not Path("runs").exists()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_audit_loads(path: Path) -> None:
    """Each audit under configs/ is a config of this version."""
    assert load_config(path, (), lambda: SandboxAudit).name


@pytest.mark.parametrize(
    ("config", "page"),
    [("token_weight", "token-weight"), ("token_weight_moe", "token-weight-moe"), ("claims", "audit-claims")],
)
def test_the_study_is_of_the_shipped_config(config: str, page: str) -> None:
    """Each study in docs/ was made by the configuration that is shipped: it prints its hash."""
    text = (CONFIGS.parents[1] / "docs" / f"{page}.md").read_text()
    assert f"({config_hash(load_config(CONFIGS / f'{config}.yaml', (), lambda: SandboxAudit))})" in text


def test_engines_without_a_dial_have_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A MoE's engines stand in the tables at the distance that they happen to have, to two digits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe.yaml").write_text(
        MOE.replace("seeds: 1", "seeds: 2")
        .replace("modes: [none, R2, R3]", "modes: [R3]")
        .replace("label: sequence}]", "label: sequence}, {preset: reinforce, label: none}]")
        + "compare: {first: sequence, second: none}\n"
    )
    assert main(["audit", "moe.yaml", "--progress", "none", "--markdown", "study.md"]) == 0
    text = Path("study.md").read_text()
    frame = read(next(Path("runs/tiny-moe").glob("*/audit.json")))
    noisy = frame[(frame["engine"] == "router noise") & (frame["asked_staleness"] == 1e-2)]
    level = float(f"{noisy['kl_mu_old'].median():.1e}")
    assert f"| T | {number(level)} |" in text
    # Its sentences are of both engines, as the page's are; the exact one's distance is 0.
    assert "medians over 2 cases, at T = 2, KL(mu || old) = 0 to " in text
    # R3's old pass has other routes than pi also at staleness 0, which is then no gap to compare with.
    still = ["--staleness.token_kl", "[0.0]", "--name", "still", "--markdown", "still.md", "--progress", "none"]
    assert main(["audit", "moe.yaml", *still]) == 0
    assert "staleness alone" not in Path("still.md").read_text()


def test_a_moe_is_audited_through_its_own_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the exact engine and fresh weights no mode has a bias; under staleness or a noisy router, natural routing
    with the whole weight has none, and replay has one wherever a route differs from pi's own."""
    monkeypatch.chdir(tmp_path)
    Path("moe.yaml").write_text(MOE)
    assert main(["audit", "moe.yaml", "--progress", "none"]) == 0
    frame = read(Path(capsys.readouterr().out.splitlines()[-1]).parent / "audit.json")
    assert len(frame) == 2 * 3 * 2 and frame["asked_discrepancy"].isna().all()
    # The model runs in float64; sums over its four responses are exact to some 1e-15.
    fresh = frame[(frame["engine"] == "exact") & (frame["asked_staleness"] == 0)]
    assert fresh["bias"].max() < 1e-10 and fresh["kl_mu_pi"].abs().max() < 1e-12
    assert frame[frame["mode"] == "none"]["bias"].max() < 1e-10
    noisy = frame[frame["engine"] == "router noise"]
    assert (noisy["kl_mu_old"] > 0).any() and (noisy["router_disagreement"] > 0).all()
    replayed = frame[frame["mode"] != "none"]
    assert ((replayed["bias"] > 1e-8) == (replayed["router_staleness"] > 0)).all()
    assert (replayed["router_staleness"] > 0).any()


def test_an_engine_s_noise_is_that_of_the_seed() -> None:
    """Two seeds of an audit, like two policies of one, have noise of their own; all other draws being equal."""
    raw = YAML(typ="safe", pure=True).load(MOE.replace("modes: [none, R2, R3]", "modes: [none]"))
    found = []
    for seed, index in ((0, 0), (0, 1), (1, 0)):
        config = validate(SandboxAudit, raw | {"seed": seed}, "moe")
        block = config.policies[0]
        assert isinstance(block, MoePolicies)
        world = _World(config, block, next(iter(block.trees())), index, "last")
        vars(world)["model"] = tiny_moe(2, stream(0, "model"))
        problem = world.problems("router noise", "none")(math.inf, 0.0)
        found.append(torch.cat([edges_nV.reshape(-1) for edges_nV in problem.logp_mu]))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_the_moe_kind_says_how_many_cases_it_has() -> None:
    """The number of cases that the progress bar counts is the number that come."""
    config = load_config(CONFIGS / "small.yaml", (), lambda: SandboxAudit)
    block = config.policies[2]
    assert moe_cases(config, block).total == 2 * 2 * 5 * 1
