"""Tests of executors and their inputs: the order of methods, arrays that are accepted or rejected, errors."""

import contextlib
import re

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from halograd import layers
from halograd.comm import CommError, Communicator, communicator, maker
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.kernels import Kernel, KernelError, get_backend
from halograd.kernels.guards import GUARDS, GuardError
from halograd.kernels.numpy import NumpyBackend
from halograd.layers import BatchNorm, Conv, Input, MeanSquaredError, Network, SoftmaxCrossEntropy
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.program import runner
from halograd.testing import random_array
from halograd.training.executor import Executor, Gather
from halograd.training.inputs import block_of
from tests.support.fake_device import FakeBackend
from tests.training.steps import NETWORKS, copied

SHAPE = (7, 6, 2)


def network(loss=True):
    """Return a network whose second branch ends in an output without a gradient."""
    y = Conv(2, 3, padding=1, name="conv")(Input(SHAPE, "x"))
    outputs = {"loss": MeanSquaredError(name="mse")(y, Input(SHAPE, "target"))} if loss else {}
    return Network({**outputs, "aside": BatchNorm(name="norm")(y)}, name="bare")


@contextlib.contextmanager
def executing(comm, batch=2, **options):
    make = network(options.pop("loss", True))
    with Executor(make, comm, get_backend("numpy"), batch, Strategy({"height": comm.size}), "float64", **options) as e:
        for name, node in make.inputs.items():
            e.set_input(name, random_array((batch, *node.shape), name))
        yield e


def gradients(executor):
    executor.forward()
    executor.backward()
    executor.reducer.finish()
    return copied(executor.store.grads)


@pytest.mark.mpi
def test_the_loss_may_be_asked_for_at_any_time_or_never():
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm) as executor:
        executor.forward()
        first = executor.loss_value()
        assert executor.loss_value() == first > 0
        executor.set_input("target", random_array((2, *SHAPE), "another"))
        executor.forward()
        executor.forward()
        second = executor.loss_value()
        assert second != first
        executor.backward()
        assert executor.loss_value() == second


@pytest.mark.mpi
def test_executors_side_by_side_on_one_communicator():
    """An evaluation between forward and backward of training, with the same parameters, changes no gradient."""
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm, probed=["x"]) as training:
        want = gradients(training)
        with executing(comm, batch=3, trainable=False, store=training.store) as evaluation:
            training.forward()
            evaluation.forward()
            assert evaluation.loss_value() > 0
            training.backward()
            evaluation.forward()
            training.reducer.finish()
            assert evaluation.loss_value() != training.loss_value()
        for name, array in training.store.grads.items():
            assert np.array_equal(array, want[name]), name


@pytest.mark.mpi
def test_layers_that_no_gradient_reaches_have_none():
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm) as executor:
        found = gradients(executor)
    assert not found["norm/gamma"].any() and not found["norm/beta"].any()
    assert found["conv/w"].any()


@pytest.mark.mpi
def test_refusals_name_what_is_missing():
    with Communicator(MPI.COMM_WORLD) as comm:
        with executing(comm, loss=False) as executor:
            executor.forward()
            for call, what in ((executor.backward, r"backward\(\)"), (executor.loss_value, r"loss_value\(\)")):
                with pytest.raises(ValueError, match=f"{what}: .*'bare' .*'loss'.*aside"):
                    call()
        with executing(comm, probed=["x"]) as executor:
            gradients(executor)
            executor.gather("x", gradient=True)
            with pytest.raises(ValueError, match=r"gradient of 'conv' .* \['x'\]"):
                executor.gather("conv", gradient=True)


@pytest.mark.mpi
def test_outputs_have_names_of_their_own():
    """An output is gathered by its name in the network; unknown names are an error on every rank."""
    known = r"expected an output \(loss, aside\), or a layer or input \(x, conv, norm, target, mse\), got "
    with Communicator(MPI.COMM_WORLD) as comm:
        with executing(comm, probed=["x"]) as executor:
            gradients(executor)
            found, layer = executor.gather("aside"), executor.gather("norm")
            assert (found is None) == (comm.rank > 0) and (found is None or np.array_equal(found, layer))
            for gradient in (False, True):
                with pytest.raises(UserError, match=known + "'asid'; did you mean aside"):
                    executor.gather("asid", gradient)
            with pytest.raises(UserError, match=r"'loss' is .* number.*; call loss_value"):
                executor.gather("loss")
            with pytest.raises(ValueError, match=r"gradient of 'aside' .* \['x'\]"):
                executor.gather("aside", gradient=True)
        with pytest.raises(UserError, match=known + "'cnv'; did you mean conv"):
            executing(comm, kept=["cnv"]).__enter__()
        with pytest.raises(UserError, match=r"input: .*'x', 'target', got 'y'"):
            executing(comm, probed=["y"]).__enter__()


