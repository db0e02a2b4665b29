"""Tests of dense layers whose rows are gathered from all ranks: buffer sizes, contents, messages and bytes."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Layout
from halograd.layers.dense import RowGather, padded_rows
from halograd.program.runner import UnderWay
from halograd.testing import random_array

TRANSPORTS = ["auto", "mpi", "emulated:alpha=1e-4,beta=1e-9"]


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("features", [(1,), (3, 7), (16, 32), (25088, 1000), (10, 84)])
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_padded_rows_are_the_fewest_of_whole_cache_lines(rows, features, itemsize):
    found = padded_rows(rows, features, itemsize)
    fitting = (n for n in range(rows, rows + 65) if all(n * f * itemsize % 64 == 0 for f in features))
    assert found == next(fitting)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("batch, features, dtype", [(7, 5, "float64"), (2, 84, "float32"), (64, 700, "float32")])
def test_every_rank_has_all_rows_again_and_again(batch, features, dtype, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        layout = Layout.blocks((batch, features), (min(batch, comm.size), 1), comm.size)
        own = np.zeros(layout.boxes[comm.rank].shape, dtype)
        rows = padded_rows(-(-batch // comm.size), [features], own.itemsize)
        array = np.zeros((comm.size * rows, features), dtype)
        reduction = comm.reduction(array.reshape(-1), kind="replicated_dense", name="rows", method="all_gather")
        gather = RowGather(array, UnderWay(reduction), own, comm.rank * rows)
        comm.counters.reset()
        for step in range(3):
            whole = random_array((batch, features), "rows", step).astype(dtype)
            own[...] = whole[layout.boxes[comm.rank].slices()]
            gather.put()
            own[...] = math.nan  # it may serve others now
            gather.start()
            gather.finish()
            gather.finish()  # nothing is under way: returns at once
            for rank, box in enumerate(layout.boxes):
                part = gather.array[rank * rows : (rank + 1) * rows]
                np.testing.assert_array_equal(part[: box.shape[0]], whole[box.slices()])
                assert not part[box.shape[0] :].any()
        sent = comm.counters["replicated_dense"]
        several = int(comm.size > 1)
        assert (sent.messages, sent.bytes) == (3 * several, 3 * rows * features * own.itemsize * several)
        reduction.close()
