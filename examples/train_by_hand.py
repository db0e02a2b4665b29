"""Training by hand: boxes, an exchange, the program of a step, and the step, without configuration and planner.

::

    mpirun -n 2 python examples/train_by_hand.py          # any number of ranks gives the same losses
    mpirun -n 4 python examples/train_by_hand.py --list   # prints the program of rank 0

Two convolutions learn to blur images whose rows are cut over all ranks.
"""

import sys
from contextlib import closing

import numpy as np
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import End, Exchange, Layout, Window
from halograd.kernels import get_backend
from halograd.program.program import lines_of
from halograd.training import Executor

BATCH, ROWS, COLUMNS, STEPS, RATE = 2, 12, 16, 20, 0.5
SHAPE = BATCH, ROWS, COLUMNS, 1
STENCIL = Window(kernel=3, pad_lo=1, pad_hi=1)


def blur(comm: Communicator, images: np.ndarray) -> np.ndarray:
    """Return, for each row that this rank owns, the mean of the row and of its two neighbors. Collective.

    Boxes: a rank owns some rows, and a stencil needs the rows next to them too. An exchange moves owned rows to the
    ranks that need them; rows outside the image stay zero.
    """
    owned = Layout.blocks(SHAPE, {"height": comm.size}, comm.size).boxes
    needed = owned.map(None, STENCIL.input_range, None, None)
    source, target = images[owned[comm.rank].slices()].copy(), np.zeros(needed[comm.rank].shape)
    with closing(Exchange(comm, End(owned, source), End(needed, target), kind="halo")) as halo:
        halo.start()  # what needs no row of a neighbor would be computed here
        halo.finish()
    return (target[:, :-2] + target[:, 1:-1] + target[:, 2:]) / 3


def network() -> hg.Network:
    """Return two convolutions with a loss. A layer defines which box of its input a box of its output needs."""
    x = hg.Input((ROWS, COLUMNS, 1), name="x")
    y = hg.Conv(4, 3, padding=1, activation="relu", name="conv1")(x)
    y = hg.Conv(1, 3, padding=1, name="conv2")(y)
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))})


def train(comm: Communicator, listed: bool = False) -> list[float]:
    """Return the losses of plain gradient descent towards blurred images. Collective."""
    images = np.random.default_rng(1).random(SHAPE)
    # The program: layers lower themselves to kernels and exchanges, and a pass adds sums of gradients and updates.
    strategy = hg.Strategy({"height": comm.size})
    with Executor(network(), comm, get_backend("numpy"), BATCH, strategy, "float64") as executor:
        if listed and comm.rank == 0:
            print("\n".join(lines_of(executor.program)))
        assert executor.reducer is not None

        def update(bucket) -> None:  # called when the gradients of a bucket are summed over the ranks
            bucket.params -= RATE * bucket.grads

        executor.reducer.update = update
        executor.set_input("x", images)  # every rank copies the box that it needs
        executor.input("target").array[...] = blur(comm, images)
        losses = []
        for step in range(STEPS):
            executor.mode.step = step
            executor.forward(training=True)  # waits for updates before the layers that need them
            losses.append(executor.loss_value())
            executor.backward()  # starts the sum of a bucket when its last gradient is there
        executor.reducer.finish()  # the last updates
        return losses


if __name__ == "__main__":
    with Communicator(MPI.COMM_WORLD) as world:
        losses = train(world, "--list" in sys.argv)
        if world.rank == 0:
            print(f"{world.size} ranks: loss {losses[0]:.6f} -> {losses[-1]:.6f} after {STEPS} steps")
