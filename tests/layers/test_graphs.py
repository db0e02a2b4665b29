"""Tests of random networks under random cuts, layer by layer: values and gradients are those of one process."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.testing import check_layer, compare
from tests.layers.geometries import skew
from tests.layers.graphs import Centre, Gate, Graphs, poison, run

EACH = 4


def seeds(comm, first, group, groups):
    """Return the numbers of the networks of a group; every number of ranks has networks of its own."""
    at = first + ((comm.size - 1) * groups + group) * EACH
    return range(at, at + EACH)


def check(seed, comm, backend="numpy", dtype="float64", keeps=True, debug=False):
    graphs = Graphs(seed)
    network = graphs.network()
    strategy = graphs.strategy(network, comm.size)
    if not keeps:  # an output that is read after the step is kept
        strategy = graphs.recomputed(strategy)
    found = run(network, comm, graphs.batch, strategy, (0, 1), backend, dtype, keeps, debug)
    fault = None
    if comm.rank == 0:
        with Communicator(MPI.COMM_SELF) as alone:
            want = run(Graphs(seed).network(), alone, graphs.batch, None, (1,), keeps=keeps)
        fault = compare(found, want, 512.0, dtype, f"seed {seed}, {strategy}")
    comm.agree(fault)


@pytest.mark.mpi
@pytest.mark.parametrize("group", range(6))
def test_random_networks(group, monkeypatch):
    poison(monkeypatch)
    if group % 3 == 2:
        skew(monkeypatch)
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 0, group, 6):
            check(seed, comm)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("group", range(3))
def test_random_networks_that_keep_nothing(group, backend):
    """Random networks are right if the memory of all arrays that later operations do not declare is overwritten."""
    dtype = "float64" if backend == "numpy" else "float32"
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 1000, group, 3):
            check(seed, comm, backend, dtype, keeps=False)


@pytest.mark.mpi
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("group", range(2))
def test_kernels_of_random_networks_use_what_they_declare(group, backend):
    """Random networks are right if arrays that an operation holds and does not declare are NaN while it runs."""
    dtype = "float64" if backend == "numpy" else "float32"
    with Communicator(MPI.COMM_WORLD) as comm:
        for seed in seeds(comm, 2000, group, 2):
            check(seed, comm, backend, dtype, keeps=False, debug=True)


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [(3, 7, 2), (2, 1, 2), (5, 3)])
def test_a_layer_that_reads_whole_samples_owes_nothing_where_it_makes_nothing(shape, monkeypatch):
    """Ranks without output add zeros to the gradient of a whole sample, not the undefined contents of their memory."""
    poison(monkeypatch)
    check_layer(Centre, shape)


@pytest.mark.mpi
def test_two_inputs_of_different_halos(monkeypatch):
    skew(monkeypatch)
    check_layer(lambda: Gate(2), [(7, 6, 2)] * 2, batch=3)


#: Layers that read what they own of their input, without a halo.
POINTWISE = {
    "relu": hg.ReLU,
    "gelu": hg.GELU,
    "hard sigmoid": hg.HardSigmoid,
    "clamp": hg.Clamp,
    "tanh": hg.Tanh,
    "softmax": hg.Softmax,
    "log softmax": hg.LogSoftmax,
    "affine": lambda name: hg.Affine(-0.5, 0.7, name),
    "channel shuffle": lambda name: hg.ChannelShuffle(2, name),
    "dropout": lambda name: hg.Dropout(0.4, name),
    "local response norm": lambda name: hg.LocalResponseNorm(3, name=name),
    "batch norm": lambda name: hg.BatchNorm(name=name),
    "group norm": lambda name: hg.GroupNorm(2, name=name),
    "layer norm": lambda name: hg.LayerNorm("channels", name=name),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
@pytest.mark.parametrize("kind", POINTWISE)
def test_the_owned_part_of_an_input_that_has_a_halo_for_another_layer(kind, backend):
    """A pointwise layer reads the owned part of an input that has a halo for another layer; results are exact."""

    def both(x):
        return hg.Add()(POINTWISE[kind](name="own")(x), hg.Conv(4, 3, padding=1, name="c")(x))

    dtype = "float64" if backend == "numpy" else "float32"
    check_layer(lambda: both, (6, 5, 4), backend=backend, dtype=dtype, gradient=False)


class Blur(hg.Layer):
    """Custom layer ``y = amount * (sum of x over three rows)`` per channel, which needs only its block of channels."""

    stencil = hg.Stencil((3, 1), padding=(1, 0))
    cuts_channels = "channelwise"

    def parameters(self, shape):
        return {"amount": hg.Parameter((shape[-1],), "ones", channel_axis=0), "shift": hg.Parameter((1,))}

    def _rows(self, array):
        return [array[:, i : array.shape[1] - 2 + i] for i in range(3)]

    def forward(self, inputs, params, box):
        return params["amount"] * sum(self._rows(inputs[0])) + params["shift"]

    def backward(self, dy, inputs, params, box):
        dx = np.zeros_like(inputs[0])
        for view in self._rows(dx):
            view += params["amount"] * dy
        amount = np.sum(dy * sum(self._rows(inputs[0])), axis=(0, 1, 2))
        return [dx], {"amount": amount, "shift": np.sum(dy, keepdims=True).reshape(1)}


class GateOfChannels(Gate):
    """`Gate` whose channels may be cut: its input boxes follow those of the output."""

    cuts_channels = "channelwise"


@pytest.mark.mpi
def test_channels_of_layers_of_ones_own(monkeypatch):
    """Custom layers with cut channels are exact: parameters along channels are cut, others are whole and summed."""
    poison(monkeypatch)
    axes = ("sample", "height", "channel")
    check_layer(Blur, (7, 5, 6), axes=axes)
    check_layer(lambda: GateOfChannels(1), [(7, 6, 5)] * 2, axes=axes, gradient=False)
