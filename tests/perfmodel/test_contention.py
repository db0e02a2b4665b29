"""Tests of shared links, collectives of a library, and stragglers: by hand, and that they only slow steps down."""

from __future__ import annotations

import dataclasses
import math

import pytest

from halograd.errors import UserError
from halograd.layers import Strategy
from halograd.models import mesh
from halograd.perfmodel.collectives import library_seconds
from halograd.perfmodel.cost import NetworkModel, Training, simulate
from halograd.perfmodel.machine import (
    FOLDER,
    Efficiency,
    Link,
    Machine,
    Protocol,
    Topology,
    Variation,
    expected_maximum,
)
from halograd.perfmodel.profile.device import spread
from halograd.program.traffic import Move

from .pricing import cut, priced

#: Two devices per node, two nodes per switch; messages of n bytes take ``1 + n / 8`` [s] between nodes.
LINKS = {"device": Link(0.0, 0.0), "node": Link(0.5, 1 / 4), "switch": Link(1.0, 1 / 8), "across": Link(1.0, 1 / 8)}
MACHINE = Machine("small", "made up", 2, 2, {"float32": 1e9}, 1e9, 2**30, 0.0, LINKS)


def test_expected_maximum_of_normal_variables() -> None:
    found = [expected_maximum(n) for n in (1, 2, 3, 1000)]
    assert found == pytest.approx([0.0, 1 / math.sqrt(math.pi), 1.5 / math.sqrt(math.pi), 3.24144], abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "nbytes", "ranks", "nodes", "groups", "seconds"),
    [
        ("allreduce", 80, 8, 4, 1, (1 + 2 * (1 * 2 + 2 * 3) + 80 / 8, 80 / 8)),  # the tree
        ("allreduce", 80, 8, 4, 2, (1 + 2 * (1 * 2 + 2 * 3) + 2 * 80 / 8, 2 * 80 / 8)),
        ("allreduce", 160, 2, 1, 1, (2 * 4 + 160 / 40, 160 / 40)),  # larger than trees may be: the ring in a node
        ("all_gather", 160, 4, 2, 1, (3 * 5 + 160 * 0.75 / 20, 160 * 0.75 / 20)),
    ],
)
def test_collectives_of_a_library(kind, nbytes, ranks, nodes, groups, seconds) -> None:
    tree = Protocol("tree", node=2.0, network=3.0, node_bandwidth=8.0, bandwidth=8.0, start=1.0, most=100)
    ring = Protocol("ring", node=4.0, network=5.0, node_bandwidth=40.0, bandwidth=20.0)
    assert library_seconds(kind, nbytes, ranks, nodes, [tree, ring], groups) == pytest.approx(seconds)
    assert library_seconds("all_gather", 8, 4, 2, [tree]) is None


@pytest.mark.parametrize(
    ("nbytes", "ranks", "nodes", "groups", "seconds"),
    [
        (80, 12, 4, 1, 2 * 8 * (1 / 20 + 2 / 10)),  # fewer than four chunks of 16 B per hop and channel
        (800, 12, 4, 2, 2 * 2 * 16 * (1 / 20 + 2 / 10)),  # sums of two groups take turns
        (8000, 4, 4, 1, 2 * 64 * 1 / 10),  # many chunks; the first hop is a part of the transfer
        (4, 3, 1, 1, 2 * 2 * 1 / 20),  # one chunk per channel
    ],
)
def test_trees_pass_chunks_on(nbytes, ranks, nodes, groups, seconds) -> None:
    """Chunks take time at every hop, which the choice of a protocol does not count."""
    whole = Protocol("tree", node=0.0, network=0.0, node_bandwidth=20.0, bandwidth=10.0)
    tree = dataclasses.replace(whole, channels=2, chunk=64, least_chunk=4)
    plain, busy = library_seconds("allreduce", nbytes, ranks, nodes, [whole], groups)
    ring = Protocol("ring", node=0.0, network=0.0, node_bandwidth=1.0, bandwidth=1.0, start=plain)
    assert library_seconds("allreduce", nbytes, ranks, nodes, [ring, tree], groups) == (plain + seconds, busy)


def test_stages_share_links() -> None:
    """Eight ranks: two per node, two nodes per switch, two switches."""
    inner, nodes, switches = dataclasses.replace(MACHINE, topology=Topology(1, 0.0, 4.0)).stages(range(8))
    assert inner.link.beta == 2 / 4  # both devices send over one link
    assert (nodes.link.beta, switches.link.beta) == (1 / 8, 1 / 4)  # both nodes of a switch use its links: 4 B/s each
    (one,) = dataclasses.replace(MACHINE, topology=Topology()).stages([0, 2], groups=2)
    assert one.link.beta == 2 / 8
    tapered = dataclasses.replace(MACHINE, topology=Topology(0, 10.0, 4.0))
    nodes, switches = tapered.stages(range(0, 8, 2), groups=2)  # another group has the other devices of these nodes
    assert (nodes.link.beta, switches.link.beta) == (2 / 10, 2 / 4)
    found = dataclasses.replace(MACHINE, topology=Topology(network=10.0)).stages(range(4))
    assert [(s.sharing, s.link.beta) for s in found] == [(2, 1 / 4), (1, 1 / 10)]


