"""Compiled operators: a row's bits never depend on its batch, values are the eager ones to rounding; and the build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.strict import ConfigError
from sandbox import kernels
from sandbox.kernels.compiled import build
from sandbox.kernels.compiled.gates import compiled_gate
from sandbox.kernels.numerics import EXACT, Numerics
from tests.forks import begin, end
from tests.sandbox.compiled_world import COMPILED
from theory.routing import gates
from theory.routing.gates import GATES
from theory.streams import stream

SEEDS = st.integers(0, 2**16)
WIDTHS = st.integers(1, 40)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=stream(seed, "compiled", *shape))


def same_rows(function, rows: Tensor, start: int, stop: int) -> bool:
    """Whether rows start to stop have the same bits alone, at another address, as in the whole."""
    shifted = torch.empty(rows[start:stop].numel() + 3)[3:].view_as(rows[start:stop]).copy_(rows[start:stop])
    return torch.equal(function(shifted), function(rows)[start:stop])


@st.composite
def parts(draw) -> tuple[int, int, int]:
    """A number of rows, and a part of them."""
    num = draw(st.integers(1, 40))
    start = draw(st.integers(0, num - 1))
    return num, start, draw(st.integers(start + 1, num))


@given(SEEDS, parts(), WIDTHS, WIDTHS)
def test_rows_of_a_product_do_not_depend_on_the_batch(seed, part, width, num_out):
    """x W^T of some rows alone is, bit for bit, those rows of the whole product, whatever its sizes."""
    num, *cut = part
    weight = drawn(seed, num_out, width)
    assert same_rows(lambda x: COMPILED.linear(x, weight), drawn(seed, num, width), *cut)


@given(SEEDS, parts(), WIDTHS)
def test_rows_of_norms_and_activations_do_not_depend_on_the_batch(seed, part, width):
    """RMS norm, SwiGLU, sigmoid and rotation give a row the same bits alone as in any batch, for every width."""
    num, *cut = part
    weight = drawn(seed, width)
    x = 3 * drawn(seed, num, 2 * width)
    assert same_rows(lambda x: COMPILED.rms_norm(x, weight, 1e-6), x[:, :width].contiguous(), *cut)
    assert same_rows(COMPILED.swiglu, x, *cut)
    assert same_rows(COMPILED.sigmoid, x, *cut)
    cos, sin = drawn(seed + 1, 1, 3, 2 * width), drawn(seed + 2, 1, 3, 2 * width)
    whole = COMPILED.rotate(x[None, :, None].expand(1, num, 3, -1), *(t.expand(1, num, 3, -1) for t in (cos, sin)))
    few = slice(*cut)
    n = cut[1] - cut[0]
    alone = COMPILED.rotate(x[None, few, None].expand(1, n, 3, -1), *(t.expand(1, n, 3, -1) for t in (cos, sin)))
    assert torch.equal(alone, whole[:, few])


@given(SEEDS, parts(), st.sampled_from([(4, 2), (2, 2), (3, 1), (5, 1)]), st.sampled_from([2, 6, 8, 16, 24, 32, 40]))
def test_attention_of_a_query_depends_on_its_keys_alone(seed, part, heads, width):
    """A query has the same bits with fewer key slots, in any batch, whatever stands in slots that it does not see, and
    without the heads that share its keys."""
    num, start, stop = part
    H, h = heads
    slots = kernels.round_up(num, kernels.MIN_KEYS)
    q, k, v = drawn(seed, 3, num, H, width), drawn(seed + 1, 3, h, slots, width), drawn(seed + 2, 3, h, slots, width)
    seen = torch.arange(1, num + 1)[None]
    whole = COMPILED.attention(q, k, v, seen)
    few = kernels.round_up(stop, kernels.MIN_KEYS)
    other_k, other_v = (t[1:2, :, :few].clone().index_fill_(2, torch.arange(stop, few), float("nan")) for t in (k, v))
    alone = COMPILED.attention(q[1:2, start:stop], other_k, other_v, seen[:, start:stop])
    assert torch.equal(alone, whole[1:2, start:stop])
    assert torch.equal(COMPILED.attention(q[:, :, -1:], k[:, -1:], v[:, -1:], seen), whole[:, :, -1:])


@given(SEEDS, parts(), st.integers(1, 9), st.integers(1, 4), WIDTHS, st.integers(1, 20))
def test_rows_of_experts_do_not_depend_on_the_batch(seed, part, num_experts, num_slots, width, hidden):
    """A row's sum over experts has the same bits whatever the sizes of its experts' groups."""
    num, start, stop = part
    num_slots = min(num_slots, num_experts)
    x, gate_up, down = (
        drawn(seed, num, width),
        drawn(seed, num_experts, width, 2 * hidden),
        drawn(seed, num_experts, hidden, width),
    )
    experts = drawn(seed, num, num_experts).topk(num_slots).indices.sort(dim=-1).values
    weights = drawn(seed + 1, num, num_slots)
    whole = COMPILED.grouped_experts(x, experts, weights, gate_up, down)
    few = slice(start, stop)
    assert torch.equal(COMPILED.grouped_experts(x[few], experts[few], weights[few], gate_up, down), whole[few])


@pytest.mark.parametrize("name", sorted(GATES))
@given(
    seed=SEEDS,
    num=st.integers(1, 40),
    num_experts=st.sampled_from([16, 24, 40, 128]),
    step=st.sampled_from([0, 1, 200]),
)
def test_gates_are_torchs(name, seed, num, num_experts, step):
    """The chosen experts are torch's, equal logits included; weights to 2e-6 relative; a row alone is as in the whole.

    With a step logits are multiples of it: equal scores are then equal in both, others far apart, whatever their
    rounding; 200 apart, all but the largest score of a softmax are 0. A bias that is added to sigmoids makes ties that
    hang on it, so those are left to the row law.
    """
    gate = replace(GATES[name], num_groups=8 if GATES[name].num_groups > 1 else 1)
    logits = drawn(seed, num, num_experts)
    logits = step * (2 * logits).round() if step else logits
    bias = (2 * drawn(seed, num_experts)).round() if gate.score == "sigmoid" else None
    ours = compiled_gate(gate)
    ids, weights = gates.route(logits, 3, ours, bias)
    assert torch.equal(ids, gates.select(logits, 3, ours, bias))
    if not (step and gate.score == "sigmoid"):
        expected_ids = gates.select(logits, 3, gate, bias)
        assert torch.equal(ids, expected_ids)
    # A sum of some 40 exponentials of either rounding.
    torch.testing.assert_close(weights, gates.weigh(logits, ids, gate), rtol=2e-6, atol=0)
    alone = gates.route(logits[-1:], 3, ours, bias)
    assert torch.equal(alone[0], ids[-1:])
    assert torch.equal(alone[1], weights[-1:])


@given(
    seed=SEEDS,
    num_experts=st.sampled_from([5, 8, 16, 40]),
    num_slots=st.integers(1, 5),
    special=st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45]), max_size=8),
    group_score=st.sampled_from([None, "max", "top2_sum"]),
)
def test_selection_is_torchs_for_every_float(seed, num_experts, num_slots, special, group_score):
    """NaN counts as largest, infinities and zeros of either sign tie with their like, as in torch.topk.

    Groups are chosen likewise, where two of four hold all the slots: one with NaN comes first.
    """
    gate = GATES["softmax_after"]
    if group_score and num_experts % 4 == 0 and num_slots <= num_experts // 2:
        gate = replace(gate, num_groups=4, num_top_groups=2, group_score=group_score)
    logits = drawn(seed, 6, num_experts)
    draws = torch.Generator().manual_seed(seed)
    for value in special:
        row, expert = (int(torch.randint(n, (1,), generator=draws)) for n in logits.shape)
        logits[row, expert] = value
    assert torch.equal(gates.select(logits, num_slots, compiled_gate(gate)), gates.select(logits, num_slots, gate))


def test_exponentials_are_exact_to_a_unit_in_the_last_place():
    """1 / (1 + exp(-x)) to 3e-7 relative over all float32 exponents; 0 and 1 at the ends, NaN of NaN."""
    x = torch.linspace(-86, 86, 100_001)
    expected = 1 / (1 + (-x.double()).exp())
    assert ((COMPILED.sigmoid(x) - expected).abs() / expected).max() < 3e-7
    ends = COMPILED.sigmoid(torch.tensor([-1e4, -float("inf"), float("inf"), 1e4, float("nan"), 0.0]))
    assert ends[:4].tolist() == [0, 0, 1, 1]
    assert ends[4].isnan()
    assert ends[5] == 0.5


def test_the_probe_finds_nothing_broken():
    """The start-up check of a run holds for the compiled set."""
    assert kernels.probe(COMPILED) == []


def test_other_types_are_refused():
    """The kernels are float32's: a float64 tensor is an error that names the field, never read as something else."""
    with pytest.raises(ValueError, match=r"^compile: expected float32 tensors with compile: true, got torch\.float64$"):
        COMPILED.linear(torch.zeros(3, 8).double(), torch.zeros(8, 8).double())


