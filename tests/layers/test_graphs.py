"""Random networks under random cuts, layer by layer: values and gradients are those of one process."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.testing import check_layer, compare
from tests.layers.geometries import skew
from tests.layers.graphs import Centre, Gate, Graphs, poison, run

GROUPS, EACH = 12, 4


def check(seed, comm):
    graphs = Graphs(seed)
    network = graphs.network()
    strategy = graphs.strategy(network, comm.size)
    found = run(network, comm, graphs.batch, strategy, (0, 1))
    fault = None
    if comm.rank == 0:
        with Communicator(MPI.COMM_SELF) as alone:
            want = run(Graphs(seed).network(), alone, graphs.batch, None, (1,))
        fault = compare(found, want, 512.0, "float64", f"seed {seed}, {strategy}")
    comm.agree(fault)


@pytest.mark.mpi
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_networks(group, monkeypatch):
    poison(monkeypatch)
    if group % 3 == 2:
        skew(monkeypatch)
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in range(group * EACH, (group + 1) * EACH):
            check(seed, comm)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [(3, 7, 2), (2, 1, 2), (5, 3)])
def test_a_layer_that_reads_whole_samples_owes_nothing_where_it_makes_nothing(shape, monkeypatch):
    """Ranks without output must not add what happens to be in their memory to the gradient of what they could read."""
    poison(monkeypatch)
    check_layer(Centre, shape)


@pytest.mark.mpi
def test_two_inputs_of_different_halos(monkeypatch):
    skew(monkeypatch)
    check_layer(lambda: Gate(2), [(7, 6, 2)] * 2, batch=3)