@pytest.mark.parametrize(
    ("topology", "seconds", "busy"),
    [
        (None, 1.5 + 32 / 4 + 32 / 8, 0.0),  # the second rank sends within its node, then to the next node
        (Topology(), 1.5 + 32 / 4 + 32 / 8, 32 / 8),
        (Topology(network=2.0), 1.0 + 32 / 2, 32 / 2),
        (Topology(node_links=1), 1.5 + 2 * 32 / 4, 32 / 8),  # both devices of a node send over one link
    ],
)
def test_messages_share_links(topology, seconds, busy) -> None:
    """Sixteen rows of 32 B over four ranks, which exchange one row with each neighbor."""
    blocks = cut((1, 16, 8, 1), (1, 1, 4, 1, 1, 1))
    needed = blocks.map(None, lambda a, b: (max(0, a - 1), min(16, b + 1)), None, None)
    found = NetworkModel(dataclasses.replace(MACHINE, topology=topology)).exchange(Move(blocks, needed, 4))
    assert (found.seconds, found.busy, found.peers) == (seconds, busy, 2)


def step(machine: Machine, ranks: int = 16, parts: tuple[int, int] = (4, 4)) -> float:
    network = mesh(64, widths=(8, 8), convs=2, statistics="local")
    strategy = Strategy({"sample": ranks // math.prod(parts), "height": parts[0], "width": parts[1]}, bucket_bytes=1)
    found = simulate(network, strategy, ranks, priced(machine), Training(barrier=True), account=False)
    return found.step_seconds


def test_halos_and_sums_delay_each_other() -> None:
    """Messages are slower than kernels, so that both are in progress at the same time."""
    links = LINKS | {level: Link(1e-6, 1e-8) for level in ("node", "switch", "across")}
    machine = dataclasses.replace(MACHINE, links=links, peak_flops={"float32": 1e12}, memory_bandwidth=1e12)
    alone, together = step(machine), step(dataclasses.replace(machine, topology=Topology()))
    assert alone < together < 2 * alone


@pytest.mark.parametrize("variation", [Variation(devices=0.1), Variation(kernels=0.3)])
def test_stragglers_delay_steps(variation: Variation) -> None:
    machine = Machine.load("lassen")
    steady = dataclasses.replace(machine, variation=Variation(), collectives={}, topology=None)
    varied = dataclasses.replace(steady, variation=variation)
    assert all(1.0 < step(varied, ranks) / step(steady, ranks) < 2.0 for ranks in (16, 64))
    assert [varied.variation.last(ranks) for ranks in (1, 2)] == [0.0, expected_maximum(2)]
    measured = dataclasses.replace(variation, measured=64)  # times are those of the slowest of 64 ranks already
    assert step(dataclasses.replace(steady, variation=measured), 64) == step(steady, 64)


def test_spread_of_measured_times() -> None:
    """The longest tenth of the times of a rank does not count."""
    found, mean = spread([[1.0] * 18 + [9.0, 9.0], [1.0, 3.0] * 10]), 34 / 18
    assert found.devices == pytest.approx(math.sqrt(0.5) * (mean - 1) / ((mean + 1) / 2), abs=1e-4)
    assert found.kernels == pytest.approx(math.sqrt((10 * 1 + 8 * 9) / 18 - mean**2) / mean, abs=1e-4)
    assert found.measured == 2


def test_files() -> None:
    machine = dataclasses.replace(
        Machine.load("lassen"),
        weighted={"forward": Efficiency(2.0, 1e9, 0.5, 0.01, 0.8)},
        topology=Topology(2, 1e9, 2e9),
        collectives={"a b": Protocol("ring", 1e-6, 2e-6, 1e9, 2e9, 3e-6, 1024, 2, 4096, 512)},
        variation=Variation(0.1, 0.2, 3),
    )
    assert Machine.parse(machine.to_toml()) == machine
    text = (FOLDER / "lassen.toml").read_text(encoding="utf-8")
    for old, new, message in (
        ('algorithm = "ring"', 'algorithm = "star"', "collectives.ring.algorithm"),
        ("devices = 0.0148", "devices = 2", "variation.devices: expected a number <= 1, got 2"),
        ('uplink = "12.5 GB/s"', 'uplink = "12.5 GB"', "topology.uplink"),
    ):
        with pytest.raises(UserError) as caught:
            Machine.parse(text.replace(old, new))
        assert message in str(caught.value)
