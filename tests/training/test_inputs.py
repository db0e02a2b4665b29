"""Tests of whole arrays as inputs of an executor: accepted arrays, and arrays that all ranks reject."""

import re

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Conv, Input, Network, SoftmaxCrossEntropy, Strategy
from halograd.training.executor import Executor
from halograd.training.inputs import block_of

SHAPE = (2, 6, 5, 3)
BOX = Box((1, 2, 0, 0), (2, 5, 5, 3))
FLOAT, WHOLE = np.dtype(np.float32), np.dtype(np.int8)


def executing(comm):
    x, target = Input(SHAPE[1:], name="x"), Input((*SHAPE[1:3], 1), name="target", dtype="int32")
    loss = SoftmaxCrossEntropy(name="ce")(Conv(4, 3, padding=1, name="conv")(x), target)
    return Executor(Network({"loss": loss}), comm, get_backend("numpy"), SHAPE[0], Strategy({"height": comm.size}))


def arrays():
    """Return an array of integers in several types and memory layouts, by name."""
    plain = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 7
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
    block = block_of("x", array, SHAPE, BOX, dtype)
    np.testing.assert_array_equal(block.astype(dtype), plain[BOX.slices()])


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (np.zeros((4, 20, 20, 5)), FLOAT, r"expected the whole array of shape (2, 6, 5, 3), .*, got (4, 20, 20, 5)"),
        (np.zeros((1, 6, 5, 3)), FLOAT, "got (1, 6, 5, 3)"),
        (np.zeros((2, 3, 6, 5)), FLOAT, "samples first and channels last, got (2, 3, 6, 5)"),
        (np.zeros((2, 6, 5)), FLOAT, "got (2, 6, 5)"),
        (1.5, FLOAT, "got ()"),
        (np.zeros(SHAPE, complex), FLOAT, "expected an array of real numbers, got one of complex128"),
        (np.zeros(SHAPE, object), FLOAT, "got one of object"),
        (np.full(SHAPE, "1.0"), FLOAT, "got one of <U3"),
        (np.zeros(SHAPE, "M8[s]"), FLOAT, "got one of datetime64[s]"),
        (np.zeros(SHAPE, [("a", "f4")]), FLOAT, "got one of [('a', '<f4')]"),
        (np.ma.masked_less(np.zeros(SHAPE), 1), FLOAT, "expected an array without masked elements"),
        (np.full(SHAPE, 0.5), WHOLE, "expected whole numbers that int8 holds, got others in float64"),
        (np.full(SHAPE, np.nan), WHOLE, "expected whole numbers that int8 holds"),
        (np.full(SHAPE, 200), WHOLE, "expected whole numbers that int8 holds, got others in int64"),
        (np.full(SHAPE, -1, np.int64), np.dtype(np.uint8), "expected whole numbers that uint8 holds"),
    ],
)
def test_arrays_that_are_refused(array, dtype, message):
    message = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(UserError, match=f"^input 'x': .*{message}"):
        block_of("x", array, SHAPE, BOX, dtype)


@pytest.mark.mpi
def test_an_input_is_cut_into_blocks_with_their_halos():
    array = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm) as executor:
        executor.set_input("x", array)
        region = executor.input("x")
        np.testing.assert_array_equal(region.array, array[region.box.slices()])


@pytest.mark.mpi
def test_an_array_that_one_rank_refuses_all_ranks_refuse():
    good, wrong = np.zeros(SHAPE), np.zeros((*SHAPE[:3], 4))
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm) as executor:
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
    with Communicator(MPI.COMM_WORLD) as comm, executing(comm) as executor:
        classes = np.zeros((*SHAPE[:3], 1))
        executor.set_input("target", classes)
        classes[-1, -1] = 1.7
        with pytest.raises(UserError, match=r"input 'target': .*whole numbers.*int32"):
            executor.set_input("target", classes)
