"""Tests of measured message times on an emulated network with known parameters, and of line fits."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.perfmodel.cost.network_model import NetworkModel
from halograd.perfmodel.machine import LEVELS, Machine
from halograd.perfmodel.profile import cache, device, messages
from halograd.perfmodel.profile.device import group_sizes, measure_machine
from halograd.perfmodel.profile.messages import MessageTimer, Nodes
from halograd.perfmodel.profile.record import Fit, Profile, fit_line
from halograd.schema import build
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


def test_a_time_is_the_median_over_rounds_of_the_slowest_rank():
    """Rows are rounds, columns are sizes; a single disturbed round does not count, nor does a single lucky one."""
    rounds = np.array([[1.0, 5.0], [3.0, 5.0], [2.0, 50.0]])
    ranks = SimpleNamespace(allgather_objects=lambda seconds: [seconds, [[1.0, 6.0], [1.0, 4.0], [1.0, 1.0]]])
    assert messages._slowest(ranks, rounds).tolist() == [2.0, 6.0]


@pytest.fixture
def clock(monkeypatch):
    """Return the clock that the test drives for the network, its measurement and computation."""
    made = network_clock(monkeypatch).drive(monkeypatch, cache, device)
    monkeypatch.setattr(messages, "_compute", made.sleep)
    return made


@pytest.fixture
def network(comm, clock):
    with Communicator(comm, f"emulated:alpha={ALPHA},beta={BETA}") as made:
        yield made


def assert_found(fit, alpha, beta):
    """Assert that a fit has these parameters, up to about 10 us for readings of the clock."""
    assert fit.alpha == pytest.approx(alpha, rel=5e-3)
    assert fit.beta == pytest.approx(beta, rel=5e-3)
    assert fit.error < 5e-3


@pytest.mark.ranks(2)
def test_messages_of_an_emulated_network(network, clock):
    assert_found(MessageTimer(network, SIZES, ROUNDS, clock.perf_counter).channel(1 - network.rank), ALPHA, BETA)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strided", [False, True], ids=["rows", "columns"])
def test_faces_of_an_emulated_network(network, strided, clock):
    timer = MessageTimer(network, SIZES, ROUNDS, clock.perf_counter)
    assert_found(timer.face(1 - network.rank, strided), ALPHA, BETA)


@pytest.mark.ranks(2, 3)
def test_sums_of_an_emulated_network(network, clock):
    """Few bytes are summed by recursive doubling, many by a ring: two lines, except for two ranks, where doubling wins.
    """
    p, sizes = network.size, (8, 40_000, 1_000_000, 4_000_000)
    timer = MessageTimer(network, sizes, ROUNDS, clock.perf_counter)
    waited = timer.reduction()
    arrival, exposed = timer.reduction_behind(waited)
    for fit in (waited, arrival):
        if p == 2:
            assert_found(fit, ALPHA, BETA)
            assert fit.short is None
        else:
            assert_found(fit, 2 * (p - 1) * ALPHA, 2 * (p - 1) / p * BETA)
            assert_found(fit.short, 3 * ALPHA, 3 * BETA)
    assert exposed.at(sizes[-1]) < 1e-3 * waited.at(sizes[-1]), "it arrived behind the computation"
    record = build(Fit, waited.to_dict())
    assert record == waited and record.at(8) == pytest.approx({2: ALPHA, 3: 3 * ALPHA}[p], rel=5e-3)


@pytest.mark.ranks(3)
def test_who_has_no_partner_looks_on(network, clock):
    partner = (1, 0, None)[network.rank]
    fit = MessageTimer(network, (8, 1000), 1, clock.perf_counter).channel(partner)
    assert network.allgather_objects(fit) == [fit] * 3
    timer = MessageTimer(network, (8, 100_000), ROUNDS, clock.perf_counter)
    assert_found(timer.face(partner, True), ALPHA, BETA)


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
def test_a_machine_with_an_emulated_network_is_measured_node_by_node(comm, node, clock, monkeypatch):
    """An emulated network between nodes is measured without packing, which the model adds; nodes share memory."""
    monkeypatch.setattr(device, "LARGE", ())
    alpha, transport = 1e-3, f"emulated:alpha=1e-3,beta=1e-8,node={node}"
    with Communicator(comm, transport) as ranks, get_backend("numpy") as kernels:
        found = measure_machine(ranks, kernels, "mine").with_overheads(0.0, 0.0)
        nodes, waits = len(set(ranks.nodes)), ranks.waits_for_network
    network_model, links = NetworkModel(found.machine), found.machine.links
    assert (network_model.emulated, network_model.waits_for_network, network_model.per_node) == (waits, waits, node)
    assert found.machine.nodes_per_switch == (nodes if node > 1 else 1)
    if waits:
        level = "node" if node == 1 else "across"
        assert links[level] == found.channel[level].link(transport) and links["across"].alpha == pytest.approx(
            alpha, rel=0.02
        )
        assert network_model.sum(8, (0, comm.size - 1)) == pytest.approx(alpha, rel=0.02)
    if node > 1:
        assert links["node"].note.startswith("shared, with packing") and links["node"].alpha < alpha


ALPHAS, BETAS = st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7)


@given(alpha=ALPHAS, beta=BETAS)
def test_exact_lines_are_found(alpha, beta):
    times = [alpha + beta * n for n in messages.SIZES]
    fit = fit_line(messages.SIZES, times)
    assert fit.error < 1e-6
    for n, t in zip(messages.SIZES, times):
        assert math.isclose(fit.at(n), t, rel_tol=1e-6)


@given(alpha=st.floats(1e-6, 1e-3), beta=st.floats(1e-10, 1e-8), seed=st.integers(0, 100))
def test_noise_of_five_percent_is_survived(alpha, beta, seed):
    sizes = np.array([8, 64, 512, 4096, 32768, 2**18, 2**21, 2**23, 2**24, 2**25])
    noise = 1 + 0.05 * np.random.default_rng(seed).uniform(-1, 1, len(sizes))
    fit = fit_line(sizes, (alpha + beta * sizes) * noise)
    assert fit.error < 0.06
    # Where a number decides the times at all, it is found.
    if beta * sizes[0] < 0.01 * alpha:
        assert fit.alpha == pytest.approx(alpha, rel=0.1)
    if beta * sizes[-1] > 30 * alpha:
        assert fit.beta == pytest.approx(beta, rel=0.1)


def test_one_disturbed_size_does_not_bend_the_line():
    alpha, beta = 2e-4, 1e-9
    times = [alpha + beta * n for n in messages.SIZES]
    times[3] *= 10
    fit = fit_line(messages.SIZES, times)
    assert fit.alpha == pytest.approx(alpha, rel=0.05)
    assert fit.beta == pytest.approx(beta, rel=0.05)
    assert fit.error > 0.1, "and the error says that something was wrong"


def test_neither_number_is_negative():
    falling = fit_line([1, 1000, 100_000], [3e-6, 2e-6, 1e-6])
    assert falling.beta == 0 and falling.alpha > 0
    steep = fit_line([1000, 2000, 4000], [1e-6, 3e-6, 9e-6])
    assert steep.alpha == 0 and steep.beta > 0


@pytest.mark.parametrize(("sizes", "times"), [([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 9], [1.0, 0.0])])
def test_what_makes_no_line_is_refused(sizes, times):
    with pytest.raises(ValueError, match="expected positive times of at least two sizes"):
        fit_line(sizes, times)


def test_a_fit_is_read_back_and_becomes_a_link():
    fit = fit_line(messages.SIZES, [1e-6 + 1e-9 * n for n in messages.SIZES])
    assert build(Fit, fit.to_dict()) == fit
    link = fit.link("auto")
    assert (link.alpha, link.beta) == (fit.alpha, fit.beta)
    assert link.note == "auto; fit within 0%"