def test_the_kernels_need_no_instruction_of_this_processor(tmp_path, monkeypatch):
    """They build and load without flags for the processor; without optimisation, in a third of the time."""
    monkeypatch.setattr(build, "NATIVE", ())
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    build.Library(build.build(tmp_path))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """One function in place of the kernels, which take seconds to build; what is built here is not called."""
    source = tmp_path / "tiny.cpp"
    source.write_text('#include <cstdint>\nextern "C" {\nvoid fo_tiny(int64_t threads, float* x) {}\n}\n')
    monkeypatch.setattr(build, "SOURCE", source)


@pytest.mark.usefixtures("tiny")
def test_the_sources_that_were_hashed_are_compiled(tmp_path, monkeypatch):
    """An edit after the hash does not get into the library that has the name of the sources before it."""
    run = build._run

    def edited(command):
        if "-o" in command:
            build.SOURCE.write_text("#error edited\n")
        return run(command)

    monkeypatch.setattr(build, "_run", edited)
    build.build(tmp_path / "cache")


@pytest.mark.usefixtures("tiny")
def test_a_build_is_found_again(tmp_path, monkeypatch):
    """A second build compiles nothing, and other flags are another library."""
    first = build.build(tmp_path)
    written = first.stat().st_mtime_ns
    commands = []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command: commands.append(command) or run(command))
    assert build.build(tmp_path) == first
    assert first.stat().st_mtime_ns == written
    assert len(commands) == 1
    assert "-E" in commands[0]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-inline"))
    other = build.build(tmp_path)
    assert other != first
    assert sorted(tmp_path.glob("*.so")) == sorted([first, other])


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("refused", "taken"), [("-march", "-mcpu=native"), ("-m", None)], ids=["no -march", "neither of them"]
)
def test_a_compiler_without_march_native_gets_the_flags_that_it_knows(tmp_path, monkeypatch, refused, taken):
    """As clang on some ARM machines; this stand-in drops -mcpu, which the one here may not know. CXX may have words."""
    compiler = tmp_path / "cxx"
    lines = ["#!/bin/sh", "args=", 'for one in "$@"; do case "$one" in']
    lines += [
        f'  {refused}*) echo "error: unknown argument $one" >&2; exit 1;;',
        "  -mcpu*) ;;",
        '  *) args="$args $one";;',
    ]
    compiler.write_text("\n".join([*lines, "esac; done", "exec c++ $args", ""]))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"sh {compiler}")

    path = build.build(tmp_path / "cache")

    assert build._flags(["sh", str(compiler)])[0][len(build.FLAGS) :] == ((taken,) if taken else ())
    build.Library(path)


