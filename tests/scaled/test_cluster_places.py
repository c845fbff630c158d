"""Laws of where ranks and engines stand: groups that exchange most share a machine; what cannot is refused or said."""

from __future__ import annotations

import functools
import logging
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.strict import ConfigError
from scaled.cluster import interface, ray_cluster
from scaled.cluster.ray_cluster import Place, by_node, places_of
from scaled.config import ScaledRun
from scaled.plan.division import check_places, machines_needed
from scaled.plan.feasibility import with_fields
from scaled.plan.summary import assumptions, make_plan
from scaled.units import Share, Unit, shares, unit_of
from tests.scaled import cluster_world


def recipe(*overrides: str) -> ScaledRun:
    config = load("configs/scaled/minirl/n8_r3.yaml", list(overrides), Schemas())
    assert isinstance(config, ScaledRun)
    return config


ROLES: tuple[ray_cluster.Role, ...] = ("rank", "engine")
COLOCATED = ("--cluster.placement", "colocated", "--rollout.num_engines", "16", "--rollout.tensor_parallel", "2")


@pytest.mark.parametrize("words", [(), COLOCATED, ("--training.expert_parallel", "2")], ids=["n8_r3", "shared", "ep2"])
def test_groups_share_a_bundle(words: tuple[str, ...]) -> None:
    """Every TP and EP group of the shipped layout, and every engine, is in one bundle, which Ray keeps on a machine."""
    config = recipe(*words)
    bundles, places = places_of(config, node_gpus=8)
    for size in (config.training.tensor_parallel, config.training.expert_parallel):
        for start in range(0, 32, size):
            assert len({places["rank", i].bundle for i in range(start, start + size)}) == 1
    for i in range(16):
        engine = places["engine", i]
        assert all(places["rank", r].bundle == engine.bundle for r in engine.shares)
        assert engine.num_gpus == (0 if words == COLOCATED else 2)
    used = [sum(p.num_gpus for p in places.values() if p.bundle == b) for b in range(len(bundles))]
    assert used == [bundle["GPU"] for bundle in bundles] and sum(used) == (32 if words == COLOCATED else 64)