@pytest.mark.mpi
def test_a_gather_is_made_once_and_run_after_every_step():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        executing(comm, probed=["x"], kept=["conv"]) as executor,
        contextlib.closing(Gather(executor, ["conv", "norm"], ["x"])) as way,
    ):
        last = None
        for step in range(2):
            executor.set_input("x", random_array((2, *SHAPE), f"x {step}"))
            gradients(executor)
            found, expected = way.run(), [executor.gather("conv"), executor.gather("norm")]
            expected.append(executor.gather("x", gradient=True))
            assert all((one is None) == (comm.rank > 0) for one in found)
            if comm.rank == 0:
                assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
                assert last is None or not np.array_equal(last, found[0])
                last = found[0].copy()


@pytest.mark.mpi
def test_debug_changes_no_number():
    """With `debug` every array has separate memory with guard bytes, and results are bitwise the same."""
    with Communicator(MPI.COMM_WORLD) as comm:
        with executing(comm, seed=3) as executor:
            want, loss = gradients(executor), executor.loss_value()
            predicted = executor.predicted_bytes
            assert not GUARDS.active and len(executor.runner.arena) == executor.program.placement.size
        with executing(comm, seed=3, debug=True) as executor:
            assert GUARDS.active
            found = gradients(executor)
            assert executor.loss_value() == loss
            same = ("kernel workspace", "messages")
            assert {k: v for k, v in executor.predicted_bytes.items() if k not in same} == {
                k: v for k, v in predicted.items() if k not in same
            }
        assert not GUARDS.active
        assert all(np.array_equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_debug_with_16_bits(dtype):
    with Communicator(MPI.COMM_SELF) as comm, get_backend("numpy") as kernels:
        kernels.emulate, losses = True, []
        for debug in (False, True):
            with Executor(network(), comm, kernels, 2, None, dtype, debug=debug) as executor:
                for name, node in executor.network.inputs.items():
                    executor.set_input(name, random_array((2, *node.shape), name))
                gradients(executor)
                losses.append(executor.loss_value())
        assert losses[0] == losses[1]


@pytest.mark.mpi
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_debug_names_the_layer_and_kernel_that_writes_outside_of_its_memory(way, monkeypatch):
    """With `debug` an overrun on the last rank raises an error on all ranks, which names layer and kernel."""
    make = getattr(NumpyBackend, f"_conv_{'forward' if way == 'forward' else 'backward_data'}")

    def overrunning(self, *arrays):
        kernel = make(self, *arrays)
        whole = arrays[3 if way == "forward" else 2]
        raw = whole
        while isinstance(raw.base, np.ndarray):
            raw = raw.base
        end = whole.__array_interface__["data"][0] - raw.__array_interface__["data"][0] + whole.nbytes

        def run() -> None:
            kernel()
            raw[end : end + 3] = 0

        return Kernel(run, "vendor:fast")

    with Communicator(MPI.COMM_WORLD) as comm:
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(NumpyBackend, make.__name__, overrunning)
        pattern = r"layer 'conv', \w*conv\w*: vendor:fast wrote outside of its memory: 3 bytes after an array"
        with executing(comm, probed=["x"], debug=True) as executor, pytest.raises(GuardError, match=pattern):
            executor.forward()
            executor.backward()
        assert not GUARDS.active


def test_debug_is_for_the_host():
    with Communicator(MPI.COMM_SELF) as comm, pytest.raises(UserError, match="debug: expected kernels on the CPU"):
        Executor(network(), comm, FakeBackend(), 2, debug=True)
    assert not GUARDS.active


@pytest.mark.mpi(min_size=2)
def test_ranks_without_samples_are_told_of_on_rank_0(caplog):
    layers.strategy._warn_once.cache_clear()
    with Communicator(MPI.COMM_WORLD) as comm:
        for _ in range(2):
            with Executor(network(), comm, get_backend("numpy"), 1) as executor:
                executor.forward()
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == (comm.rank == 0)
        assert all(f"{comm.size - 1} of {comm.size} ranks" in text and "a batch of 1" in text for text in told)


@pytest.mark.mpi(min_size=2)
def test_a_cut_that_the_network_cannot_have_is_refused_on_all_ranks():
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"depth": comm.size})
        with pytest.raises(UserError, match=r"'conv' \(Conv\) .*'depth'; use sample or h"):
            Executor(network(), comm, get_backend("numpy"), 1, strategy)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport", ["shared", "mpi", "emulated:alpha=1e-6,beta=1e-9,node=2"])