@pytest.mark.usefixtures("tiny")
def test_processes_that_start_together_build_once(tmp_path, monkeypatch):
    """Of two that ask at the same time one compiles, and says so; the other waits, and both load the same library."""
    compiler, calls = tmp_path / "cxx", tmp_path / "calls"
    # A compiler that takes a second more: without a lock both processes are inside it at once.
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *kernels.so*) echo one >> {calls}; sleep 1;; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    logs = [tmp_path / name for name in ("one", "two")]
    both = [begin(lambda: build.Library(build.build(tmp_path / "cache")) and 0, log) for log in logs]
    assert [end(process) for process in both] == [0, 0], [log.read_text() for log in logs]
    assert calls.read_text().splitlines() == ["one"]
    assert "".join(log.read_text() for log in logs) == f"compile: building the C++ kernels with {compiler}, once\n"
    assert len(list((tmp_path / "cache").glob("*.so"))) == 1


@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"PATH": ""}, "none of g++, clang++, c++ on PATH"),
        ({"CXX": "no-such-compiler"}, "CXX=no-such-compiler, which is not there"),
    ],
)
def test_no_compiler_is_one_line(variables, got, monkeypatch, tmp_path):
    """Where no compiler is found the error is one line with the field, what was expected and what came."""
    monkeypatch.delenv("CXX", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    expected = f"compile: expected a C++ compiler for compile: true ($CXX, or one on PATH), got {got}"
    with pytest.raises(ConfigError) as caught:
        build.build(tmp_path)
    assert str(caught.value) == expected


def test_a_compiler_whose_words_cannot_be_told_apart_is_one_line(monkeypatch, tmp_path):
    """An open quote in $CXX is named with the field, and nothing is built."""
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(ConfigError, match=r"^compile: expected a C\+\+ compiler in \$CXX, got CXX=g\+\+ 'x \("):
        build.build(tmp_path)


def test_kernels_that_cannot_be_loaded_are_one_line(monkeypatch, tmp_path):
    """A cut file in the cache is named, with what mends it: `compile: auto` then takes torch's operators."""
    cut = tmp_path / "cut.so"
    cut.write_bytes(b"")
    monkeypatch.setattr(build, "build", lambda cache: cut)
    with pytest.raises(ConfigError) as caught:
        build.library.__wrapped__()
    wanted = f"compile: expected kernels that can be loaded, got: {cut}: file too short (once removed, they are built"
    assert str(caught.value).startswith(wanted)


def test_a_compiler_that_fails_is_one_line(monkeypatch, tmp_path):
    """A compiler that cannot build the sources is named, with its first complaint."""
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    with pytest.raises(ConfigError) as caught:
        build.build(tmp_path)
    assert str(caught.value).startswith(f"compile: expected {fake} to build the kernels")
    assert str(caught.value).endswith("got: x.cpp:1: error: no such thing")


class Rounded(Numerics):
    """Numerics whose products run one by one."""

    def output(self, x, site):
        return x.bfloat16().to(x)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_there_is_not_is_an_error(wrong: int):
    """Ids outside 0 to E - 1 are a ValueError that says so, in the experts and in the gate: they index raw memory."""
    ids, weights = torch.tensor([[0, wrong]]), torch.full((1, 2), 0.5)
    gate_up, down = torch.zeros(4, 8, 16), torch.zeros(4, 8, 8)
    for numerics in (EXACT, Rounded()):
        with pytest.raises(ValueError, match="experts: expected ids from 0 to 3"):
            COMPILED.grouped_experts(torch.zeros(1, 8), ids, weights, gate_up, down, numerics)
    with pytest.raises(ValueError, match="experts: expected ids from 0 to 3"):
        gates.weigh(torch.zeros(1, 4), ids, compiled_gate(GATES["qwen3"]))