def test_units_follow_the_order_of_machines() -> None:
    """Ray deals bundles to machines in any order: ranks go through them machine by machine, engines stay."""
    places = {("rank", i): Place(i // 2) for i in range(8)} | {("engine", 0): Place(4), ("engine", 1): Place(1)}
    found = by_node(places, ["b", "a", "b", "a", "c"], num_units=4)
    assert [found["rank", i].bundle for i in range(8)] == [0, 0, 2, 2, 1, 1, 3, 3]
    assert found["engine", 0].bundle == 4 and found["engine", 1].bundle == found["rank", 2].bundle


def test_full_machines_come_first() -> None:
    """A machine with one bundle of the ranks, beside two with two: neighbouring pairs of bundles share the two."""
    places = {("rank", i): Place(i) for i in range(5)}
    found = by_node(places, ["c", "a", "b", "b", "a", "c"], num_units=5)  # the sixth is an engine's
    assert [found["rank", i].bundle for i in range(5)] == [1, 4, 2, 3, 0]


def test_what_a_machine_cannot_hold() -> None:
    """A TP group larger than a machine is refused with both numbers; an EP group larger than one is said in a line."""
    with pytest.raises(ValueError, match=r"^training.tensor_parallel: expected .* machine of 2 GPUs, got 4$"):
        places_of(recipe(), node_gpus=2)
    said = "training.expert_parallel: groups of 8 ranks span machines of 4 GPUs, and so does their all-to-all"
    assert unit_of(recipe(), 8) == Unit(8) and unit_of(recipe(), 4) == Unit(4, (said,))


def test_context_groups_share_a_machine_where_they_fit() -> None:
    """TP x CP groups are whole within a bundle beside EP groups; larger ones than a machine are said in a line."""
    words = ("--training.tensor_parallel", "2", "--training.expert_parallel", "2", "--training.context_parallel")
    assert unit_of(recipe(*words, "4"), 8) == Unit(8) and unit_of(recipe(*words, "2"), 8) == Unit(4)
    said = "training.context_parallel: groups of 16 ranks span machines of 8 GPUs, and so does their exchange of keys "
    assert unit_of(recipe(*words, "8"), 8) == Unit(2, (f"{said}and values",))


@pytest.mark.parametrize(
    "sizes", [(4, 8, 1, 0), (4, 16, 1, 1), (2, 2, 8, 1), (4, 16, 4, 2)], ids=["fit", "ep", "cp", "both"]
)
def test_the_plan_says_what_the_start_says(sizes: tuple[int, int, int, int], caplog: pytest.LogCaptureFixture) -> None:
    """Groups that span machines, in the log of a start and among the plan's assumptions, a line for each kind."""
    tp, ep, cp, num = sizes
    config = recipe(
        "--training.tensor_parallel", str(tp), "--training.expert_parallel", str(ep),
        "--training.context_parallel", str(cp),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        places_of(config, config.cluster.gpus_per_node)
    planned = [line for line in assumptions(make_plan(config)) if " span machines of " in line]
    assert planned == [f"{line}, so training is slower than this." for line in caplog.messages]
    assert len(planned) == num


def test_a_plan_needs_no_ray() -> None:
    """A plan that speaks of machines imports no Ray, which may not be installed where one plans."""
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from firstorder.cli import main\n"
        "sys.exit(main(['plan', 'configs/scaled/minirl/n8_r3.yaml', '--json', '--training.expert_parallel', '16']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "groups of 16 ranks span machines of 8 GPUs" in done.stdout, done.stderr


def test_engines_too_wide_for_whole_groups_are_refused_by_the_plan_too() -> None:
    """TP groups of 4 and engines of 3 need 12 GPUs beside each other, on machines of 6."""
    words = ("--training.tensor_parallel", "4", "--rollout.tensor_parallel", "3", "--rollout.num_engines", "8")
    config = recipe("--cluster.placement", "colocated", "--cluster.gpus_per_node", "6", *words)
    with pytest.raises(ConfigError, match=r"^training.tensor_parallel: expected .* machine of 6 GPUs, got 12$"):
        check_places(config)


def packed(bundles: list[dict[str, float]], node_gpus: int, number: int) -> list[str] | None:
    """The machine of each bundle by Ray's PACK strategy on `number` free machines; None where they do not suffice."""
    left = sorted(range(len(bundles)), key=lambda b: (-bundles[b]["GPU"], -bundles[b]["CPU"]))
    nodes = [""] * len(bundles)
    for machine in range(number):
        free = float(node_gpus)
        for b in left.copy():
            if bundles[b]["GPU"] <= free:
                free -= bundles[b]["GPU"]
                nodes[b] = f"{machine:03}"
                left.remove(b)
    return None if left else nodes


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@settings(max_examples=max(300, settings().max_examples))
@given(
    SIZES, SIZES, SIZES, SIZES, st.integers(1, 5), st.integers(1, 12),
    st.sampled_from([4, 6, 8, 9, 16]), st.sampled_from(["separate", "colocated"]),
)  # fmt: skip
def test_the_plan_packs_as_the_start(
    tp: int, ep: int, cp: int, width: int, times: int, engines: int, node_gpus: int, placement: str
) -> None:
    """The start's bundles fit on as many machines as the plan says and on no fewer, and each machine then has the ranks
    and engines that the plan says, in the same order."""
    assume(tp <= node_gpus and width <= node_gpus)
    ranks = times * math.lcm(tp * cp, ep)
    engines = min(engines, ranks // width) if placement == "colocated" else engines
    assume(engines > 0)
    sizes = {"num_ranks": ranks, "tensor_parallel": tp, "expert_parallel": ep, "context_parallel": cp}
    config = with_fields(recipe(), "training", **sizes)
    config = with_fields(config, "rollout", num_engines=engines, tensor_parallel=width)
    config = with_fields(config, "cluster", placement=placement, gpus_per_node=node_gpus)
    try:
        bundles, places = places_of(config, node_gpus)
    except ConfigError:  # engines too wide for whole groups
        assume(False)
    need = machines_needed(config)
    assert packed(bundles, node_gpus, need - 1) is None
    nodes = packed(bundles, node_gpus, need)
    assert nodes is not None
    stands = by_node(places, nodes, 1 + max(place.bundle for (role, _), place in places.items() if role == "rank"))
    where = {role: Counter(nodes[p.bundle] for (kind, _), p in stands.items() if kind == role) for role in ROLES}
    order = list(dict.fromkeys(nodes[stands["rank", i].bundle] for i in range(ranks)))
    order += sorted(set(nodes) - set(order))
    planned = shares(config, node_gpus)
    assert [own for own in planned if own.ranks] == [
        Share(where["rank"][node], where["engine"][node]) for node in order if where["rank"][node]
    ]
    assert Counter(planned) == Counter(Share(where["rank"][node], where["engine"][node]) for node in order)


def fewest(units: int, engines: int, size: int, width: int, node_gpus: int) -> int:
    """The least number of machines that any packing of these takes."""

    @functools.cache
    def least(units: int, engines: int) -> int:
        if units <= 0 and engines <= 0:
            return 0
        # A machine with `own` units is best filled with engines.
        most = min(units, node_gpus // size) if units > 0 else 0
        some = range(0 if engines > 0 else most, most + 1)
        return 1 + min(least(units - own, engines - (node_gpus - own * size) // width) for own in some)

    return least(units, engines)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 13), st.integers(1, 13))
def test_no_packing_takes_fewer_machines_of_up_to_eight(
    node_gpus: int, size: int, width: int, units: int, engines: int
) -> None:
    """Ray's greedy packing loses nothing there; on 9 GPUs it may, as 6 units of 2 and 2 engines of 3 show."""
    assume(size <= node_gpus and width <= node_gpus)

    def taken(units: int, engines: int, size: int, width: int, node_gpus: int) -> int:
        ranks = {"num_ranks": units * size, "tensor_parallel": size, "expert_parallel": 1, "context_parallel": 1}
        config = with_fields(with_fields(recipe(), "training", **ranks), "cluster", placement="separate")
        return len(shares(with_fields(config, "rollout", num_engines=engines, tensor_parallel=width), node_gpus))

    assert taken(units, engines, size, width, node_gpus) == fewest(units, engines, size, width, node_gpus)
    assert (taken(6, 2, 2, 3, 9), fewest(6, 2, 2, 3, 9)) == (3, 2)


def test_units_that_do_not_fill_machines_need_more_of_them() -> None:
    """TP groups of 4 on machines of 6 GPUs stand one on each: three need three machines, though 12 GPUs are two."""
    words = ("--training.tensor_parallel", "4", "--training.expert_parallel", "4", "--training.num_ranks", "12",
             "--rollout.num_engines", "6", "--cluster.placement", "colocated", "--cluster.gpus_per_node", "6",
             "--cluster.num_nodes")  # fmt: skip
    check_places(recipe(*words, "3"))
    with pytest.raises(ConfigError) as refusal:
        check_places(recipe(*words, "2"))
    assert str(refusal.value).startswith(
        "cluster.num_nodes: expected at least 3 machines of 6 GPUs for 12 ranks and 6 engines of 2, colocated, as "
        "units of 4 ranks and engines are whole on a machine, got 2; "
    )


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_engines_need_not_fill_a_machine(placement: str) -> None:
    """An engine of 4 on a machine of 6 GPUs leaves 2 to a unit of ranks, or to nobody where it lies over ranks; one of
    8 is refused."""
    words = ("--training.tensor_parallel", "2", "--training.expert_parallel", "2", "--training.num_ranks", "8",
             "--rollout.num_engines", "2", "--cluster.placement", placement, "--cluster.gpus_per_node", "6",
             "--cluster.num_nodes", "3", "--rollout.tensor_parallel")  # fmt: skip
    config = recipe(*words, "4")
    check_places(config)
    separate = [Share(4, 0), Share(2, 1), Share(2, 1)]
    assert Counter(shares(config, 6)) == Counter(separate if placement == "separate" else [Share(4, 1)] * 2)
    with pytest.raises(ConfigError) as refusal:
        check_places(recipe(*words[:7], "1", *words[8:], "8"))
    assert str(refusal.value) == (
        "rollout.tensor_parallel: expected at most cluster.gpus_per_node = 6, so that no engine spans two machines, "
        "got 8"
    )


def test_colocated_engines_lie_over_the_ranks_gpus() -> None:
    """Engine i of width 2 shares the GPUs of ranks 2i and 2i + 1; more engines than that are refused."""
    _, places = places_of(recipe(*COLOCATED), node_gpus=8)
    assert all(places["engine", i].shares == (2 * i, 2 * i + 1) for i in range(16))
    raw = recipe(*COLOCATED).model_dump()
    raw["rollout"]["num_engines"] = 17
    with pytest.raises(ValueError, match=r"rollout.num_engines: expected at most .* 32 GPUs .* = 34"):
        places_of(ScaledRun.model_validate(raw), node_gpus=8)


def test_the_interface_of_the_config_is_used(tmp_path: Path) -> None:
    """A name that this machine has not is one line; a name's address is where the ranks' store would listen."""
    raw = cluster_world.config().model_dump()
    raw["cluster"]["interface"] = "nowhere0"
    known = interface.addresses()
    with (
        pytest.raises(ValueError, match=r"cluster.interface: expected an interface .*, got nowhere0"),
        ray_cluster.cluster(ScaledRun.model_validate(raw), tmp_path),
    ):
        pass
    for name, address in known.items():
        with interface.listening(interface.address_of(name)) as made:
            assert made.getsockname()[0] == address
        assert interface.variables(name, True) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    assert interface.variables(None, False) == {}
    assert known[interface.variables(None, True)["GLOO_SOCKET_IFNAME"]] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"cluster.interface: cannot listen on 203.0.113.1"):
        interface.listening("203.0.113.1")