def test_the_ranks_meet_as_often_for_many_layers_as_for_few(comm, transport, monkeypatch):
    """Ranks synchronize as often for many layers as for few, because exchanges and sums are set up together."""
    calls = []
    agree = communicator.agree
    for module in (communicator, maker):
        monkeypatch.setattr(module, "agree", lambda *args: (calls.append(1), agree(*args))[1])

    def meetings(layers):
        y = Input((16, 16, 2), "x")
        for i in range(layers):
            y = Conv(2, 3, padding=1, name=f"conv{i}")(y)
            y = BatchNorm(name=f"norm{i}")(y)
        made = Network({"loss": MeanSquaredError(name="mse")(y, Input((16, 16, 2), "target"))}, name="chain")
        strategy = Strategy({"height": comm.size}, bucket_bytes=64)
        before = len(calls)
        with Executor(made, ranks, get_backend("numpy"), 2, strategy, "float64") as executor:
            assert len(executor.store.buckets) >= layers
            return len(calls) - before

    with Communicator(comm, transport) as ranks:
        meetings(1)  # opens what is opened once
        assert meetings(2) == meetings(12)


def test_a_kernel_that_a_library_lacks_names_its_layer(monkeypatch):
    def conv_forward(*arguments, **options):
        raise KernelError("expected another kernel")

    monkeypatch.setattr(NumpyBackend, "conv_forward", conv_forward)
    with Communicator(MPI.COMM_SELF) as comm, pytest.raises(KernelError, match=r"^conv: expected another kernel"):
        Executor(network(), comm, get_backend("numpy"), 2, None, "float64")


@pytest.mark.ranks(2)
def test_an_executor_that_is_refused_keeps_no_channels():
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        refused = Strategy({"height": comm.size}, reduction=Scheme("host_accumulate"))
        for _ in range(2):
            with pytest.raises(UserError, match="transport by which ranks share memory"):
                Executor(NETWORKS["mesh"](), comm, get_backend("numpy"), 4, refused)
            assert comm.buffer_bytes == 0


@pytest.mark.ranks(2)
def test_sums_that_are_refused_leave_no_channels(monkeypatch):
    def refuse(comm, specs):
        raise CommError("sums: refused")

    monkeypatch.setattr(runner, "reductions_in_groups", refuse)
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        with pytest.raises(CommError, match="sums: refused"):
            Executor(NETWORKS["mesh"](), comm, get_backend("numpy"), 4, Strategy({"height": comm.size}))
        assert comm.buffer_bytes == 0


def test_an_error_of_a_user_on_one_rank_closes_the_executor():
    with Communicator(MPI.COMM_SELF) as comm:
        with pytest.raises(KeyError), executing(comm, debug=True) as executor:
            executor.forward()
            raise KeyError("of the user")
        assert not GUARDS.active and not GUARDS.operation


INPUTS_SHAPE = (2, 6, 5, 3)
BOX = Box((1, 2, 0, 0), (2, 5, 5, 3))
FLOAT, WHOLE = np.dtype(np.float32), np.dtype(np.int8)


def executing_inputs(comm):
    x, target = Input(INPUTS_SHAPE[1:], name="x"), Input((*INPUTS_SHAPE[1:3], 1), name="target", dtype="int32")
    loss = SoftmaxCrossEntropy(name="ce")(Conv(4, 3, padding=1, name="conv")(x), target)
    return Executor(
        Network({"loss": loss}), comm, get_backend("numpy"), INPUTS_SHAPE[0], Strategy({"height": comm.size})
    )


