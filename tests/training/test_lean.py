"""Tests that a step allocates no array, and sends exactly the messages and bytes of the formula."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import BatchNorm, BinaryCrossEntropyWithLogits, Conv, Input, Network
from halograd.layers.strategy import Strategy
from halograd.models import mesh, resnet, unet
from halograd.training.executor import Executor
from tests.layers.norms import step
from tests.support.lean import check_allocations
from tests.training.steps import fill

BIG = {
    "mesh": lambda: mesh(resolution=256, widths=(16, 16), convs=2),
    "resnet": lambda: resnet((1, 1), classes=5, resolution=192, width=16),
    "unet": lambda: unet((128, 128), channels=2, classes=3, width=16, levels=2),
}


def in_space(network, size, halo):
    """Return a strategy that cuts all layers along the width."""
    return Strategy({"width": size}, options={"halo": halo})


def in_channels(network, size, halo):
    """Return a strategy that cuts layers along channels; convolutions in turn along filters and input channels.

    The last layer is cut along the width, over one rank less.
    """
    layers, turn = {}, 0
    for name, node in network.layers.items():
        most = min(node.shape[-1], *(n.shape[-1] for n in node.inputs))
        if node.layer.cuts_channels == "no" or most < size:
            continue
        axes = {"channelwise": ["channel"], "contracts": ["channel", "input_channel"]}[node.layer.cuts_channels]
        layers[name] = {axes[turn % len(axes)]: size}
        turn += node.layer.cuts_channels == "contracts"
    layers[next(reversed(layers))] = {"width": max(1, size - 1)}
    return Strategy({"width": size}, layers, options={"halo": halo})


#: Cuts, each on some numbers of ranks: on one rank they are the same, 2 have one neighbor, 3 and 4 two.
CUTS = [
    pytest.param(in_space, "pad", marks=pytest.mark.ranks(1, 2, 4)),
    pytest.param(in_space, "overlap", marks=pytest.mark.ranks(2, 3)),
    pytest.param(in_channels, "pad", marks=pytest.mark.ranks(2, 3)),
]


@pytest.mark.parametrize(("cut", "halo"), CUTS)
@pytest.mark.parametrize(
    ("name", "backend"), [*((n, b) for n in BIG for b in ("numpy", "onednn")), ("unet", "bfloat16")]
)
def test_a_step_allocates_no_array(name, cut, halo, backend):
    """A step allocates no array: activations of every rank have at least 256 KiB, so a temporary would be detected.

    NumPy's casting buffers (8192 elements per operand, some 100 KiB) are transient and no arrays.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        network = BIG[name]()
        strategy = cut(network, comm.size, halo)
        low = backend == "bfloat16"
        kernels = get_backend("onednn" if low else backend)
        kernels.emulate = True
        with Executor(network, comm, kernels, 1, strategy, "bfloat16" if low else "float32") as executor:
            fill(executor, 0)
            for _ in range(2):
                step(executor)
            check_allocations(comm, lambda: [step(executor) for _ in range(2)], 192 * 1024)


def chain(rows, columns):
    """Return a network of three convolutions with halos that can be counted by hand: 5x5, 3x3 with stride 2, 3x3."""
    x = Input((rows, columns, 2), name="x")
    y = Conv(4, 5, padding=2, name="a")(x)
    y = BatchNorm(name="bn")(y)
    y = Conv(6, 3, 2, 1, name="b")(y)
    y = Conv(1, 3, padding=1, name="c")(y)
    target = Input(y.shape, name="target")
    return Network({"loss": BinaryCrossEntropyWithLogits(name="loss")(y, target)})


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("halo", ["pad", "overlap"])
def test_halo_messages_and_bytes_are_those_of_the_formula(halo):
    """Halo messages and bytes of a step are those of the formula, under a cut of the height.

    Each of `P` blocks has 8 rows. Forward, rows from above and below: b: 1 and 0 of 4 channels; c: 1 and 1 of 6; a
    reads its halo from disk. Backward, rows of dy: b: 0 and 1 of 6; c: 1 and 1 of 1.
    """
    with Communicator(MPI.COMM_WORLD) as comm:
        columns, batch, size = 10, 3, np.dtype("float32").itemsize
        executor = Executor(
            chain(8 * comm.size, columns),
            comm,
            get_backend("numpy"),
            batch,
            Strategy({"height": comm.size}, options={"halo": halo}),
        )
        with executor:
            fill(executor, 0)
            step(executor)
            comm.counters.reset()
            step(executor)
            above, below = comm.rank > 0, comm.rank < comm.size - 1
            # To the rank above goes what it wants from below, and the other way round.
            rows_up = {"fwd b": (0, 4, columns), "fwd c": (1, 6, 5), "bwd b": (1, 6, 5), "bwd c": (1, 1, 5)}
            rows_down = {"fwd b": (1, 4, columns), "fwd c": (1, 6, 5), "bwd b": (0, 6, 5), "bwd c": (1, 1, 5)}
            sent = [m for there, rows in ((above, rows_up), (below, rows_down)) if there for m in rows.values() if m[0]]
            nbytes = sum(r * c * w for r, c, w in sent) * batch * size
            found = comm.counters["halo"]
            with comm.agreement():
                assert (found.messages, found.bytes) == (len(sent), nbytes)
            statistics, gradients = comm.counters["statistics"], comm.counters["allreduce"]
            several = int(comm.size > 1)
            assert (statistics.messages, statistics.bytes) == (2 * several, 2 * 2 * 4 * 8 * several)
            buckets = executor.store.buckets
            assert gradients.messages == len(buckets) * several
            assert gradients.bytes == sum(b.grads.nbytes for b in buckets) * several
