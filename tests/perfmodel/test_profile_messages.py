"""Times of messages, against an emulated network whose numbers are known."""

import pytest

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.perfmodel.cost.wires import Wires
from halograd.perfmodel.machine import LEVELS, Machine
from halograd.perfmodel.profile import cache, device, messages
from halograd.perfmodel.profile.device import group_sizes, measure_machine
from halograd.perfmodel.profile.messages import (
    Nodes,
    fit_channel,
    fit_face,
    fit_reduction,
    fit_reduction_behind,
)
from halograd.perfmodel.profile.record import Profile
from tests.support.clock import network_clock

ALPHA, BETA = 1e-2, 2e-8
SIZES = (8, 100_000, 1_000_000)
ROUNDS = 2


def test_partners_are_mutual_and_on_the_right_node():
    places = Nodes(("a", "a", "a", "b", "b"))
    assert [places.partner(r, "node") for r in range(5)] == [1, 0, None, 4, 3]
    assert [places.partner(r, "across") for r in range(5)] == [3, 4, None, 0, 1]
    assert places.fullest == 3
    assert places.has("node") and places.has("across")
    alone = Nodes(("a",))
    assert not alone.has("node") and not alone.has("across")
    assert Nodes(("a", "b", "c")).partner(2, "across") is None


def test_groups():
    assert [group_sizes(n) for n in (1, 2, 3, 8)] == [[], [2], [2, 3], [2, 4, 8]]


@pytest.fixture
def clock(monkeypatch):
    """The network and who measures it, computation included, by a clock that the test drives."""
    made = network_clock(monkeypatch).drive(monkeypatch, cache, device)
    monkeypatch.setattr(messages, "_compute", made.sleep)
    return made


@pytest.fixture
def network(comm, clock):
    with Communicator(comm, f"emulated:alpha={ALPHA},beta={BETA}") as made:
        yield made


def assert_found(fit, alpha, beta):
    """But for readings of the clock, some 10 us."""
    assert fit.alpha == pytest.approx(alpha, rel=5e-3)
    assert fit.beta == pytest.approx(beta, rel=5e-3)
    assert fit.error < 5e-3


@pytest.mark.ranks(2)
def test_messages_of_an_emulated_network(network, clock):
    assert_found(fit_channel(network, 1 - network.rank, SIZES, ROUNDS, clock.perf_counter), ALPHA, BETA)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strided", [False, True], ids=["rows", "columns"])
def test_faces_of_an_emulated_network(network, strided, clock):
    assert_found(fit_face(network, 1 - network.rank, strided, SIZES, ROUNDS, clock.perf_counter), ALPHA, BETA)


@pytest.mark.ranks(2, 3)
def test_sums_of_an_emulated_network(network, clock):
    """A ring: 2 (P - 1) messages of a P-th of the bytes."""
    p = network.size
    waited = fit_reduction(network, SIZES, ROUNDS, clock=clock.perf_counter)
    assert_found(waited, 2 * (p - 1) * ALPHA, 2 * (p - 1) / p * BETA)
    arrival, exposed = fit_reduction_behind(network, waited, SIZES, clock=clock.perf_counter)
    assert_found(arrival, waited.alpha, waited.beta)
    assert exposed.at(SIZES[-1]) < 1e-3 * waited.at(SIZES[-1]), "it arrived behind the computation"


@pytest.mark.ranks(3)
def test_who_has_no_partner_looks_on(network, clock):
    partner = (1, 0, None)[network.rank]
    fit = fit_channel(network, partner, (8, 1000), 1, clock.perf_counter)
    assert network.allgather_objects(fit) == [fit] * 3
    assert_found(fit_face(network, partner, True, (8, 100_000), ROUNDS, clock.perf_counter), ALPHA, BETA)


@pytest.mark.ranks(1, 2)
def test_a_machine_is_measured_and_saved(comm, tmp_path):
    with Communicator(comm, "auto") as ranks, get_backend("numpy") as kernels:
        found = measure_machine(ranks, kernels, "mine")
        assert ranks.allgather_objects(found.to_dict()) == [found.to_dict()] * comm.size
    machine = found.machine
    assert machine.devices_per_node == comm.size and set(machine.links) == set(LEVELS)
    assert machine.peak_flops["float32"] > 0 and machine.peak_flops["float64"] > 0
    assert machine.memory > 1 << 20 and machine.memory_bandwidth > 0 and machine.launch > 0
    assert machine.links["switch"].note == "not measured: copied from " + ("node" if comm.size > 1 else "device")
    assert sorted(found.reduction) == sorted(found.reduction_exposed) == ([2] if comm.size == 2 else [])
    assert ("node" in found.face) is (comm.size == 2)
    found.save(tmp_path / "mine.toml")
    assert Machine.load(tmp_path / "mine.toml") == machine
    assert Profile.load(tmp_path / "mine.toml") == found


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("node", [1, 2])
def test_a_machine_with_an_emulated_network_is_measured_node_by_node(comm, node, clock):
    """The network is between nodes, bare: what packing takes is added by the model. Within them is shared memory."""
    alpha, transport = 1e-3, f"emulated:alpha=1e-3,beta=1e-8,node={node}"
    with Communicator(comm, transport) as ranks, get_backend("numpy") as kernels:
        found = measure_machine(ranks, kernels, "mine").with_overheads(0.0, 0.0)
        nodes, waits = len(set(ranks.nodes)), ranks.waits_for_network
    wires, links = Wires(found.machine), found.machine.links
    assert (wires.emulated, wires.waits_for_network, wires.per_node) == (waits, waits, node)
    assert found.machine.nodes_per_switch == (nodes if node > 1 else 1)
    if waits:
        level = "node" if node == 1 else "across"
        assert links[level] == found.channel[level].link(transport) and links["across"].alpha == pytest.approx(
            alpha, rel=0.02
        )
        assert wires.sum(8, (0, comm.size - 1)) == pytest.approx(2 * alpha, rel=0.02)
    if node > 1:
        assert links["node"].note.startswith("shared, with packing") and links["node"].alpha < alpha
