"""The decoder's chain of equal bits (alone == batch, prefill == decode, padded == not), its formulas, its gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from sandbox.kernels.numerics import Numerics
from sandbox.model import KVCache, ModelConfig, MoE
from theory.routing.gates import GATES, Gate, weigh
from theory.routing.replay import NaturalRouting
from theory.streams import stream

BASE = ModelConfig(
    vocab_size=41, hidden_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, max_positions=256,
    num_experts=6, experts_per_token=2, expert_size=20, dense_size=28, dense_layers=(1,),
)  # fmt: skip
CONFIGS = {
    "qwen3": BASE,
    "dense": replace(BASE, dense_layers=(0, 1, 2), num_experts=0),
    "olmoe": replace(BASE, gate=GATES["olmoe"], qk_norm="projection", dense_layers=(), head_dim=6),
    "mixtral": replace(BASE, qk_norm="none", dense_layers=(), num_kv_heads=4, tied_head=True),
    "shared": replace(BASE, shared_expert_size=10, shared_expert_gate=True, gate=GATES["softmax_after"]),
    "groups": replace(BASE, shared_expert_size=10, gate=Gate("softmax", "before", False, 2.0, 3, 2)),
    "sigmoid": replace(BASE, num_experts=8, gate=GATES["moonlight"]),
    "wide": replace(BASE, hidden_size=64, head_dim=16, num_experts=16, expert_size=64, experts_per_token=4),
}


def build(name: str) -> MoE:
    return MoE(CONFIGS[name], stream(0, "test_model", name))


def tokens(B: int, S: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(BASE.vocab_size, (B, S), generator=stream(seed, "tokens", B, S))


class Recorder(NaturalRouting):
    """Natural routing that keeps what it was asked and what it answered."""

    def __init__(self):
        self.calls = []

    def route(self, layer_number, hidden_ND, logits_NE, num_slots, gate, selection_bias_E=None):
        experts_NK, weights_NK = super().route(layer_number, hidden_ND, logits_NE, num_slots, gate, selection_bias_E)
        self.calls.append((layer_number, hidden_ND, logits_NE, experts_NK, weights_NK))
        return experts_NK, weights_NK


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_alone_equals_itself_in_a_batch(name):
    """Logits of a sequence have the same bits alone, in a batch of 3 and in one of 37."""
    model, t = build(name), tokens(37, 29)
    with torch.no_grad():
        whole = model(t)
        for rows in ((0,), (36,), (5, 6, 7)):
            assert torch.equal(model(t[list(rows)]), whole[list(rows)])


@pytest.mark.parametrize("name", CONFIGS)
def test_right_padding_changes_no_bit(name):
    """Neither later tokens nor the length of the padding reach a position's logits: prefix == whole."""
    model, t = build(name), tokens(3, 150)
    with torch.no_grad():
        whole = model(t)
        for S in (1, 2, 7, 8, 15, 16, 17, 130):
            assert torch.equal(model(t[:, :S]), whole[:, :S])
            padded = F.pad(t[:, :S], (0, 5))
            assert torch.equal(model(padded)[:, :S], whole[:, :S])


@pytest.mark.parametrize("name", ["qwen3", "sigmoid", "shared"])
def test_gradient_passes_have_the_bits_of_inference(name):
    """The forward pass computes the same bits with and without a graph: pi equals old before the first update."""
    model, t = build(name), tokens(5, 19)
    with torch.no_grad():
        without = model(t)
    assert torch.equal(model(t).detach(), without)


def test_initial_weights_come_from_the_generator_alone():
    """Same stream, same bits, whatever the global generator does; logits start at unit scale, tied head or not."""
    one = build("wide")
    torch.randn(3)
    two = build("wide")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    for config in (CONFIGS["wide"], replace(CONFIGS["wide"], tied_head=True)):
        with torch.no_grad():
            spread = MoE(config, stream(1, "init"))(tokens(8, 32)).std().item()
        assert (
            0.7 < spread < 1.4
        )  # a standard deviation of 1 in expectation; a draw of 64 x 41 weights strays by a few %


def test_routing_is_asked_with_flat_rows_and_decoder_layer_numbers():
    """Each MoE layer asks once, by its decoder index, with B S rows, batch-major; dense layers never ask."""
    model, t = build("qwen3"), tokens(4, 7)
    routing, alone = Recorder(), Recorder()
    with torch.no_grad():
        model.forward_hidden(t, routing)
        model.forward_hidden(t[2:3], alone)
    assert [call[0] for call in routing.calls] == [0, 2] == list(model.config.moe_layers)
    for (_, hidden, logits, *_), (_, hidden_alone, logits_alone, *_) in zip(routing.calls, alone.calls, strict=True):
        assert torch.equal(hidden[14:21], hidden_alone)
        assert torch.equal(logits[14:21], logits_alone)
    router = next(model.router_parameters())
    torch.testing.assert_close(routing.calls[0][2], routing.calls[0][1] @ router.T)


class Fixed(NaturalRouting):
    """Replays given experts, with weights of one's own: what the layer does with them is then a formula."""

    def __init__(self, experts_NK, weights_NK):
        self.experts_NK, self.weights_NK = experts_NK, weights_NK

    def route(self, layer_number, hidden_ND, logits_NE, num_slots, gate, selection_bias_E=None):
        return self.experts_NK, self.weights_NK