def arrays():
    """Return an array of integers in several types and memory layouts, by name."""
    plain = np.arange(np.prod(INPUTS_SHAPE)).reshape(INPUTS_SHAPE) % 7
    shut = plain.astype(float)
    shut.flags.writeable = False
    return {
        "int64": plain,
        "uint8": plain.astype(np.uint8),
        "bfloat16": plain.astype(ml_dtypes.bfloat16),
        "float16": plain.astype(np.float16),
        "big endian": plain.astype(">f8"),
        "read-only": shut,
        "channels first in memory": np.ascontiguousarray(plain.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
        "reversed": plain[:, ::-1][:, ::-1],
        "strided": np.repeat(plain, 2, axis=2)[:, :, ::2],
        "list": plain.tolist(),
        "nothing masked": np.ma.masked_array(plain, mask=False),
    }


@pytest.mark.parametrize("kind", arrays())
@pytest.mark.parametrize("dtype", [FLOAT, WHOLE], ids=str)
def test_arrays_that_are_taken(kind, dtype):
    array, plain = arrays()[kind], arrays()["int64"]
    block = block_of("x", array, INPUTS_SHAPE, BOX, dtype)
    np.testing.assert_array_equal(block.astype(dtype), plain[BOX.slices()])


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.zeros((4, 20, 20, 5)), FLOAT, r"expected the whole array of shape (2, 6, 5, 3), .*, got (4, 20, 20, 5)"),
        (np.zeros((1, 6, 5, 3)), FLOAT, "got (1, 6, 5, 3)"),
        (np.zeros((2, 3, 6, 5)), FLOAT, "samples first and channels last, got (2, 3, 6, 5)"),
        (np.zeros((2, 6, 5)), FLOAT, "got (2, 6, 5)"),
        (1.5, FLOAT, "got ()"),
        (np.zeros(INPUTS_SHAPE, complex), FLOAT, "expected an array of real numbers, got one of complex128"),
        (np.zeros(INPUTS_SHAPE, object), FLOAT, "got one of object"),
        (np.full(INPUTS_SHAPE, "1.0"), FLOAT, "got one of <U3"),
        (np.zeros(INPUTS_SHAPE, "M8[s]"), FLOAT, "got one of datetime64[s]"),
        (np.zeros(INPUTS_SHAPE, [("a", "f4")]), FLOAT, "got one of [('a', '<f4')]"),
        (np.ma.masked_less(np.zeros(INPUTS_SHAPE), 1), FLOAT, "expected an array without masked elements"),
        (np.full(INPUTS_SHAPE, 0.5), WHOLE, "expected whole numbers that int8 holds, got others in float64"),
        (np.full(INPUTS_SHAPE, np.nan), WHOLE, "expected whole numbers that int8 holds"),
        (np.full(INPUTS_SHAPE, 200), WHOLE, "expected whole numbers that int8 holds, got others in int64"),
        (np.full(INPUTS_SHAPE, -1, np.int64), np.dtype(np.uint8), "expected whole numbers that uint8 holds"),
    ],
)
def test_arrays_that_are_refused(array, dtype, message):
    message = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(UserError, match=f"^input 'x': .*{message}"):
        block_of("x", array, INPUTS_SHAPE, BOX, dtype)


@pytest.mark.mpi
def test_an_input_is_cut_into_blocks_with_their_halos():
    array = np.random.default_rng(1).standard_normal(INPUTS_SHAPE).astype(np.float32)
    with Communicator(MPI.COMM_WORLD) as comm, executing_inputs(comm) as executor:
        executor.set_input("x", array)
        region = executor.input("x")
        np.testing.assert_array_equal(region.array, array[region.box.slices()])


@pytest.mark.mpi
def test_an_array_that_one_rank_refuses_all_ranks_refuse():
    good, wrong = np.zeros(INPUTS_SHAPE), np.zeros((*INPUTS_SHAPE[:3], 4))
    with Communicator(MPI.COMM_WORLD) as comm, executing_inputs(comm) as executor:
        last = comm.rank == comm.size - 1
        where = f"^rank {comm.size - 1}: " if comm.size > 1 else "^"  # one rank alone is all ranks
        cases = [
            ("x", wrong if last else good, f"{where}input 'x': expected the whole array of shape "),
            ("y" if last else "x", good, f"{where}input: expected one of 'x', 'target', got 'y'$"),
            ("conv", good, r"^input: expected one of 'x', 'target', got 'conv'$"),
            ("x", [[1.0], [1.0, 2.0]] if last else good, f"{where}.*inhomogeneous shape"),
        ]
        for name, array, message in cases:
            with pytest.raises(ValueError, match=message):
                executor.set_input(name, array)
        executor.set_input("x", good + 1)
        assert (executor.input("x").array == 1).all(), "what was refused has changed nothing"


@pytest.mark.mpi
def test_classes_that_are_no_whole_numbers_are_refused_where_they_are_read():
    with Communicator(MPI.COMM_WORLD) as comm, executing_inputs(comm) as executor:
        classes = np.zeros((*INPUTS_SHAPE[:3], 1))
        executor.set_input("target", classes)
        classes[-1, -1] = 1.7
        with pytest.raises(UserError, match=r"input 'target': .*whole numbers.*int32"):
            executor.set_input("target", classes)
