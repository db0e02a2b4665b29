"""Tests of wide values: margins that ranks compute instead of exchanging them. Results are those without margins."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import Total, Transfer
from halograd.perfmodel.cost import count_step
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.testing import grids
from halograd.training.executor import Executor
from tests.training.steps import copied, fill

#: Extents that 4 parts do not divide; some blocks are smaller than the margins of long runs.
HEIGHT, WIDTH = 13, 10


def ended(y, filters=2):
    y = hg.Conv(filters, 3, padding=1, name="last")(y)
    return hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, hg.Input(y.shape, name="target"))})


def units():
    """Return a network of convolutions with batch norms, of which one sums over the ranks that share samples."""
    y = hg.Input((HEIGHT, WIDTH, 3), name="x")
    for i, statistics in enumerate(("global", "sample", "global")):
        y = hg.Conv(4, 3, padding=1, bias=i == 1, name=f"conv{i}")(y)
        y = hg.BatchNorm(statistics, activation="relu" if i else "silu", name=f"bn{i}")(y)
    return ended(y)


def branches():
    """Return a network with a shortcut, activations by output and by input, a kernel of 5 x 2 and a stride."""
    y = hg.Conv(4, 3, padding=1, activation="relu", name="conv0")(hg.Input((HEIGHT, WIDTH, 3), name="x"))
    z = hg.SiLU(name="silu")(hg.Conv(4, 3, padding=1, name="conv1")(y))
    y = hg.Add(activation="relu", name="add")(y, hg.Conv(4, 3, padding=2, dilation=2, name="conv2")(z))
    y = hg.Tanh(name="tanh")(hg.Conv(3, (5, 2), stride=(2, 1), padding=(2, 0), groups=1, name="conv3")(y))
    return ended(hg.Conv(3, 3, padding=1, name="conv4")(y))


def pools():
    """Return a network with overlapping pooling before and behind convolutions."""
    y = hg.ReLU(name="relu")(hg.Conv(4, 3, padding=1, name="conv0")(hg.Input((HEIGHT, WIDTH, 3), name="x")))
    y = hg.MaxPool(3, 1, padding=1, name="max")(y)
    y = hg.BatchNorm(name="bn")(hg.Conv(3, 3, padding=1, name="conv1")(y))
    return ended(hg.AveragePool(3, 2, padding=1, name="average")(y))


def mixed():
    """Return a network with layers that compute no margin or read none: dropout, a local norm, a concatenation."""
    y = hg.Conv(4, 3, padding=1, name="conv0")(hg.Input((HEIGHT, WIDTH, 3), name="x"))
    y = hg.Dropout(0.2, name="dropout")(hg.Conv(4, 3, padding=1, name="conv1")(y))
    y = hg.Concat(name="join")(hg.BatchNorm("local", name="bn")(y), hg.Conv(2, 3, padding=1, name="conv2")(y))
    return ended(y)


def shortcuts():
    """Return residual blocks whose norms add a shortcut: with an activation or none, an identity or a convolution."""
    y = hg.Conv(4, 3, padding=1, activation="relu", name="conv0")(hg.Input((HEIGHT, WIDTH, 3), name="x"))
    z = hg.BatchNorm("sample", activation="relu", name="bn1")(hg.Conv(4, 3, padding=1, bias=False, name="conv1")(y))
    y = hg.BatchNorm(activation="relu", name="bn2")(hg.Conv(4, 3, padding=1, bias=False, name="conv2")(z), y)
    z = hg.BatchNorm(name="bn3")(hg.Conv(3, 3, 2, padding=1, name="conv3")(y), hg.Conv(3, 1, 2, name="short")(y))
    return ended(hg.BatchNorm(activation="relu", name="bn4")(hg.Conv(3, 3, padding=1, name="conv4")(z), z))


NETWORKS = {make.__name__: make for make in (units, branches, pools, mixed, shortcuts)}


def stepped(comm, network, strategy, dtype="float64", backend="numpy", debug=False):
    """Return losses, gradients, states, and counted messages of two steps, and the program."""
    with Executor(network, comm, get_backend(backend), 2, strategy, dtype, seed=3, debug=debug) as executor:
        losses = []
        for step in range(2):
            fill(executor, step)
            comm.counters.reset()
            executor.forward()
            losses.append(executor.loss_value())
            executor.backward()
            executor.reducer.finish()
        sent, store = comm.counters.snapshot(), executor.store
        if not debug:
            assert len(executor.runner.arena) == executor.program.placement.size
        arrays = copied(store.grads) | copied(store.state)
        return np.array(losses), arrays, sent, executor.program


def exchanges(program):
    return sum(isinstance(o, Transfer) and o.end == "start" for o in program)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("units", marks=pytest.mark.ranks(2, 4)),
        pytest.param("branches", marks=pytest.mark.ranks(4)),
        pytest.param("shortcuts", marks=pytest.mark.ranks(2, 4)),
        pytest.param("pools", marks=pytest.mark.ranks(3)),
        pytest.param("mixed", marks=pytest.mark.ranks(2)),
    ],
)
def test_results_of_the_plain_program_on_every_grid(name):
    """All of a network, and a part of it, computed again or not; messages are those that are counted."""
    network = NETWORKS[name]()
    some = {layer: {"wide": i % 4 < 3} for i, layer in enumerate(network.layers)}
    with Communicator(MPI.COMM_WORLD) as comm:
        for turn, grid in enumerate(grids(comm.size, ("height", "width"))):
            halo = ("pad", "overlap")[turn % 2]
            losses, arrays, _, plain = stepped(comm, network, Strategy(grid, options={"halo": halo}))
            for strategy, debug in (
                (Strategy(grid, options={"halo": halo, "wide": True}), turn == 0),
                (Strategy(grid, some, {"halo": halo, "recompute": "block"}), False),
            ):
                ours, own, sent, program = stepped(comm, network, strategy, debug=debug)
                counted = count_step(network, strategy, 2, comm.size, "float64")
                with comm.agreement():
                    np.testing.assert_allclose(ours, losses, rtol=1e-12)
                    for key, array in arrays.items():
                        np.testing.assert_allclose(own[key], array, rtol=1e-10, atol=1e-12, err_msg=key)
                    assert sent["halo"].messages == counted["halo"].messages[comm.rank]
                    assert exchanges(program) <= exchanges(plain)
                    if "wide" in strategy.options and name != "mixed":
                        assert exchanges(program) <= 0.5 * exchanges(plain)


@pytest.mark.ranks(2)
def test_results_of_onednn():
    with Communicator(MPI.COMM_WORLD) as comm:
        cut = {"width": comm.size}
        found = [
            stepped(comm, units(), Strategy(cut, options={"wide": wide}), "float32", "onednn") for wide in (False, True)
        ]
        np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
        for key, array in found[0][1].items():
            np.testing.assert_allclose(found[1][1][key], array, rtol=1e-3, atol=1e-4, err_msg=key)


def test_a_run_exchanges_at_its_ends():
    """The input is read with its halo, so a run that begins there has one exchange, of its last gradient."""
    names = ("conv0", "bn0", "conv1", "bn1")
    strategy = Strategy({"height": 4}, {name: {"wide": True} for name in names})
    program = compile_program(units(), strategy, Target(2, 4, rank=1))
    moved = [o.layer for o in program if isinstance(o, Transfer) and o.end == "start"]
    assert moved == ["last", "last", "conv2"]
    assert program.values["bn1"].held[1].shape == (2, 5, WIDTH, 4)
    assert program.values["conv0"].held[1].shape == (2, 7, WIDTH, 4)
    assert program.values["conv1"].held_gradient[1].shape == (2, 5, WIDTH, 4)


def test_a_halo_travels_during_the_sum_of_the_statistics_of_a_wide_norm():
    strategy = Strategy({"height": 2, "width": 2}, {"bn1": {"wide": True}})
    program = compile_program(units(), strategy, Target(2, 4, rank=1))
    (forward,) = (s.operations for s in program.forward if s.name == "bn1")
    halo = [i for i, o in enumerate(forward) if isinstance(o, Transfer)]
    total = [i for i, o in enumerate(forward) if isinstance(o, Total)]
    assert halo[0] < total[0] < total[1] < halo[1]
    assert not any(isinstance(o, Transfer) for s in program.forward if s.name == "conv2" for o in s.operations)


def test_filter_gradients_hide_sums_only_where_they_hide_no_halo():
    """The last of the run hides the halo of its dy; before bn1, a sum of running statistics must end first."""
    for wide, hidden in ((True, {"bn0": "conv1"}), (False, {})):
        program = compile_program(units(), Strategy({"height": 4}, options={"wide": wide}), Target(2, 4, rank=1))
        found, pending = {}, None
        for operation in (o for s in program.backward for o in s.operations):
            if isinstance(operation, Total):
                pending = operation.layer if operation.end == "start" else None
            elif pending and operation.timing is not None and operation.timing.phase == "backward_filter":
                found[pending] = operation.layer
        assert found == hidden


def test_what_cannot_be_wide_is_exchanged():
    program = compile_program(mixed(), Strategy({"height": 2}, options={"wide": True}), Target(2, 2))
    assert [name for name, value in program.values.items() if value.wide] == ["conv0"]