@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert_is_the_qwen2_moe_formula(gated):
    """y = sum_k w_k f_k(x) + sigmoid(x . g) f_shared(x), without the sigmoid where there is no gate."""
    config = replace(BASE, num_layers=1, dense_layers=(), shared_expert_size=10, shared_expert_gate=gated)
    model = MoE(config, stream(3, "shared"))
    mlp, x = model.layers[0].mlp, torch.randn(9, 24, generator=stream(0, "x"))

    def swiglu(x, gate_up_OD, down_DF):
        gate, up = (x @ gate_up_OD.T).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ down_DF.T

    experts, weights = torch.tensor([[1, 4]]).expand(9, 2), torch.tensor([[0.25, 0.5]]).expand(9, 2)
    expected = sum(
        w * swiglu(x, mlp.gate_up[e].T, mlp.down[e].T) for e, w in zip((1, 4), (0.25, 0.5), strict=True)
    ) + swiglu(x, mlp.shared.gate_up, mlp.shared.down) * (torch.sigmoid(x @ mlp.shared_gate.T) if gated else 1)
    shared = model.prepare(torch.arange(9)[None], Fixed(experts, weights), Numerics(), None)
    torch.testing.assert_close(mlp(x, shared), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "olmoe", "mixtral", "shared", "groups", "sigmoid"])
def test_gradients_equal_finite_differences(name):
    """In float64, with the experts held fixed, every parameter's gradient is the slope along a drawn direction."""
    model, t = build(name).double(), tokens(2, 5)
    recorder = Recorder()
    weights = torch.randn(2, 5, 41, generator=stream(0, "loss"), dtype=torch.float64)
    model(t, recorder)
    experts = {call[0]: call[3] for call in recorder.calls}

    class Replay(NaturalRouting):
        def route(self, layer_number, hidden_ND, logits_NE, num_slots, gate, selection_bias_E=None):
            return experts[layer_number], weigh(logits_NE, experts[layer_number], gate)

    def loss():
        return (model(t, Replay()) * weights).sum()

    gradients = torch.autograd.grad(loss(), list(model.parameters()))
    generator, step = stream(1, "directions"), 1e-5
    for (key, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter += step * direction
            above = loss()
            parameter -= 2 * step * direction
            below = loss()
            parameter += step * direction
        slope, expected = (gradient * direction).sum().item(), (above - below).item() / (2 * step)
        # Central differences: error of order step^2 in the third derivative, and 1e-16 / step in rounding.
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-6), key
        if "router" in key:
            assert gradient.abs().max() > 0


def test_numerics_touch_every_site():
    """Each hook is called where it says, once a layer, and a defect there changes the logits."""

    class Counting(Numerics):
        def __init__(self):
            self.seen = []

        def activation(self, x, site):
            self.seen.append(("in", site))
            return x

        def output(self, x, site):
            self.seen.append(("out", site))
            return x

        def kv(self, k_BSHd, v_BSHd):
            self.seen.append(("kv", "kv"))
            return k_BSHd, v_BSHd

        def router_logits(self, layer_number, logits_NE):
            self.seen.append(("router", layer_number))
            return logits_NE

    model, t, counting = build("shared"), tokens(2, 5), Counting()
    with torch.no_grad():
        assert torch.equal(model(t, numerics=counting), model(t))
    mlp = [("in", "gate_up"), ("out", "gate_up"), ("in", "down"), ("out", "down")]

    def layer(number):
        attention = [("in", "qkv"), ("out", "qkv"), ("kv", "kv"), ("in", "o"), ("out", "o")]
        if number == 1:
            return attention + mlp
        router = [("in", "router"), ("out", "router"), ("router", number)]
        return attention + router + mlp + mlp + [("in", "shared_gate"), ("out", "shared_gate")]

    assert counting.seen == layer(0) + layer(1) + layer(2) + [("in", "head"), ("out", "head")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads.*2.*5"),
        ({"head_dim": 7}, "head_dim.*7"),
        ({"hidden_size": 0}, "hidden_size.*1.*0"),
        ({"dense_layers": (3,)}, r"dense_layers.*3\).*3"),
        ({"dense_layers": (1, 0)}, "ascending"),
        ({"dense_size": 0}, "dense_size.*1 dense.*0"),
        ({"experts_per_token": 7}, "experts_per_token.*6.*7"),
        ({"num_experts": 0}, "num_experts.*2 MoE.*0"),
        ({"shared_expert_gate": True}, "shared_expert_size.*0"),
        ({"num_experts": 9, "gate": Gate("softmax", "before", False, 1.0, 2, 1)}, "2 groups.*9"),
    ],
)
def test_config_says_what_is_wrong(changes, message):
    """A config that cannot be built is a ValueError with the field, what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


def test_forward_says_what_is_wrong():
    """Tokens outside the vocabulary, positions outside model or cache, gradients: each one line with numbers."""
    model = build("qwen3")
    with pytest.raises(ValueError, match=r"\[0, 41\), got 41"):
        model(torch.tensor([[1, 41]]))
    with pytest.raises(ValueError, match=r"\[0, 41\), got -1"):
        model(torch.tensor([[-1, 3]]))
    with pytest.raises(ValueError, match=r"\[0, 256\), got 0 to 256"):
        model(tokens(1, 257))
    cache = KVCache(model.config, 2, 16)
    with pytest.raises(ValueError, match="no_grad"):
        model(tokens(2, 3), cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="3 rows in the cache, got 2"):
            model(tokens(3, 3), cache=cache)
        with pytest.raises(ValueError, match=r"16 tokens.*got 17"):
            model(tokens(2, 17), cache=cache)
        model(tokens(2, 3), cache=cache)
        with pytest.raises(ValueError, match=r"at most \[3, 3\], got \[4, 1\]"):
            cache.truncate(torch.tensor([4, 1]))
